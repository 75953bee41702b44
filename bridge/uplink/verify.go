package uplink

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/route"
)

// target is a neighbour that answered through the NIC, and so has to answer through
// the bridge.
type target = netip.Addr

// A LAN without a gateway is tried by some of the neighbours.
const neighboursToTry = 4

// answering asks the gateways through the NIC, and gives those that answer: the
// others say nothing about the bridge. Without gateways, it asks some neighbours.
func (c *Conn) answering(parent context.Context, s *Snapshot, timeout time.Duration) ([]target, error) {
	list := newMove(s, s.NIC, Link{Index: noLink}).gateways()
	if len(list) == 0 {
		for _, n := range s.Neighbours {
			if _, ok := copied(n); ok && n.Link == s.NIC.Index && n.State != route.Permanent && n.Flags&route.Proxy == 0 && len(list) < neighboursToTry {
				list = append(list, n.Addr)
			}
		}
	}
	ctx, cancel := context.WithTimeout(parent, timeout)
	defer cancel()
	found, err := c.ask(ctx, s.NIC.Index, list)
	if errors.Is(err, context.DeadlineExceeded) && parent.Err() == nil {
		err = nil // in three seconds the kernel gives up by itself, unless it was told otherwise
	}
	return found, err
}

// again is how long to wait before neighbours that were given up are asked again.
const again = 100 * time.Millisecond

// verify waits until all of the targets answer through the bridge.
func (c *Conn) verify(ctx context.Context, bridge int, targets []target, timeout time.Duration) error {
	waiting := slices.Clone(targets)
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for len(waiting) > 0 {
		answered, err := c.ask(ctx, bridge, waiting)
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		waiting = slices.DeleteFunc(waiting, func(a target) bool { return slices.Contains(answered, a) })
		if err == nil && len(waiting) > 0 {
			// Given up by the kernel, which may have been at once: it is asked again.
			select {
			case <-ctx.Done():
			case <-time.After(again):
			}
		}
		if err != nil && len(waiting) > 0 {
			var names []string
			for _, a := range waiting {
				names = append(names, a.String())
			}
			return fmt.Errorf("%w: %s answered before, and did not within %s; is the switch's port limited to one MAC?",
				ErrUnreachable, strings.Join(names, " and "), timeout)
		}
	}
	return nil
}

// ask has the kernel look for neighbours anew, and waits until each was found or
// given up, some three seconds; it gives those that were found. What is known of
// them goes on being used meanwhile.
func (c *Conn) ask(ctx context.Context, link int, list []target) ([]target, error) {
	if len(list) == 0 {
		return nil, nil
	}
	watch, err := nl.Subscribe(unix.NETLINK_ROUTE, &nl.Config{NetNS: c.ns}, unix.RTNLGRP_NEIGH)
	if err != nil {
		return nil, err
	}
	defer watch.Close()
	if err := c.probe(ctx, link, list); err != nil && !isFull(err) {
		return nil, err
	}
	for {
		var found []target
		pending := 0
		for _, a := range list {
			n, err := c.routes.Neighbour(link, a)
			switch {
			case isGone(err), err == nil && n.State == route.Failed:
			case err != nil:
				return nil, err
			case n.State&(route.Reachable|route.Permanent|route.NoARP) != 0:
				found = append(found, a)
			default:
				pending++
			}
		}
		if pending == 0 {
			return found, nil
		}
		// Each change of a neighbour's state is announced; which one it was is looked for
		// above.
		if _, err := watch.Next(ctx); err != nil && !errors.Is(err, unix.ENOBUFS) {
			return found, err
		}
	}
}

// probe asks each at the MAC that is known of it, or all hosts if none is. To set the
// state Probe makes the kernel send at once, and does not invalidate the entry.
func (c *Conn) probe(ctx context.Context, link int, list []target) error {
	var b nl.Batch
	for _, a := range list {
		n, err := c.routes.Neighbour(link, a)
		if err != nil && !isGone(err) {
			return err
		}
		if err == nil && n.State&(route.Permanent|route.NoARP) != 0 {
			continue
		}
		ask := route.Neighbour{Addr: a, Link: link, State: route.Probe, Flags: n.Flags, MAC: n.MAC}
		if len(n.MAC) == 0 {
			ask = route.Neighbour{Addr: a, Link: link, State: route.Failed, Flags: useFlag}
		}
		m, err := ask.ReplaceMessage()
		b.Add("replace neighbour", &ask, m, err)
	}
	return c.execute(ctx, &b)
}

// useFlag is NTF_USE: look for it as if there were a packet for it.
const useFlag route.NeighbourFlags = unix.NTF_USE
