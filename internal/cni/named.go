package cni

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

// Names returns the names of the reference plugins that this program can replace (version 1.9.1 of
// github.com/containernetworking/plugins).
func Names() []string { return slices.Sorted(maps.Keys(kinds())) }

// As is the program's first argument if a script with a reference plugin's name starts the program. The script's path
// is the next argument. The first line of such a script is "#!/opt/cni/bin/tombolo as".
const As = "as"

// Kept returns the path of the kept program: the program that had a reference plugin's name before Tombolo. path is
// the path with this name.
func Kept(path string) string { return path + ".reference" }

// A kind is the program's behaviour when it is called by one name.
type kind struct {
	configuration
	first  string // the first supported version
	others bool   // a chained plugin, which works on an earlier plugin's interface
}

// kinds returns the program's behaviours. The keys are the names of the reference plugins.
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

// KnownFields returns the names of all fields that our plugins read, except those whose values may be secret.
func KnownFields() []string {
	var names []string
	ipams := []any{hostLocalConf{}, staticConf{}, DHCP{}}
	for _, conf := range append(ipams, NetConf{}, firewallConf{}, portmapConf{}, tuningConf{}) {
		names = append(names, strict.Names(reflect.TypeOf(conf))...)
	}
	return slices.DeleteFunc(names,
		func(name string) bool { return slices.Contains([]string{"args", "prevResult", "provide"}, name) })
}

// supported returns the versions of the specification that the plugin supports under the name of this call.
func (c *call) supported() []string {
	all := SupportedVersions()
	return all[slices.Index(all, c.first):]
}

// runVerb runs the verb in the selected programs (see findHandlers), and returns the output to print.
func (c *call) runVerb(ctx context.Context) ([]byte, error) {
	if err := c.refuseOwnNamespace(); err != nil {
		return nil, err
	}

	selected, err := c.findHandlers()
	if err != nil {
		return nil, err
	}

	var undoErr error
	if selected.kept {
		output, err := c.forward(ctx)
		if !selected.ours {
			return output, err
		}
		undoErr = err // a DEL may run both programs
	}

	if c.others { // readStdin did this for all others
		if err := c.refuse(); err != nil {
			return nil, err
		}
	}

	result, err := c.configuration.run(ctx, c)
	if err = errors.Join(undoErr, err); err != nil || result == nil {
		return nil, err
	}

	output, err := c.encode(result)
	if err != nil { // not every version can express every result
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), network.UndoTimeout)
		defer cancel()
		c.verb = "DEL"
		_, undoErr = c.configuration.run(ctx, c)
		return nil, errors.Join(err, undoErr)
	}

	return output, nil
}

// refuseOwnNamespace returns an error for an ADD whose CNI_NETNS is the plugin's own network namespace. It ignores
// other faults of the path, since some plugins do not need the namespace.
func (c *call) refuseOwnNamespace() error {
	if _, own := c.configuration.(*NetConf); own || c.verb != "ADD" || c.sameNetNS() {
		return nil // the ADD of NetConf checks this itself
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

// chainedChange returns the result of the previous plugins, which must exist, and a network.Change for the attachment.
func (c *call) chainedChange() (*current.Result, network.Change, error) {
	prev, err := c.conf.prevResult()
	if err == nil && prev == nil {
		err = newError(codeInvalidConfig, "%s needs prevResult: %s works on an interface that a plugin before it made",
			c.verb, c.Name)
	}
	if err != nil {
		return nil, network.Change{}, err
	}
	change, err := c.change()
	return prev, change, err
}

// change returns a network.Change for the call's attachment.
func (c *call) change() (network.Change, error) {
	node, err := c.open(nil)
	if err != nil {
		return network.Change{}, err
	}
	return node.Change(c.key()), nil
}

// passThrough returns the previous result unchanged. It is for a plugin that has nothing to do.
func (c *call) passThrough() (*current.Result, error) {
	if c.verb == "CHECK" {
		return nil, nil
	}
	return c.conf.prevResult()
}

// undoChange calls do to undo a chained plugin's changes of an attachment. It logs failures, such as an unreadable
// record or a full disk, and always succeeds. After an error the runtime would not call the DEL of the plugin bridge.
// That DEL comes next and removes everything of the pod, if necessary without its record.
func (c *call) undoChange(do func(network.Change) error) {
	change, err := c.change()
	if err == nil {
		err = do(change)
	}
	if err != nil && !errors.Is(err, network.ErrNotAttached) {
		c.log.warn(err.Error())
	}
}

// differ returns the error of CHECK for differences. It returns err if that is not nil, and nil if there are no
// differences.
func differ(diffs []tombolo.Difference, err error) error {
	if err == nil && len(diffs) > 0 {
		err = newError(codeDiffers, "%s", fmt.Sprint(diffs))
	}
	return err
}
