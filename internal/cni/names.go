package cni

import (
	"context"
	"errors"
	"slices"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni/loopback"
	"github.com/tombolo-cni/tombolo/internal/cni/reference"
	"github.com/tombolo-cni/tombolo/internal/cni/reference/firewall"
	"github.com/tombolo-cni/tombolo/internal/cni/reference/ipams"
	"github.com/tombolo-cni/tombolo/internal/cni/reference/limits"
	"github.com/tombolo-cni/tombolo/internal/cni/reference/portmap"
	"github.com/tombolo-cni/tombolo/internal/cni/reference/tuning"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

// Names are those of the reference's plugins by which the program is such a plugin.
func Names() []string {
	return []string{"bandwidth", "bridge", "firewall", "host-local", "loopback", "portmap", "static", "tuning"}
}

// As is the argument by which the file of such a name starts the program, before the file's path: its first
// line is "#!/opt/cni/bin/tombolo as".
const As = "as"

// Kept is where the program would be that had a name before; path is the name's own.
func Kept(path string) string { return path + ".reference" }

// named finds the plugin of the reference's that has the call's name, and the first version that
// it speaks; nil for every other name, by which the program is itself.
func (p *Plugin) named() (run reference.Plugin, first string) {
	all := SupportedVersions()[0]
	switch p.Name {
	case "loopback":
		return loopback.Run, all
	case "host-local", "static":
		return ipams.Run, all
	case "bandwidth":
		return limits.Run, "0.3.0"
	case "firewall":
		return firewall.Run, "0.4.0"
	case "portmap":
		return portmap.Run, all
	case "tuning":
		return tuning.Run, all
	}
	return nil, all
}

// supported are the versions of the specification that the plugin of the call's name speaks.
func (p *Plugin) supported() []string {
	all := SupportedVersions()
	_, first := p.named()
	return all[slices.Index(all, first):]
}

// byName carries out a verb of a plugin of the reference's.
func (c *call) byName(run reference.Plugin) error {
	conf, err := c.parseLenient()
	if err == nil {
		err = c.accept(conf)
	}
	if err == nil {
		err = c.refuseOwnNamespace()
	}
	if err != nil {
		return err
	}
	var said []byte
	err = c.timed(conf, func(ctx context.Context, conf *NetConf) error {
		var err error
		said, err = c.carryOut(ctx, conf, run)
		return err
	})
	if err != nil || said == nil {
		return err
	}
	return c.print(said)
}

// carryOut has a verb carried out by the programs whose it is, and gives what to print.
func (c *call) carryOut(ctx context.Context, conf *NetConf, run reference.Plugin) ([]byte, error) {
	by := carriers{ours: true}
	if c.worksOnOthers() {
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
	r := c.reference(conf)
	result, err := run(ctx, r)
	if err = errors.Join(undone, err); err != nil || result == nil {
		return nil, err
	}
	said, err := c.encode(result)
	if err != nil {
		r.Verb = "DEL"
		_, undone = run(ctx, r)
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

// reference describes the call to a plugin of the reference's.
func (c *call) reference(conf *NetConf) *reference.Call {
	return &reference.Call{
		Name: c.Name, Verb: c.verb, ContainerID: c.containerID, NetNS: c.netns, IfName: c.ifName, Args: c.args,
		Network: c.network, Stdin: c.stdin, SameNetNS: c.sameNetNS(), StateDir: conf.settings().StateDir,
		Prev: func() (*current.Result, error) { return parsePrevResult(conf, c.cniVersion) },
		Open: func() (*network.Node, error) { return c.open(conf) },
		Warn: c.log.warn,
	}
}
