package cni

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// Tombolo can be installed under the name of a reference plugin. `tombolo install` then stores the program that had the
// name in another file. This kept program handles calls for attachments that Tombolo did not make: see findHandlers. It
// also takes part in a DEL if it may have made a part of the pod.

// handlers selects the programs that handle a call: this program, the kept program (see Kept), or both for a DEL.
type handlers struct{ ours, kept bool }

// findHandlers returns the programs that handle the call. GC and STATUS of a chained plugin go to the kept program,
// which had the plugin's name before Tombolo. So do ADD and CHECK of a chained plugin, and CHECK of bridge, for an
// attachment without a record. Without a kept program, this program handles the CHECK of bridge. For a DEL see
// handlersOfDEL. All other calls go to this program alone.
func (c *call) findHandlers() (handlers, error) {
	switch {
	case c.verb == "GC" || c.verb == "STATUS": // these verbs concern no pod
		return handlers{ours: !c.others, kept: c.others}, nil
	case c.others, c.Name == nameBridge && (c.verb == "DEL" || c.verb == "CHECK" && c.isKept()):
	default:
		return handlers{ours: true}, nil
	}

	dir, err := state.Open(c.conf.stateDir())
	if err != nil {
		return handlers{}, err
	}

	hash := ident.Hash(c.conf.Name, c.containerID, c.ifName)
	rec, err := dir.Load(c.conf.Name, hash)
	if c.verb == "DEL" {
		return c.handlersOfDEL(rec, err, ident.Port(hash)), nil
	}

	ours := !errors.Is(err, fs.ErrNotExist) // a damaged record is Tombolo's too
	return handlers{ours: ours, kept: !ours}, nil
}

// handlersOfDEL returns the programs that handle a DEL of bridge or of a chained plugin: this program, the kept program
// (see Kept), or both. rec and err come from loading the record. port is the name that Tombolo gives to the host's end
// of the pod's link. Both programs may have made parts of the pod, since an operator may have changed the program
// behind a name after the ADD. Without a record, prevResult shows which program made the pod. For bridge, this program
// always takes part, and the kept program only if the pod still has the interface.
func (c *call) handlersOfDEL(rec *state.Attachment, err error, port string) handlers {
	ours, others := c.findMakers(port)
	selected := handlers{ours: true}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		selected = handlers{ours: ours, kept: !ours}
	case err == nil && rec.State == state.Ready:
		selected.kept = others || c.lacks(rec) && len(c.configErrors()) == 0
	}

	if c.Name == nameBridge {
		selected = handlers{ours: true, kept: selected.kept && podHasLink(c.netns, c.ifName)}
	}
	return selected
}

// findMakers finds out from prevResult who made the host's end of the pod's link. ours is set if prevResult has an
// interface called port, which only Tombolo makes. others is set if another program's bridge plugin made it. Such a
// plugin's result has two interfaces of the host, a bridge and a port. The result of a plugin like ptp has only one.
// If prevResult is missing or invalid, both values are false.
func (c *call) findMakers(port string) (ours, others bool) {
	prev, err := c.conf.prevResult()
	if err != nil || prev == nil {
		return false, false
	}

	host := 0
	for _, iface := range prev.Interfaces {
		ours = ours || iface.Name == port
		if iface.Sandbox == "" {
			host++
		}
	}
	return ours, !ours && host > 1
}

func (c *call) isKept() bool {
	_, err := os.Stat(c.Kept)
	return err == nil
}

// forward runs the kept program (see Kept) with the call's stdin, and returns its output. If there is no kept program,
// or for DEL if it is Tombolo itself, forward returns the result of errNoneKept. For STATUS it runs nothing if the
// plugin bridge is Tombolo too, since pods then need no other program.
func (c *call) forward(ctx context.Context) ([]byte, error) {
	if c.verb == "STATUS" && delegate.IsOurs(filepath.Join(filepath.Dir(c.Kept), nameBridge)) {
		return nil, nil
	}

	lockorder.Slow("a plugin")
	output, err := delegate.Forward(ctx, c.Kept, os.Environ(), c.stdin, os.Stderr)
	switch {
	case err == nil, errors.As(err, new(*types.Error)), ctx.Err() != nil:
		return output, err
	case errors.Is(err, delegate.ErrNotFound), c.verb == "DEL" && errors.Is(err, delegate.ErrSelf):
		return nil, c.errNoneKept()
	case errors.Is(err, delegate.ErrSelf):
		return nil, newError(codeInvalidConfig,
			"%s is Tombolo itself: replace it by the %s for pods of other programs", c.Kept, c.Name)
	}

	return nil, newError(codePluginFailed, "%v", err)
}

// errNoneKept returns the error for a call that only a kept program (see Kept) could handle, if there is none. For DEL
// and GC it returns nil: no other program has made anything for the pod, so there is nothing to remove.
func (c *call) errNoneKept() error {
	if c.verb == "DEL" || c.verb == "GC" {
		return nil
	}
	code, what := codePluginMissing, "interface "+c.ifName+" of container "+c.containerID+" is another program's"
	if c.verb == "STATUS" {
		code, what = codeNotAvailable, "pods may belong to another program"
	}
	dir, name := filepath.Split(strings.TrimSuffix(c.Kept, filepath.Ext(c.Kept)))
	return newError(code, "%s, and no %s was kept as %s, which would work on it: install the reference's in %s, and "+
		"then run tombolo install --names %s %[4]s", what, name, c.Kept, dir, name)
}
