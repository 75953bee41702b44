package runtimes

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/cni"
)

const (
	pluginName = "tombolo"
	cniVersion = "1.1.0"

	// inIPAM is the prefix of the names of options that are fields of the ipam section.
	inIPAM = "ipam."
)

// options returns the fields of the plugin's configuration that a network can have as options. The map's value is false
// if the option is a number or a bool. It is true for strings, and for ipam.servers, a list. docs/config.md describes
// each field.
func options() map[string]bool {
	return map[string]bool{
		"mode": true, "bridge": true, "mtu": false, "vlan": false, "portIsolation": false, "hairpinMode": false,
		"ipMasq": false, "isDefaultGateway": false, "guard": false, "ingressPolicy": true,
		"egressPolicy": true, "publishFrom": true, "publishAdmission": false, "forwardMark": true,
		"enabledad": false,
		"uplink":    true, "defaultRoute": true, "lanGuard": false, "ipv6": true, "bridgeNFCall": false,
		"ingressRate": false, "ingressBurst": false, "egressRate": false, "egressBurst": false,
		"stateDir": true, "leaseDir": true, "deadline": true, "logFile": true, "logLevel": true,
		"ipam.clientID": true, "ipam.hostName": true, "ipam.timeout": true, "ipam.keeper": true,
		"ipam.detectConflicts": false, "ipam.rapidCommit": false, "ipam.priority": false,
		inIPAM + "servers": true,
	}
}

// policies returns the options that can limit a container in addition to its network's limits.
func policies() []string { return []string{"egressPolicy", "publishFrom"} }

// ContainerOptions returns the options that a container can have for itself. A container's option replaces the
// network's, except for egressPolicy and publishFrom: there the network's option applies too.
func ContainerOptions() []string {
	own := []string{"ingressRate", "ingressBurst", "egressRate", "egressBurst", "guard", "lanGuard"}
	return append(own, policies()...)
}

// These are the prefixes of Docker's own options.
const (
	ofDocker = "com.docker.network."
	ofBridge = ofDocker + "bridge."
)

// sameMeaning maps options of Docker's and podman's bridge drivers to Tombolo's. A list with one entry names Tombolo's
// option, and the option's value stays unchanged. A list with two entries has Tombolo's option and value for the values
// true and false.
func sameMeaning() map[string][]string {
	return map[string][]string{
		ofBridge + "name": {"bridge"}, ofDocker + "driver.mtu": {"mtu"},
		ofBridge + "enable_ip_masquerade": {"ipMasq=true", "ipMasq=false"},
		ofBridge + "enable_icc":           {"portIsolation=false", "portIsolation=true"},
		"no_default_route":                {"isDefaultGateway=false", "isDefaultGateway=true"},
		"isolate":                         {"ingressPolicy=same-bridge", "ingressPolicy=open"},
	}
}

// replacements returns advice for users of another driver's option that Tombolo lacks, by option.
func replacements() map[string]string {
	const (
		gateway = "ipMasq=false has others see containers' own addresses, and mode=lan puts containers on the LAN"
		prefix  = "name the interface for each container (podman: --network NAME:interface_name=net0)"
	)
	return map[string]string{
		ofBridge + "host_binding_ipv4": "name the address with each port, as in --publish 192.0.2.1:8080:80",
		ofBridge + "gateway_mode_ipv4": gateway, ofBridge + "gateway_mode_ipv6": gateway,
		ofBridge + "inhibit_ipv4": "mode=l2 has no gateway on the bridge", IfPrefix: prefix,
		ofDocker + "host_ipv4": "ipMasq=false, and an SNAT rule of your own",
		ofDocker + "host_ipv6": "ipMasq=false, and an SNAT rule of your own",
		"metric":               "ipam.priority is the metric of leased routes (mode=lan)",
		"parent":               "uplink names the NIC (mode=lan)",
		"macvlan_mode":         "portIsolation=true keeps containers apart (mode=lan)",
		"vrf":                  "a bridge in a VRF is not supported",
		"lease_timeout":        "ipam.timeout",
	}
}

// IfPrefix is Docker's option for the prefix of interface names in containers.
const IfPrefix = ofDocker + "container_iface_prefix"

// BridgeOption returns the name of the bridge from the network's options, or "" if no option names one.
func (n *Network) BridgeOption() string {
	return cmp.Or(n.Options["bridge"], n.Options[ofBridge+"name"])
}

// translate converts an option of another driver and its value into Tombolo's option with the same meaning (see
// sameMeaning). It returns all other options unchanged. A value that must be true or false, and is not, is an error.
func translate(name, text string) (string, string, error) {
	same := sameMeaning()[name]
	switch len(same) {
	case 0:
		return name, text, nil
	case 1:
		return same[0], text, nil
	}

	is, err := strconv.ParseBool(text)
	if err != nil {
		return name, text, fmt.Errorf("option %s=%q: write true or false; the option here is %s", name, text, same[0])
	}

	if !is {
		same = same[1:]
	}

	name, text, _ = strings.Cut(same[0], "=")
	return name, text, nil
}

// configuration returns the plugin's configuration for a container in the network. It returns an error for unknown and
// invalid options. Even then, the result suffices for a DEL.
func (n *Network) configuration(c *Container) (map[string]any, error) {
	conf := map[string]any{"cniVersion": cniVersion, "name": n.Name, "type": pluginName}
	ipam := map[string]any{}
	var errs []error
	asked := map[string]any{"mac": n.MAC(c), "portMappings": c.Ports}
	all := map[string]string{}
	maps.Copy(all, n.Options)
	for name, value := range c.Options {
		if slices.Contains(policies(), name) {
			asked[name] = value
		} else {
			all[name] = value
		}
	}

	for _, option := range slices.Sorted(maps.Keys(all)) {
		var value any
		name, text, err := translate(option, all[option])
		if err == nil {
			value, err = valueOf(name, text)
		}
		switch field, ofIPAM := strings.CutPrefix(name, inIPAM); {
		case err != nil:
			errs = append(errs, err)
		case ofIPAM:
			ipam[field] = value
		default:
			conf[name] = value
		}
	}

	if conf["bridge"] == nil && n.Bridge != "" {
		conf["bridge"] = n.Bridge
	}

	if n.Internal {
		conf["internal"] = true
	}

	errs = append(errs, n.addresses(c, conf, ipam))
	conf["runtimeConfig"] = asked
	return conf, errors.Join(errs...)
}

// valueOf returns the value of an option for the plugin's configuration in JSON. For an option that takes a text, the
// value is the text itself, and for ipam.servers it is a list. For all other options, the text must be JSON, such as a
// number or a bool. The plugin later refuses a value of a wrong type. valueOf returns an error for an unknown option,
// and for text that is not JSON although the option needs it.
func valueOf(name, text string) (any, error) {
	isText, known := options()[name]
	var value any
	switch instead := replacements()[name]; {
	case instead != "":
		return nil, fmt.Errorf("option %q is not known here: %s", name, instead)
	case !known:
		return nil, fmt.Errorf("option %q is not known: %s are", name,
			strings.Join(slices.Sorted(maps.Keys(options())), ", "))
	case name == inIPAM+"servers":
		return strings.Split(text, ","), nil
	case isText:
		return text, nil
	}

	if err := json.Unmarshal([]byte(text), &value); err != nil {
		return nil, fmt.Errorf("option %s=%q: write a number, true or false", name, text)
	}

	return value, nil
}

// addresses adds the section ipam to the configuration conf. The section contains either the addresses that the runtime
// assigned, or the options in the map ipam for leasing an address. A network of mode l2 without a subnet gets no
// section. addresses returns an error for options that do not fit the network's mode, and for a gateway network without
// a subnet.
func (n *Network) addresses(c *Container, conf, ipam map[string]any) error {
	switch {
	case len(n.Subnets) > 0:
		section := map[string]any{"type": "static", "addresses": n.assignedAddresses(c)}
		if n.Mode() == "lan" && ipam["detectConflicts"] != nil {
			section["detectConflicts"] = ipam["detectConflicts"]
			delete(ipam, "detectConflicts")
		}
		conf["ipam"] = section
	case n.Mode() == "lan":
		ipam["type"] = "dhcp"
		if ipam["clientID"] == nil {
			n.identify(c, ipam)
		}
		conf["ipam"] = ipam
		return nil
	case n.Mode() == "gateway":
		return fmt.Errorf("network %s has no subnet: name one, or use mode=lan, in which containers lease "+
			"their addresses", n.Name)
	}

	if len(ipam) > 0 {
		return errors.New("options that begin with ipam. are for mode=lan without a subnet, in which containers " +
			"lease their addresses")
	}

	return nil
}

// identify sets the fields of the ipam section that identify the container to a DHCP server. If Container.Lasting is
// set, the identity consists of the names of container and network. If not, a requested MAC is the identity, unless it
// equals the MAC that the plugin derives for the container. A runtime that attaches a container again may request the
// derived MAC. The identity must then stay as it was.
func (n *Network) identify(c *Container, ipam map[string]any) {
	switch {
	case c.Lasting:
		ipam["clientID"] = "pod"
		ipam["provide"] = []map[string]string{{"option": "dhcp-client-identifier", "value": c.Name + "/" + n.Name}}
	case c.MAC != "" && !strings.EqualFold(c.MAC, cni.MACOf(c.ID+"/"+n.Name+"/"+c.IfName).String()):
		ipam["clientID"] = "mac"
	}
}

// MAC returns the MAC that the runtime requests for the container, as text. Without a request, and if Container.Lasting
// is set, it derives a MAC from the names of container and network. Home routers recognize a machine by its MAC.
// Without a request and without Lasting, it returns "", and the plugin chooses a MAC.
func (n *Network) MAC(c *Container) string {
	if c.MAC != "" || !c.Lasting {
		return c.MAC
	}
	return cni.MACOf(c.Name + "/" + n.Name).String()
}

// assignedAddresses returns the container's addresses, each with the gateway of its subnet.
func (n *Network) assignedAddresses(c *Container) []map[string]string {
	var list []map[string]string
	for _, a := range c.Addresses {
		one := map[string]string{"address": a.String()}
		for _, s := range n.Subnets {
			if s.Prefix.Contains(a.Addr()) && s.Gateway.IsValid() {
				one["gateway"] = s.Gateway.String()
			}
		}
		list = append(list, one)
	}

	return list
}
