// Package netavark implements netavark's plugin interface, for podman 5. Each call has a verb as its first argument,
// and reads and writes JSON on stdin and stdout (plugin-API.md of github.com/containers/netavark).
package netavark

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime/debug"
	"slices"
	"strings"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/runtimes"
)

// Run executes a call of the netavark API and returns the process's exit status. called is false if the first argument
// is not a verb of the API. Run prints the answer or the error to out, as the API demands.
func Run(args []string, in io.Reader, out io.Writer) (status int, called bool) {
	if len(args) == 0 || !slices.Contains([]string{"create", "setup", "teardown", "info"}, args[0]) {
		return 0, false
	}

	answer, err := execute(args, in)
	if err != nil {
		answer, status = map[string]string{"error": err.Error()}, 1
	}

	to := json.NewEncoder(out)
	to.SetEscapeHTML(false) // a message may contain a command with &&
	if answer != nil && to.Encode(answer) != nil {
		status = 1
	}

	return status, true
}

func execute(args []string, in io.Reader) (any, error) {
	switch {
	case args[0] == "info":
		build, _ := debug.ReadBuildInfo()
		return map[string]string{"version": build.Main.Version, "api_version": "1.0.0"}, nil
	case os.Geteuid() != 0 || os.Getenv("_CONTAINERS_USERNS_CONFIGURED") == "done": // set by rootless podman
		return nil,
			errors.New(
				"podman without root may not change the host's network, which a network of tombolo is in: run podman " +
					"as root")
	}

	data, err := io.ReadAll(io.LimitReader(in, cni.MaxStdin))
	if err != nil {
		return nil, err
	}

	if args[0] == "create" {
		return create(data)
	}

	return attach(args[0], data, strings.Join(args[1:], " "))
}

// attach attaches a container for the verb setup, and returns its addresses. For teardown it detaches the container,
// even if the container's options are not valid. path is the path of the container's network namespace.
func attach(verb string, data []byte, path string) (any, error) {
	a := new(attachment)
	if err := json.Unmarshal(data, a); err != nil {
		return nil, fmt.Errorf("%s reads a container's attachment as JSON: %w", verb, err)
	}

	c, err := a.container(path)
	if verb == "teardown" {
		_, err = a.Network.Call("DEL", c)
		return nil, err
	}

	if err != nil {
		return nil, err
	}

	result, err := a.Network.Call("ADD", c)
	if err != nil {
		return nil, err
	}

	return a.status(result), nil
}

// attachment is netavark's description of a container in a network.
type attachment struct {
	ContainerID string  `json:"container_id"`
	Name        string  `json:"container_name"`
	Network     network `json:"network"`
	Ports       []struct {
		ContainerPort int    `json:"container_port"`
		HostIP        string `json:"host_ip"`
		HostPort      int    `json:"host_port"`
		Protocol      string `json:"protocol"` // one or several protocols, separated by commas; empty means TCP
		Range         int    `json:"range"`    // number of consecutive ports; 0 means one
	} `json:"port_mappings"`
	Options struct {
		Interface string            `json:"interface_name"`
		IPs       []netip.Addr      `json:"static_ips"`
		MAC       string            `json:"static_mac"`
		Ours      map[string]string `json:"options"` // podman's --network NAME:KEY=VALUE
	} `json:"network_options"`
}

// container converts podman's description of the attachment into a runtimes.Container. Even with an error, its result
// suffices for a teardown.
func (a *attachment) container(path string) (*runtimes.Container, error) {
	o := &a.Options
	c := &runtimes.Container{ID: a.ContainerID, Name: a.Name, NetNS: path, IfName: o.Interface, MAC: o.MAC,
		Ports: a.ports(), Options: o.Ours}
	for name := range o.Ours {
		if own := runtimes.ContainerOptions(); !slices.Contains(own, name) {
			return c, fmt.Errorf("--network %s:%s is not known: podman's options are, and %s", a.Network.Name, name,
				strings.Join(own, ", "))
		}
	}

	if len(a.Network.Subnets) == 0 {
		// When podman reloads a network, it requests the previous MAC and addresses. So allow addresses together with
		// a MAC.
		if len(o.IPs) > 0 && o.MAC == "" {
			return c,
				fmt.Errorf(
					"--ip %s: containers in network %s lease their addresses: use --mac-address, and have the DHCP "+
						"server reserve the address for it", o.IPs[0], a.Network.Name)
		}
		return c, nil
	}

	for _, ip := range o.IPs {
		i := slices.IndexFunc(a.Network.Subnets, func(s runtimes.Subnet) bool { return s.Prefix.Contains(ip) })
		if i < 0 {
			return c, fmt.Errorf("--ip %s is in no subnet of network %s", ip, a.Network.Name)
		}
		c.Addresses = append(c.Addresses, netip.PrefixFrom(ip, a.Network.Subnets[i].Prefix.Bits()))
	}

	return c, nil
}

// ports returns the port mappings. It splits a mapping with several protocols into one for each protocol.
func (a *attachment) ports() []cni.PortMapping {
	var list []cni.PortMapping
	for _, m := range a.Ports {
		for _, protocol := range strings.Split(cmp.Or(m.Protocol, "tcp"), ",") {
			list = append(list, cni.PortMapping{HostPort: m.HostPort, ContainerPort: m.ContainerPort, Range: m.Range,
				Protocol: protocol, HostIP: m.HostIP})
		}
	}
	return list
}

// status returns netavark's StatusBlock for the result of an ADD.
func (a *attachment) status(result *current.Result) any {
	subnets, servers, search := []map[string]string{}, []string{}, result.DNS.Search
	for _, ip := range result.IPs {
		one := map[string]string{"ipnet": ip.Address.String()}
		if ip.Gateway != nil {
			one["gateway"] = ip.Gateway.String()
		}
		subnets = append(subnets, one)
	}

	for _, text := range result.DNS.Nameservers {
		if server, err := netip.ParseAddr(text); err == nil && server.Zone() == "" { // netavark cannot parse IPv6 zones
			servers = append(servers, text)
		}
	}

	if len(search) == 0 && result.DNS.Domain != "" {
		search = []string{result.DNS.Domain}
	}

	made := map[string]any{"mac_address": runtimes.MACOf(result), "subnets": subnets}
	return map[string]any{
		"dns_server_ips": servers, "dns_search_domains": search,
		"interfaces": map[string]any{a.Options.Interface: made},
	}
}
