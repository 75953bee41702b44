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

// A pod that another program made is that program's, and the reference's: where no record tells of the
// attachment, the program that had the name before carries the call out. It also takes down what it gave
// to pods before the names changed over.

// self is this program, as the kernel knows it.
const self = "/proc/self/exe"

// carriers say by which programs a call is carried out.
type carriers struct{ ours, kept bool }

// findCarriers are the kept program's alone where no record tells of the attachment.
func (c *call) findCarriers() (carriers, error) {
	switch {
	case c.verb == "GC" || c.verb == "STATUS": // about no pod
		return carriers{ours: !c.others, kept: c.others}, nil
	case c.others, c.Name == nameBridge && (c.verb == "DEL" || c.verb == "CHECK" && c.isKept()):
	default:
		return carriers{ours: true}, nil
	}
	dir, err := state.Open(c.conf.stateDir())
	if err != nil {
		return carriers{}, err
	}
	hash := ident.Hash(c.conf.Name, c.containerID, c.ifName)
	rec, err := dir.Load(c.conf.Name, hash)
	if c.verb == "DEL" {
		return c.carriersOfDEL(rec, err, "veth"+hash), nil
	}
	ours := !errors.Is(err, fs.ErrNotExist) // a damaged record is ours
	return carriers{ours: ours, kept: !ours}, nil
}

// carriersOfDEL leave nothing of either: the names may have changed over since the ADD, one by one and back. After
// a reboot, the ADD's result tells what is left.
func (c *call) carriersOfDEL(rec *state.Attachment, err error, port string) carriers {
	ours, others := c.madeBy(port)
	by := carriers{ours: true}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		by = carriers{ours: ours, kept: !ours}
	case err == nil && rec.State == state.Ready:
		by.kept = others || c.lacks(rec) && len(c.wrong()) == 0
	}
	if c.Name == nameBridge {
		by = carriers{ours: true, kept: by.kept && podHasLink(c.netns, c.ifName)}
	}
	return by
}

// madeBy says whose the port is that the ADD's result names, as far as it tells. A bridge of another program's comes
// with a port; plugins like ptp have no bridge.
func (c *call) madeBy(port string) (ours, others bool) {
	prev, err := c.conf.prevResult()
	if err != nil || prev == nil {
		return false, false
	}
	host := 0
	for _, in := range prev.Interfaces {
		ours = ours || in.Name == port
		if in.Sandbox == "" {
			host++
		}
	}
	return ours, !ours && host > 1
}

func (c *call) isKept() bool {
	_, err := os.Stat(c.Kept)
	return err == nil
}

// handOver has the program carry the call out that had the name before, and gives what that said.
func (c *call) handOver(ctx context.Context) ([]byte, error) {
	if c.verb == "STATUS" && c.isBridgeOurs() {
		return nil, nil // an ADD for pods of ours needs no other program
	}
	lockorder.Slow("a plugin")
	said, err := delegate.Forward(ctx, c.Kept, self, os.Environ(), c.stdin, os.Stderr)
	switch {
	case err == nil, errors.As(err, new(*types.Error)), ctx.Err() != nil:
		return said, err
	case errors.Is(err, delegate.ErrNotFound), c.verb == "DEL" && errors.Is(err, delegate.ErrSelf):
		return nil, c.noneKept()
	case errors.Is(err, delegate.ErrSelf):
		return nil, newError(codeInvalidConfig, "%s is Tombolo itself: put the %s there that other programs' pods are for", c.Kept, c.Name)
	}
	return nil, newError(codePluginFailed, "%v", err)
}

// isBridgeOurs says whether lists of this directory whose pods are ours need no more than our names.
func (c *call) isBridgeOurs() bool {
	ours, err := delegate.IsSame(self, filepath.Join(filepath.Dir(c.Kept), nameBridge))
	return err == nil && ours
}

// noneKept ends a call for a pod of another program where no other program was kept. None gave the pod anything
// either, so there is nothing to take down.
func (c *call) noneKept() error {
	if c.verb == "DEL" || c.verb == "GC" {
		return nil
	}
	code, what := codePluginMissing, "interface "+c.ifName+" of container "+c.containerID+" is another program's"
	if c.verb == "STATUS" {
		code, what = codeNotAvailable, "pods may be another program's"
	}
	dir, name := filepath.Split(strings.TrimSuffix(c.Kept, filepath.Ext(c.Kept)))
	return newError(code, "%s, and no %s was kept as %s, which would work on it: install the reference's in %s, and then run tombolo install --names %s %[4]s", what, name, c.Kept, dir, name)
}
