// Package conflist explains a network's configuration file and lists the errors in it. It changes nothing.
package conflist

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// Report is the result of examining one file.
type Report struct {
	Problems []string // errors that ADD would report, and errors in the list of plugins
	Warnings []string // probable mistakes that ADD nevertheless accepts
	Plan     []string // the steps of the first ADD; empty if there are problems
	List     bool     // the file is a list of plugins (.conflist)
	Single   bool     // the file is the configuration of a single plugin (.conf)
}

// list holds the fields that this package reads in a configuration file. The file is a list of plugins, or the
// configuration of one plugin.
type list struct {
	CNIVersion   string            `json:"cniVersion"`
	Name         string            `json:"name"`
	Plugins      []json.RawMessage `json:"plugins"`
	Type         string            `json:"type"`
	Capabilities map[string]bool   `json:"capabilities"`
}

// Examine lists the problems of a configuration file and the steps of its first ADD. data is a list of plugins, or the
// configuration of one plugin. If Examine cannot read the fields of type list in data, it does not examine the
// plugins.
func Examine(data []byte) *Report {
	r := &Report{}
	var l list
	for _, err := range read(data, &l) {
		r.problem("%v", err)
	}

	if len(r.Problems) > 0 {
		return r
	}

	if l.Plugins == nil && l.Type != "" {
		r.Single = true
		if !isOurs(l.Type) && !isNamed(l.Type) {
			r.problem("its plugin is not tombolo: %s", l.Type)
			return r
		}
		r.plugin(data, &l, nil)
		return r
	}

	if len(l.Plugins) == 0 {
		r.problem(`it has no plugins: a list has them in "plugins", and the conf of one plugin has a "type"`)
		return r
	}

	r.List = true
	parts := make([]list, len(l.Plugins))
	var types []string
	for i, raw := range l.Plugins {
		p := &parts[i]
		found := read(raw, p)
		for _, err := range found {
			r.problem("plugins[%d]: %v", i, err)
		}

		if len(found) == 0 && p.Type == "" {
			r.problem("plugins[%d] has no type", i)
		}

		types = append(types, p.Type)
	}

	reads := isOurs
	switch {
	case slices.ContainsFunc(types, isOurs) || len(r.Problems) > 0:
	case slices.ContainsFunc(types, isNamed):
		reads = isNamed
		r.Plan = append(r.Plan, "names: read as Tombolo reads them in place of the reference plugins (tombolo install "+
			"--names)")
	default:
		r.problem("none of its plugins is tombolo: %s", strings.Join(types, ", "))
	}

	for i, raw := range l.Plugins {
		var fields map[string]json.RawMessage
		if !reads(parts[i].Type) || json.Unmarshal(raw, &fields) != nil {
			continue
		}

		// Add the list's name and version to the plugin's configuration, as a runtime does.
		for key, value := range map[string]string{"cniVersion": l.CNIVersion, "name": l.Name} {
			fields[key], _ = json.Marshal(value)
		}

		merged, _ := json.Marshal(fields)
		before := len(r.Problems)
		r.plugin(merged, &parts[i], types[:i])
		for j := before; j < len(r.Problems); j++ {
			r.Problems[j] = fmt.Sprintf("plugins[%d]: %s", i, r.Problems[j])
		}
	}

	r.doubles(parts)
	if len(r.Problems) > 0 {
		r.Plan, r.Warnings = nil, nil
	}

	return r
}

// warn adds warnings about settings that ADD silently accepts. For example, a runtime passes only declared
// capabilities that it knows, so a misspelt one has no effect.
func (r *Report) warn(nw *network.Network, capabilities map[string]bool) {
	known := []string{"portMappings", "bandwidth", "ipRanges", "ips", "mac", "dns", "egressPolicy", "publishFrom",
		"io.kubernetes.cri.pod-annotations"}
	unknown := maps.Clone(capabilities)
	maps.DeleteFunc(unknown, func(name string, on bool) bool { return !on || slices.Contains(known, name) })
	for _, name := range slices.Sorted(maps.Keys(unknown)) {
		text := fmt.Sprintf("capability %q has no effect here, since Tombolo does not know it", name)
		if near := strict.Nearest(name, known); near != "" {
			text += fmt.Sprintf(": did you mean %q?", near)
		}
		r.Warnings = append(r.Warnings, text)
	}

	if nw != nil {
		r.warnOfLinks(nw)
	}

	if nw != nil && nw.Origin.Type == "" && nw.Gateway {
		r.Warnings = append(r.Warnings,
			`without an ipam section pods get no addresses, and the bridge no gateway: set "ipam", or "mode": "l2"`)
	}
}

// warnOfLinks adds a warning if the bridge exists on this machine and delays new ports. It also adds warnings about
// links in publishFrom that do not exist.
func (r *Report) warnOfLinks(nw *network.Network) {
	links, err := bridge.Dial(nil)
	if err != nil {
		return
	}
	defer links.Close()

	l, err := links.Link(context.Background(), nw.Bridge)
	if err == nil && l.Bridge != nil && l.Bridge.PortDelay > 0 {
		r.Warnings = append(r.Warnings, endpoint.SlowPorts(nw.Bridge, l.Bridge.PortDelay))
	}

	r.Warnings = append(r.Warnings, endpoint.MissingLinks(nw.PublishFrom, func(name string) bool {
		_, err := links.Link(context.Background(), name)
		return name == nw.Bridge || !errors.Is(err, fs.ErrNotExist)
	})...)
}

// read decodes the fields that a runtime uses into l, and returns the errors. All other fields belong to the plugins.
func read(data []byte, l *list) strict.Problems { return strict.Unmarshal(data, l, strict.Everything) }

func isOurs(kind string) bool { return filepath.Base(kind) == "tombolo" }

// isNamed reports whether kind is the name of a reference plugin that Tombolo can replace.
func isNamed(kind string) bool { return slices.Contains(cni.Names(), filepath.Base(kind)) }

// named returns a text about the work that Tombolo does in place of the reference plugin with this name. It returns ""
// for a plugin that makes interfaces or assigns addresses, and for an unknown name.
func named(name string) string {
	return map[string]string{
		"bandwidth": "a pod's traffic is limited to the rates of the configuration or the runtime",
		"firewall":  "other firewalls let packets of pods pass",
		"loopback":  "lo is set up",
		"portmap":   "ports that the runtime names are published on the host",
		"tuning":    "kernel parameters and attributes of the pod's interface are set, if the configuration names any",
	}[name]
}

func (r *Report) problem(format string, args ...any) {
	r.Problems = append(r.Problems, fmt.Sprintf(format, args...))
}

// doubles adds a problem for each plugin portmap or bandwidth that would repeat the work of the plugin tombolo,
// because both declare the same capability.
func (r *Report) doubles(parts []list) {
	does := map[string]string{"portmap": "portMappings", "bandwidth": "bandwidth"}
	ours := map[string]bool{}
	for _, p := range parts {
		if isOurs(p.Type) {
			maps.Copy(ours, p.Capabilities)
		}
	}
	for i, p := range parts {
		if capability := does[p.Type]; p.Capabilities[capability] && ours[capability] {
			r.problem("plugins[%d]: %s and tombolo both have the capability %s, so that both would do it: take it "+
				"from one", i, p.Type, capability)
		}
	}
}

// plugin examines the configuration of one plugin, and adds its problems to the report. If there are none, it adds the
// warnings and the steps of an ADD. For a plugin that only assigns addresses, it always adds a warning and no steps.
// The plugin's type may be tombolo or the name of a reference plugin. The type determines how Tombolo reads the
// configuration. The list before contains the types of the preceding plugins.
func (r *Report) plugin(data []byte, l *list, before []string) {
	name, already := filepath.Base(l.Type), len(r.Problems)
	if isOurs(name) {
		name = ""
	}

	nw, found := cni.Examine(name, data)
	r.Problems = append(r.Problems, found...)
	makes := slices.ContainsFunc(before, func(kind string) bool { return filepath.Base(kind) != "loopback" })
	if nw == nil && named(name) == "" {
		r.Warnings = append(r.Warnings, name+
			" gives addresses but makes no interface: name it in ipam.type of a plugin that makes one")
		return
	}

	if nw == nil && !makes && name != "loopback" {
		r.problem("%s works on the interface that a plugin before it makes, and there is none", name)
	}

	if len(r.Problems) > already {
		return
	}

	r.warn(nw, l.Capabilities)
	if nw == nil {
		r.Plan = append(r.Plan, name+": "+named(name))
		if name == "portmap" && !l.Capabilities["portMappings"] {
			r.Warnings = append(r.Warnings,
				"portmap publishes no ports, since the capability portMappings is not declared")
		}
		return
	}

	r.Plan = append(r.Plan, plan(nw)...)
	if name == "" { // of the reference plugins, only portmap publishes ports
		r.Plan = append(r.Plan, ports(l.Capabilities))
	}

	if len(before) > 0 {
		r.Plan = append(r.Plan, "chain: it runs after "+strings.Join(before, ", "))
	}
}

// plan describes the steps of the first ADD of a network, one line for each step, except the publication of ports.
func plan(nw *network.Network) []string {
	size := cmp.Or(nw.MTU, nw.DefaultMTU)
	mtu := fmt.Sprintf("MTU %d", size)
	if size == 0 {
		mtu = "with the MTU of the default route's link"
	}

	lines := []string{fmt.Sprintf("bridge: network %q is on bridge %s, which is made if it is missing, %s", nw.Name,
		nw.Bridge, mtu)}
	if nw.Uplink != "" {
		lines = append(lines, fmt.Sprintf(
			"uplink: %s stays the host's, with its addresses and its manager, and %s shares it (tombolo uplink plan "+
				"%s %s says how)",
			nw.Uplink, nw.Bridge, nw.Uplink, nw.Bridge))
	}
	return append(lines, addresses(nw), gateway(nw), firewall(nw))
}

func addresses(nw *network.Network) string {
	switch {
	case nw.Origin.Type == "":
		return "addresses: none, since there is no ipam section"
	case nw.Origin.Type == "dhcp":
		return "addresses: pods lease them by DHCP"
	case len(nw.Subnets) == 0 && nw.Origin.Type == "host-local":
		return "addresses: from the ranges that the runtime hands over by the capability ipRanges (host-local)"
	case len(nw.Subnets) == 0:
		return fmt.Sprintf("addresses: from the IPAM plugin %q", nw.Origin.Type)
	}

	where := ""
	if nw.Origin.Dir != "" {
		where = ", reserved in " + filepath.Join(nw.Origin.Dir, nw.Name)
	}

	return fmt.Sprintf("addresses: from %s (%s)%s", printable.List(nw.Subnets, ", "), nw.Origin.Type, where)
}

func gateway(nw *network.Network) string {
	const parameters = " (net.ipv4.conf.*.forwarding, net.ipv6.conf.*.force_forwarding)"
	switch {
	case nw.Exit == network.ExitHost:
		return "gateway: the pods' default route leads to the host; if it is no router, it forwards for pods alone" +
			parameters
	case nw.Exit == network.ExitRouter:
		return "gateway: the pods' default route leads to the router; the host forwards only if pods publish ports" +
			parameters
	case nw.Origin.Type == "":
		return "gateway: none, since there are no addresses"
	case nw.Gateway:
		pods := "pods get the routes of the ipam section"
		if nw.DefaultGateway {
			pods = "the pods' default route leads there"
		}
		return "gateway: the bridge has the gateways' addresses; if the host is no router, it forwards for pods alone" +
			parameters + "; " + pods
	}

	return "gateway: none; the host has no part in what pods send"
}

func firewall(nw *network.Network) string {
	masquerade := "no masquerade"
	if nw.Masquerade {
		masquerade = "packets of pods to other subnets get the host's address"
		for i, p := range nw.NonMasquerade {
			masquerade += map[bool]string{true: ", except to ", false: " and "}[i == 0] + p.String()
		}
	}

	parts := []string{masquerade, "ingress policy " + nw.Policy.String()}
	switch nw.Guard {
	case nft.GuardMAC:
		parts = append(parts, "pods can send only from their own MAC")
	case nft.GuardAddresses, nft.GuardUntrusted:
		parts = append(parts, "pods can send only from their own MAC and addresses")
	}

	if nw.Isolated && nw.Policy != nft.Isolated {
		parts = append(parts, "ports are isolated from each other")
	}

	return "firewall: " + strings.Join(parts, "; ")
}

func ports(capabilities map[string]bool) string {
	if !capabilities["portMappings"] {
		return "ports: none can be published, since the capability portMappings is not declared"
	}
	return "ports: published on the host"
}
