package cni

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
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

// carriers say by which programs a call is to be carried out: by ours, by the kept one, or a DEL by both. The names may
// have changed over since the ADD, one by one and back, so DEL leaves nothing of either.
func (c *call) carriers() (ours, kept bool, _ error) {
	byBridge := c.Name == nameBridge
	switch {
	case !byBridge && !c.others, byBridge && c.verb != "DEL" && c.verb != "CHECK":
		return true, false, nil
	case c.verb == "GC" || c.verb == "STATUS": // about no pod
		return false, true, nil
	}
	dir, err := state.Open(c.conf.stateDir())
	if err != nil {
		return false, false, err
	}
	hash := ident.Hash(c.conf.Name, c.containerID, c.ifName)
	rec, err := dir.Load(c.conf.Name, hash)
	noRecord := errors.Is(err, fs.ErrNotExist) // a damaged one is ours
	saysOurs, saysOthers := c.madeBy("veth" + hash)
	switch {
	case c.verb == "CHECK" && byBridge && !c.isKept():
		return true, false, nil
	case c.verb != "DEL":
		return !noRecord, noRecord, nil
	case noRecord: // what goes after a reboot is told by the ADD's result
		ours, kept = saysOurs, !saysOurs
	default:
		ours, kept = true, err == nil && rec.State == state.Ready && (saysOthers || c.lacks(rec) && len(c.wrong()) == 0)
	}
	if byBridge {
		return true, kept && podHasLink(c.netns, c.ifName), nil
	}
	return ours, kept, nil
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
	return nil, newError(ipamconf.CodePluginFailed, "%v", err)
}

// isBridgeOurs says whether lists of this directory whose pods are ours need no more than our names.
func (c *call) isBridgeOurs() bool {
	ours, err := delegate.IsSame(self, filepath.Join(filepath.Dir(c.Kept), nameBridge))
	return err == nil && ours
}

// noneKept is the end of a call for a pod of another program's where there is no program to carry it out. None
// gave the pod anything either, so there is nothing to take down.
func (c *call) noneKept() error {
	if c.verb == "DEL" || c.verb == "GC" {
		return nil
	}
	code, what := ipamconf.CodePluginMissing, "interface "+c.ifName+" of container "+c.containerID+" is another program's"
	if c.verb == "STATUS" {
		code, what = codeNotAvailable, "pods may be another program's"
	}
	dir, name := filepath.Split(strings.TrimSuffix(c.Kept, filepath.Ext(c.Kept)))
	return newError(code, "%s, and no %s was kept as %s, which would work on it: install the reference's in %s, and then run tombolo install --names %s %[4]s", what, name, c.Kept, dir, name)
}
