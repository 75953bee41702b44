// Package runtimes serves container runtimes that do not speak CNI. It converts their description of a network and a
// container into a call of the plugin, and makes that call in the same process.
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

// Network is a runtime's description of a network. Its JSON form has the field names of netavark.
type Network struct {
	Name    string            `json:"name"`              // the name in records and in the output of `tombolo ls`
	Options map[string]string `json:"options"`           // see the function options for the keys
	Bridge  string            `json:"network_interface"` // the bridge, unless an option names one
	// Subnets are the subnets of the addresses that the runtime assigns. Without subnets, containers in a network
	// with mode "lan" lease their addresses by DHCP.
	Subnets  []Subnet `json:"subnets"`
	Internal bool     `json:"internal"`           // containers reach only each other and the host
	IfPrefix string   `json:"ifPrefix,omitempty"` // see the constant IfPrefix
}

// Subnet is a subnet of a runtime's network, with its gateway.
type Subnet struct {
	Prefix     netip.Prefix    `json:"subnet"`
	Gateway    netip.Addr      `json:"gateway,omitzero"` // the zero Addr means none
	LeaseRange json.RawMessage `json:"lease_range,omitempty"`
}

// Mode returns the field mode of the plugin's configuration for the network. By default it is "gateway".
func (n *Network) Mode() string { return cmp.Or(n.Options["mode"], "gateway") }

// Container is a runtime's description of a container's interface in a network.
type Container struct {
	ID     string
	IfName string // the interface's name in the container
	NetNS  string // the path of the container's network namespace; empty if it is gone
	// Moves is set if the runtime moves the interface from NetNS to another namespace after the ADD.
	// network.Change.Moved then records that namespace.
	Moves bool
	Name  string // also the host name in DHCP requests
	// Lasting is set if the next container with this name must get the same address from the DHCP server.
	Lasting   bool
	MAC       string // the requested MAC as text; if empty, see Network.MAC
	Addresses []netip.Prefix
	Ports     []cni.PortMapping
	Options   map[string]string // the container's own options: see ContainerOptions
}

// Call runs a CNI verb of the plugin in this process, for the container c. c is nil for a verb that concerns no
// container. GC removes the attachments of the network, except those that another call works on. Only ADD returns a
// result; for other verbs the result is nil. Invalid options are an error, except for DEL and GC. An error that the
// plugin prints is a *types.Error, also if the call exceeds its deadline.
func (n *Network) Call(verb string, c *Container) (*current.Result, error) {
	c = cmp.Or(c, &Container{})
	conf, err := n.configuration(c)
	if err != nil && verb != "DEL" && verb != "GC" {
		return nil, err
	}

	if verb == "GC" {
		conf["cni.dev/valid-attachments"] = []string{} // the network is being deleted, and has none
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

// run calls the plugin on a new goroutine, in the calling thread's network namespace, and returns its exit status and
// output. If the call exceeds its deadline, run returns the output of the plugin's watchdog, while the call continues.
// If the call panics, run returns the panic as an error.
func run(verb string, c *Container, stdin []byte) (status int, stdout []byte, _ error) {
	host, err := netns.Current()
	if err != nil {
		return 0, nil, err
	}

	type outcome struct {
		status int
		err    error
	}
	ended, out := make(chan outcome, 3), &bytes.Buffer{} // either the call or its watchdog writes to out
	plugin := &cni.Plugin{
		Getenv: c.environment(verb), Stdin: bytes.NewReader(stdin), Stdout: out, Name: pluginName, Moves: c.Moves,
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

// MACOf returns the MAC of the container's interface in the result of an ADD, or "" if the result has no interface in a
// container.
func MACOf(made *current.Result) string {
	for _, i := range made.Interfaces {
		if i.Sandbox != "" {
			return i.Mac
		}
	}
	return ""
}

// environment returns a function in place of os.Getenv: it returns the values of the environment variables of the CNI
// specification for a call of verb.
func (c *Container) environment(verb string) func(string) string {
	has := map[string]string{
		"CNI_COMMAND": verb, "CNI_CONTAINERID": c.ID, "CNI_IFNAME": c.IfName, "CNI_NETNS": c.NetNS,
	}
	if c.Name != "" {
		has["CNI_ARGS"] = "K8S_POD_NAME=" + c.Name
	}
	return func(name string) string { return has[name] }
}
