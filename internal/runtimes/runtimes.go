// Package runtimes is for container runtimes that do not speak CNI: it makes of what they tell of a network and of a
// container a call of the plugin, in process.
package runtimes

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"runtime"
	"runtime/debug"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/netns"
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

// Call carries out a verb of CNI by the plugin, in process. c is nil for a verb that is about no container. The result
// is ADD's, and nil for other verbs. The plugin's own errors are *types.Error; one of them reports a call that hangs.
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
	status, stdout, err := run(verb, c, stdin)
	if err != nil {
		return nil, fmt.Errorf("%s of network %s: %w", verb, n.Name, err)
	}
	if status != 0 {
		failure := new(types.Error)
		if err := json.Unmarshal(stdout, failure); err != nil || failure.Code == 0 {
			return nil, fmt.Errorf("%s of network %s ended without a result: %q", verb, n.Name, stdout)
		}
		return nil, failure
	}
	if verb != "ADD" {
		return nil, nil
	}
	result := new(current.Result)
	return result, json.Unmarshal(stdout, result)
}

// run calls the plugin on a goroutine of its own, in the calling thread's network namespace, and returns its exit
// status and what it printed. If the call hangs past its deadline, the plugin's watchdog reports that, and run returns
// while the call goes on. If the call panics, run returns the panic as an error.
func run(verb string, c *Container, stdin []byte) (status int, stdout []byte, _ error) {
	host, err := netns.Current()
	if err != nil {
		return 0, nil, err
	}
	type outcome struct {
		status int
		err    error
	}
	ended, out := make(chan outcome, 3), &bytes.Buffer{} // only the call or its watchdog prints, before it ends
	plugin := &cni.Plugin{
		Getenv: c.environment(verb), Stdin: bytes.NewReader(stdin), Stdout: out, Name: pluginName,
		Exit: func(status int) { ended <- outcome{status: status}; runtime.Goexit() },
	}
	go func() {
		defer func() {
			if what := recover(); what != nil {
				ended <- outcome{err: fmt.Errorf("panic: %v\n%s", what, debug.Stack())}
			}
		}()
		defer host.Close()
		if err := host.Do(func() error { ended <- outcome{status: plugin.Run()}; return nil }); err != nil {
			ended <- outcome{err: err}
		}
	}()
	end := <-ended
	return end.status, out.Bytes(), end.err
}

// MACOf returns the MAC of the container's interface from the result of an ADD, or "" if the result names none.
func MACOf(made *current.Result) string {
	for _, i := range made.Interfaces {
		if i.Sandbox != "" {
			return i.Mac
		}
	}
	return ""
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
