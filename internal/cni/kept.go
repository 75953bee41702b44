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

// Tombolo can be installed by a reference plugin's name. `tombolo install` then stores the program that had the name
// in another file: it becomes the kept program. Pods that other programs made belong to those programs. If Tombolo has
// no record of an attachment, the kept program handles the call. It also handles the DEL of pods that it made before
// Tombolo got the name.

// handlers selects the programs that handle a call: this program, the kept program, or both.
type handlers struct{ ours, kept bool }

// findHandlers returns the handlers of the call. This program alone handles most calls. The kept program alone handles
// GC and STATUS of a chained plugin. If the attachment has no record, the kept program handles the other verbs of a
// chained plugin, and a CHECK of bridge. For DEL see handlersOfDEL.
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

// handlersOfDEL returns the handlers of a DEL. Both programs may have made parts of the pod, since an operator may
// have given single plugin names to the other program after the ADD. After a reboot the records are gone, and only the
// ADD's result shows which program made the pod.
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

// findMakers reports, from the ADD's result, whether Tombolo made the port, or another program's bridge plugin did.
// That plugin has a bridge and a port in its result; plugins like ptp have no bridge.
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

// forward runs the kept program, and returns its output.
func (c *call) forward(ctx context.Context) ([]byte, error) {
	if c.verb == "STATUS" && delegate.IsOurs(filepath.Join(filepath.Dir(c.Kept), nameBridge)) {
		return nil, nil // Tombolo makes the pods, so no other program is needed
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
			"%s is Tombolo itself: put the %s there that other programs' pods are for", c.Kept, c.Name)
	}

	return nil, newError(codePluginFailed, "%v", err)
}

// errNoneKept returns the error for a pod of another program if there is no kept program. For DEL and GC it returns
// nil: no other program has made anything for the pod, so there is nothing to remove.
func (c *call) errNoneKept() error {
	if c.verb == "DEL" || c.verb == "GC" {
		return nil
	}
	code, what := codePluginMissing, "interface "+c.ifName+" of container "+c.containerID+" is another program's"
	if c.verb == "STATUS" {
		code, what = codeNotAvailable, "pods may be another program's"
	}
	dir, name := filepath.Split(strings.TrimSuffix(c.Kept, filepath.Ext(c.Kept)))
	return newError(code, "%s, and no %s was kept as %s, which would work on it: install the reference's in %s, and "+
		"then run tombolo install --names %s %[4]s", what, name, c.Kept, dir, name)
}
