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

// Names returns the sorted names of the reference plugins that this program can replace (version 1.9.1 of
// github.com/containernetworking/plugins).
func Names() []string { return slices.Sorted(maps.Keys(kinds())) }

// As is the program's first argument if a script with a reference plugin's name starts the program. The script's path
// is the next argument. The first line of such a script is, for example, "#!/opt/cni/bin/tombolo as".
const As = "as"

// Kept returns the path of the kept program: the program that had a reference plugin's name before Tombolo was
// installed under that name. path is the path with this name.
func Kept(path string) string { return path + ".reference" }

// A kind describes the program's behaviour when it is called by one of its names.
type kind struct {
	configuration
	first  string // the first supported version
	others bool   // a chained plugin, which works on an earlier plugin's interface
}

// kinds maps the name of each reference plugin that this program can replace to its behaviour under that name.
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

// KnownFields returns the names of the configuration fields whose values a bug report contains. These are the fields
// that Tombolo's plugins read, except args, prevResult and provide, whose values may be secret.
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

// runVerb runs the verb in the programs that findHandlers selects, and returns the output to print. If the
// configuration's version cannot express the result of an ADD, it undoes the ADD and returns an error.
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
		undoErr = err // only a DEL runs both programs
	}

	if c.others { // readStdin has called refuse for plugins that are not chained
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

// refuseOwnNamespace returns an error for an ADD whose CNI_NETNS is the plugin's own network namespace, unless the
// runtime allows it. It returns nil if the configuration is a NetConf, whose ADD checks the namespace itself. It
// ignores a path that cannot be opened, since some plugins do not need the namespace.
func (c *call) refuseOwnNamespace() error {
	if _, own := c.configuration.(*NetConf); own || c.verb != "ADD" || c.sameNetNS() {
		return nil // the ADD of NetConf checks the namespace itself
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

// chainedChange returns prevResult, which must exist, and a network.Change for the call's attachment.
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

// change opens a network.Node, and returns a network.Change for the call's attachment.
func (c *call) change() (network.Change, error) {
	node, err := c.open(nil)
	if err != nil {
		return network.Change{}, err
	}
	return node.Change(c.key()), nil
}

// passThrough returns the result of a chained plugin that has nothing to do: nil for CHECK, and prevResult for ADD.
func (c *call) passThrough() (*current.Result, error) {
	if c.verb == "CHECK" {
		return nil, nil
	}
	return c.conf.prevResult()
}

// undoChange calls do to undo a chained plugin's changes to an attachment, for DEL. It logs errors, except
// network.ErrNotAttached, and returns none. After an error the runtime would not call the DEL of the plugin bridge,
// which comes later and removes everything of the pod.
func (c *call) undoChange(do func(network.Change) error) {
	change, err := c.change()
	if err == nil {
		err = do(change)
	}
	if err != nil && !errors.Is(err, network.ErrNotAttached) {
		c.log.warn(err.Error())
	}
}

// differ returns err if it is not nil. If not, it returns the error of CHECK for the differences, or nil if there are
// none.
func differ(diffs []tombolo.Difference, err error) error {
	if err == nil && len(diffs) > 0 {
		err = newError(codeDiffers, "%s", fmt.Sprint(diffs))
	}
	return err
}
