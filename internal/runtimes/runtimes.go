// Package runtimes is for container runtimes that do not speak CNI: it makes of what they tell of a network and of a
// container a call of the plugin, in process.
package runtimes

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni"
)

// Network is what a runtime tells of a network; in JSON it has the names of netavark.
type Network struct {
	Name    string            `json:"name"`              // as records and `tombolo ls` have it
	Options map[string]string `json:"options"`           // see options
	Bridge  string            `json:"network_interface"` // where no option names one
	// Subnets are those that the runtime gives addresses from. Without any, a network in mode "lan" leases them.
	Subnets  []Subnet `json:"subnets"`
	Internal bool     `json:"internal"` // its containers reach each other and the host only
}

// Subnet is one of a network.
type Subnet struct {
	Prefix     netip.Prefix    `json:"subnet"`
	Gateway    netip.Addr      `json:"gateway,omitzero"` // the zero Addr: none
	LeaseRange json.RawMessage `json:"lease_range,omitempty"`
}

// Mode is that of the plugin's configuration.
func (n *Network) Mode() string { return cmp.Or(n.Options["mode"], "gateway") }

// Container is what a runtime tells of a container's interface in a network.
type Container struct {
	ID     string
	IfName string // the interface in the container
	NetNS  string // the path of the container's namespace; empty where that is gone
	Name   string // a server is told it as the host name
	// Lasting says that the next container of the name is to lease the same address.
	Lasting   bool
	MAC       string // as text; empty: one is made
	Addresses []netip.Prefix
	Ports     []cni.PortMapping
}

// Call has the plugin carry out a verb of CNI. c is nil for a verb that is about no container. The result is that of
// ADD, and nil for other verbs. An error is the plugin's own, *types.Error.
func (n *Network) Call(verb string, c *Container) (*current.Result, error) {
	if c == nil {
		c = &Container{}
	}
	conf, err := n.configuration(c)
	if err != nil && verb != "DEL" && verb != "GC" {
		return nil, err
	}
	if verb == "GC" {
		conf["cni.dev/valid-attachments"] = []string{} // a network that is to go has none
	}
	stdin, err := json.Marshal(conf)
	if err != nil {
		return nil, err
	}
	var stdout bytes.Buffer
	plugin := &cni.Plugin{
		Getenv: c.environment(verb), Stdin: bytes.NewReader(stdin), Stdout: &stdout, Name: pluginName,
		Exit: func(int) { panic(stdout.String()) }, // nothing else ends what hangs
	}
	if plugin.Run() != 0 {
		failure := new(types.Error)
		if err := json.Unmarshal(stdout.Bytes(), failure); err != nil {
			return nil, fmt.Errorf("%s of network %s: %w", verb, n.Name, err)
		}
		return nil, failure
	}
	if verb != "ADD" {
		return nil, nil
	}
	result := new(current.Result)
	return result, json.Unmarshal(stdout.Bytes(), result)
}

// MACOf is that of the container's interface, by the result of an ADD.
func MACOf(made *current.Result) string {
	i := slices.IndexFunc(made.Interfaces, func(i *current.Interface) bool { return i.Sandbox != "" })
	return made.Interfaces[i].Mac
}

// environment has a call's parameters as the CNI specification names them.
func (c *Container) environment(verb string) func(string) string {
	has := map[string]string{
		"CNI_COMMAND": verb, "CNI_CONTAINERID": c.ID, "CNI_IFNAME": c.IfName, "CNI_NETNS": c.NetNS,
	}
	if c.Name != "" {
		has["CNI_ARGS"] = "K8S_POD_NAME=" + c.Name
	}
	return func(name string) string { return has[name] }
}
