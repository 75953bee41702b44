package cni

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

// Names are those of the reference's plugins by which the program is such a plugin: of version 1.9.1 of
// github.com/containernetworking/plugins.
func Names() []string {
	return []string{"bandwidth", "bridge", "firewall", "host-local", "loopback", "portmap", "static", "tuning"}
}

// As is the argument by which the file of such a name starts the program, before the file's path: its first
// line is "#!/opt/cni/bin/tombolo as".
const As = "as"

// Kept is where the program would be that had a name before; path is the name's own.
func Kept(path string) string { return path + ".reference" }

// A named plugin is one of the reference's, but for bridge.
type named struct {
	// run carries out one verb. Plugins that work on interfaces of others get
	// those alone that are about an attachment of ours: ADD, DEL and CHECK. The result is printed in the
	// configuration's version; nil prints nothing. A result that this version cannot say has run
	// called once more, with DEL.
	run func(*call, context.Context, *NetConf) (*current.Result, error)
	// examine says what ADD would find wrong with the configuration, by that alone.
	examine func(*call) error
	first   string // the first version that it speaks
	others  bool   // it works on interfaces that other plugins made
}

// named finds the plugin of the reference's that has the call's name; nil for every other name, by which the
// program is itself.
func (p *Plugin) named() *named {
	all := SupportedVersions()[0]
	ok := func(*call) error { return nil }
	switch p.Name {
	case "loopback":
		return &named{(*call).loopback, ok, all, false}
	case "host-local", "static":
		return &named{(*call).ipamPlugin, ok, all, false}
	case "bandwidth":
		return &named{(*call).bandwidth, examines((*call).readBandwidth), "0.3.0", true}
	case "firewall":
		return &named{(*call).firewall, examines((*call).readFirewall), "0.4.0", true}
	case "portmap":
		return &named{(*call).portmap, (*call).examinePortmap, all, true}
	case "tuning":
		return &named{(*call).tuning, examines((*call).readTuning), all, true}
	}
	return nil
}

func examines[T any](read func(*call) (T, error)) func(*call) error {
	return func(c *call) error {
		_, err := read(c)
		return err
	}
}

// supported are the versions of the specification that the plugin of the call's name speaks.
func (p *Plugin) supported() []string {
	all := SupportedVersions()
	if n := p.named(); n != nil {
		return all[slices.Index(all, n.first):]
	}
	return all
}

// byName carries out a verb of a plugin of the reference's.
func (c *call) byName(n *named) error {
	var said []byte
	err := c.lenientVerb(func(ctx context.Context, conf *NetConf) error {
		err := c.refuseOwnNamespace()
		if err == nil {
			said, err = c.carryOut(ctx, conf, n)
		}
		return err
	})
	if err != nil || said == nil {
		return err
	}
	return c.print(said)
}

// carryOut has a verb carried out by the programs whose it is, and gives what to print.
func (c *call) carryOut(ctx context.Context, conf *NetConf, n *named) ([]byte, error) {
	by := carriers{ours: true}
	if n.others {
		var err error
		if by, err = c.carriers(conf); err != nil {
			return nil, err
		}
	}
	var undone error
	if by.kept {
		said, err := c.handOver(ctx)
		if !by.ours {
			return said, err
		}
		undone = err // a DEL is both's
	}
	result, err := n.run(c, ctx, conf)
	if err = errors.Join(undone, err); err != nil || result == nil {
		return nil, err
	}
	said, err := c.encode(result)
	if err != nil {
		c.verb = "DEL"
		_, undone = n.run(c, ctx, conf)
		return nil, errors.Join(err, undone)
	}
	return said, nil
}

// refuseOwnNamespace ends an ADD for the namespace that the plugin runs in. What is wrong with
// the path otherwise is for the plugin to say: some do not need it.
func (c *call) refuseOwnNamespace() error {
	if c.verb != "ADD" || c.sameNetNS() {
		return nil
	}
	pod, err := netns.Open(c.netns)
	if err != nil {
		return nil
	}
	defer pod.Close()
	own, err := netns.Current()
	if err != nil {
		return err
	}
	defer own.Close()
	if pod.ID() == own.ID() {
		return c.explain(network.ErrHostNamespace)
	}
	return nil
}

// unmarshal reads the configuration into a named plugin's own fields. As in the reference, fields of
// others are passed over, and names count in either case.
func (c *call) unmarshal(into any) error {
	if err := strict.Unmarshal(c.stdin, into, anything); err != nil {
		return newError(codeInvalidConfig, "the network's configuration: %v", err)
	}
	return nil
}

func anything(string, string) bool { return true }

// chained reads the result of the plugins before, which is needed.
func (c *call) chained(conf *NetConf) (*current.Result, error) {
	prev, err := parsePrevResult(conf, c.cniVersion)
	if err == nil && prev == nil {
		err = newError(codeInvalidConfig, "%s needs prevResult: %s works on an interface that a plugin before it made", c.verb, c.Name)
	}
	return prev, err
}

// addressesOf are the pod's as a result has them, but for those that it gives to another interface.
func (c *call) addressesOf(r *current.Result) []netip.Addr {
	var list []netip.Addr
	for _, ip := range r.IPs {
		if i := ip.Interface; i != nil && (r.Interfaces[*i].Name != c.ifName || r.Interfaces[*i].Sandbox == "") {
			continue
		}
		if a, ok := netip.AddrFromSlice(ip.Address.IP); ok {
			list = append(list, a.Unmap())
		}
	}
	return list
}

// takeBack has a node take back what a plugin gave to a pod, and always succeeds. What kept it from that, such as a
// record that cannot be read, or not be written on a full disk, is a warning: with an error, the runtime would not get to the
// DEL of bridge, which comes next and takes down all that the pod has, by the kernel's marks if need be.
func (c *call) takeBack(conf *NetConf, do func(*network.Node) error) {
	node, err := c.open(conf)
	if err == nil {
		err = do(node)
	}
	if err != nil && !errors.Is(err, network.ErrNotAttached) {
		c.log.warn(err.Error())
	}
}

// differ is the error by which CHECK gives differences; nil if there are none.
func differ(diffs []tombolo.Difference, err error) error {
	if err == nil && len(diffs) > 0 {
		err = newError(codeDiffers, "%s", fmt.Sprint(diffs))
	}
	return err
}
