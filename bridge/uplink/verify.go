package uplink

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/route"
)

// poll is how often the kernel is asked for what it does by itself.
const poll = 5 * time.Millisecond

// pause is false when ctx is done.
func pause(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(poll):
		return true
	}
}

// answering asks the gateways through the NIC, and gives those that answer: the
// others say nothing about the bridge.
func (c *Conn) answering(ctx context.Context, s *snapshot, timeout time.Duration) ([]netip.Addr, error) {
	list := newMove(s, s.NIC, linkState{Index: noLink}).gateways()
	silent, err := c.ask(ctx, s.NIC.Index, list, timeout, false)
	return slices.DeleteFunc(list, func(a netip.Addr) bool { return slices.Contains(silent, a) }), err
}

// verify waits until all that answered through the NIC answer through the bridge.
func (c *Conn) verify(ctx context.Context, bridge int, list []netip.Addr, timeout time.Duration) error {
	silent, err := c.ask(ctx, bridge, list, timeout, true)
	if err == nil && len(silent) > 0 {
		err = fmt.Errorf("%w: %v answered before, and did not within %s; is the switch's port limited to one MAC?", ErrUnreachable, silent, timeout)
	}
	return err
}

// ask has the kernel look for neighbours anew, and waits until each was found or given up, which takes some three
// seconds; or, with again, until each was found. It gives those that were not found in time. The kernel goes on
// using the MACs that it knows meanwhile.
func (c *Conn) ask(ctx context.Context, link int, list []netip.Addr, timeout time.Duration, again bool) (silent []netip.Addr, _ error) {
	limit, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := c.probe(link, list); err != nil {
		return nil, err
	}
	waiting := slices.Clone(list)
	for {
		var still []netip.Addr
		for _, a := range waiting {
			n, err := routing.Find(c.nl, link, a)
			failed := isGone(err) || n.State == routing.Failed
			if err == nil && failed && again {
				err = c.probe(link, []netip.Addr{a})
			}
			switch {
			case err != nil && !isGone(err):
				return nil, err
			case n.State&(routing.Reachable|routing.Permanent|routing.NoARP) != 0:
			case failed && !again:
				silent = append(silent, a)
			default:
				still = append(still, a)
			}
		}
		if waiting = still; len(waiting) == 0 || !pause(limit) {
			return append(silent, waiting...), ctx.Err()
		}
	}
}

// probe asks each at the MAC that is known of it, or all hosts if none is. To set the
// state Probe makes the kernel send at once, and does not invalidate the entry.
func (c *Conn) probe(link int, list []netip.Addr) error {
	var b nl.Batch
	for _, a := range list {
		n, err := routing.Find(c.nl, link, a)
		if err != nil && !isGone(err) {
			return err
		}
		if err == nil && n.State&(routing.Permanent|routing.NoARP) != 0 {
			continue
		}
		ask := routing.Neighbour{Addr: a, Link: link, State: routing.Probe, Flags: n.Flags, MAC: n.MAC}
		if len(n.MAC) == 0 {
			ask = routing.Neighbour{Addr: a, Link: link, State: routing.Failed, Flags: useFlag}
		}
		m, err := ask.ReplaceMessage()
		b.Add("replace neighbour", &ask, m, err)
	}
	if err := c.nl.Execute(&b); !isFull(err) {
		return err
	}
	return nil
}

// useFlag is NTF_USE: look for it as if there were a packet for it.
const useFlag routing.NeighbourFlags = unix.NTF_USE

// waitUntilLocal waits until a link receives what is sent to the IPv6 addresses that it has just got. The kernel's
// worker that joins the groups of their neighbour discovery and adds their local routes runs after the request was
// answered; without them, packets that come in once the other link has the addresses no longer are lost.
func (c *Conn) waitUntilLocal(ctx context.Context, m *move, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		have, err := c.routes.List(ctx, route.Filter{Family: unix.AF_INET6, Table: unix.RT_TABLE_LOCAL, Link: m.to.Index, Type: unix.RTN_LOCAL})
		if err != nil {
			return err
		}
		missing := slices.DeleteFunc(m.addresses(), func(a addr.Address) bool {
			return a.Prefix.Addr().Is4() || slices.ContainsFunc(have, func(r route.Route) bool { return r.Dst.Addr() == a.Prefix.Addr() })
		})
		if len(missing) == 0 {
			return nil
		}
		if !pause(ctx) {
			return fmt.Errorf("wait until the kernel receives what is sent to %s: %w", missing[0].Prefix.Addr(), ctx.Err())
		}
	}
}
