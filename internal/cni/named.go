package cni

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

// Names are those of the reference's plugins by which the program is such a plugin: of version 1.9.1 of
// github.com/containernetworking/plugins.
func Names() []string { return slices.Sorted(maps.Keys(kinds())) }

// As is the argument by which the file of such a name starts the program, before the file's path: its first
// line is "#!/opt/cni/bin/tombolo as".
const As = "as"

// Kept is where the program would be that had a name before; path is the name's own.
func Kept(path string) string { return path + ".reference" }

// A kind is what the program is by a name.
type kind struct {
	configuration
	first  string // the first version that it speaks
	others bool   // it works on interfaces that other plugins made
}

// kinds are what the program is by the reference's names.
func kinds() map[string]kind {
	all := SupportedVersions()[0]
	return map[string]kind{
		"bandwidth":  {&bandwidthConf{}, "0.3.0", true},
		nameBridge:   {&NetConf{bridge: true}, all, false},
		"firewall":   {&firewallConf{}, "0.4.0", true},
		"host-local": {&ipamPluginConf{}, all, false},
		"loopback":   {&loopbackConf{}, all, false},
		"portmap":    {&portmapConf{}, all, true},
		"static":     {&ipamPluginConf{}, all, false},
		"tuning":     {&tuningConf{}, all, true},
	}
}

// kindOf is what the program is by the call's name, and whether that is one of the reference's: by any other it is
// itself.
func (p *Plugin) kindOf() (kind, bool) {
	if of, named := kinds()[p.Name]; named {
		return of, true
	}
	return kind{&NetConf{}, SupportedVersions()[0], false}, false
}

// supported are the versions of the specification that the plugin of the call's name speaks.
func (c *call) supported() []string {
	all := SupportedVersions()
	return all[slices.Index(all, c.first):]
}

// carryOut has a verb carried out by the programs whose it is, and gives what to print.
func (c *call) carryOut(ctx context.Context) ([]byte, error) {
	if err := c.refuseOwnNamespace(); err != nil {
		return nil, err
	}
	by, err := c.findCarriers()
	if err != nil {
		return nil, err
	}
	var undone error
	if by.kept {
		said, err := c.handOver(ctx)
		if !by.ours {
			return said, err
		}
		undone = err // a DEL is both's
	}
	if c.others { // any other has been refused before
		if err := c.refuse(); err != nil {
			return nil, err
		}
	}
	result, err := c.configuration.run(ctx, c)
	if err = errors.Join(undone, err); err != nil || result == nil {
		return nil, err
	}
	said, err := c.encode(result)
	if err != nil { // not every version can say every result
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), network.UndoTimeout)
		defer cancel()
		c.verb = "DEL"
		_, undone = c.configuration.run(ctx, c)
		return nil, errors.Join(err, undone)
	}
	return said, nil
}

// refuseOwnNamespace ends an ADD for the namespace that the plugin runs in. The plugin reports other faults of the
// path: some plugins do not need it.
func (c *call) refuseOwnNamespace() error {
	if _, own := c.configuration.(*NetConf); own || c.verb != "ADD" || c.sameNetNS() {
		return nil // an ADD of our own looks at it anyway
	}
	pod, err := netns.Open(c.netns)
	if err != nil {
		return nil
	}
	defer pod.Close()
	host, err := isHost(pod)
	if host {
		err = c.explain(network.ErrHostNamespace)
	}
	return err
}

// chained gives the result of the plugins before, which is needed, and access to the attachment.
func (c *call) chained() (*current.Result, network.Change, error) {
	prev, err := c.conf.prevResult()
	if err == nil && prev == nil {
		err = newError(codeInvalidConfig, "%s needs prevResult: %s works on an interface that a plugin before it made", c.verb, c.Name)
	}
	if err != nil {
		return nil, network.Change{}, err
	}
	change, err := c.change()
	return prev, change, err
}

func (c *call) change() (network.Change, error) {
	node, err := c.open(nil)
	if err != nil {
		return network.Change{}, err
	}
	return node.Change(c.key()), nil
}

// passOn is for what asks for nothing.
func (c *call) passOn() (*current.Result, error) {
	if c.verb == "CHECK" {
		return nil, nil
	}
	return c.conf.prevResult()
}

// takeBack has a node take back what a plugin gave to a pod, and always succeeds. Its failures, such as of a record
// that cannot be read, or not be written on a full disk, are warnings: after an error, the runtime would not call
// the DEL of bridge, which comes next and takes down all that the pod has, by the kernel's marks if need be.
func (c *call) takeBack(do func(network.Change) error) {
	change, err := c.change()
	if err == nil {
		err = do(change)
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
