package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

// Ready returns nil if an Add to the network could succeed now, and otherwise an error with the reason. leases
// describes how the network's pods lease their addresses; it is nil if they do not. Ready takes no lock, since
// runtimes call it every few seconds. It changes nothing, with one exception. If the host has become a router, it
// deletes the rules that stop forwarding for others, as Check does.
func (n *Node) Ready(ctx context.Context, nw *Network, leases *Lease) error {
	if err := nw.check(); err != nil {
		return err
	}

	s, err := openSession(n.cfg)
	if err != nil {
		return err
	}
	defer s.close()
	w := newRequirement(nw, "", n.cfg.Mark)
	w.Record.Subnets = nw.Subnets
	if err := checkBuildable(ctx, s, w); err != nil {
		return err
	}

	if err := refuseContested(n.cfg.Dir); err != nil {
		return err
	}

	paths, err := s.reversePaths(ctx, &w.Record)
	if err != nil {
		return err
	}

	if len(paths) > 0 {
		return failf(ErrObstructed, "%s", strings.Join(paths, "; "))
	}

	if leases == nil && nw.Allocator != nil {
		err := n.allocatorReady(ctx, nw)
		if !errors.Is(err, ipam.ErrPoolFull) {
			return err
		}
		dead, deadErr := n.CollectDead(ctx, nw.Name, true)
		if deadErr == nil && slices.ContainsFunc(dead, func(d Dead) bool { return d.Kept == nil }) {
			return nil // an ADD removes them, and comes only if Ready returns nil
		}
		return err
	}

	if leases == nil {
		return nil
	}

	_, err = n.openLeases(leases)
	return err
}

// allocatorReady returns an error if the network's allocator could not allocate an address now.
func (n *Node) allocatorReady(ctx context.Context, nw *Network) error {
	e, err := n.cfg.Dir.Epoch()
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, state.ErrStale), errors.Is(err, state.ErrDamaged):
		e = state.Epoch{} // the next ADD begins an epoch, whose token differs from the token of every reservation
	case err != nil:
		return stateError(err)
	}

	node := ipam.Node{Epoch: ipam.Epoch{Token: e.Token(), Started: n.cfg.Dir.Begun(e)},
		Hash: func(o ipam.Owner) string { return Key{nw.Name, o.ContainerID, o.IfName}.hash() }}
	return nw.Allocator.Bind(node).Status(ctx)
}

// contestedFor is how long a report of tombolod is valid. As long as its cause lasts, tombolod renews the report once
// a minute.
const contestedFor = 3 * time.Minute

// refuseContested returns an error if another program undoes tombolod's repairs of the firewall again and again. The
// error names that program.
func refuseContested(dir *state.Dir) error {
	f, err := dir.Contested()
	if err != nil {
		return stateError(err)
	}

	if f == nil || time.Since(f.At) > contestedFor {
		return nil
	}

	program := "another program"
	if f.By != "" {
		program = fmt.Sprintf("the program %q", f.By)
	}

	return failf(ErrObstructed,
		"%s undoes what pods need of the firewall: tombolod has put it back %d times, and now does so only once a "+
			"minute; the last time it was: %.200q: have that program leave it alone",
		program, f.Times, f.What)
}
