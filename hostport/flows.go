package hostport

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/conntrack"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// Conn deletes flows to published ports from the kernel's connection tracking. Several goroutines may call its
// methods at the same time. Errors from the kernel are, or wrap, a *tombolo.OpError.
type Conn struct {
	flows     *conntrack.Conn
	routes    *route.Conn
	ownRoutes bool
}

// Dial opens a connection that works on the network namespace host. If host is nil, it works on the calling thread's
// namespace. If host is not nil, Dial needs CAP_SYS_ADMIN. The Conn uses routes to look up which addresses belong to
// the host. The caller must keep routes open as long as it uses the Conn. If routes is nil, Dial opens a connection
// of its own, which Close closes.
func Dial(host *netns.NS, routes *route.Conn) (*Conn, error) {
	c := &Conn{routes: routes, ownRoutes: routes == nil}
	var err error
	if c.flows, err = conntrack.Dial(host); err != nil {
		return nil, err
	}

	if c.ownRoutes {
		if c.routes, err = route.Dial(host); err != nil {
			return nil, errors.Join(err, c.flows.Close())
		}
	}
	return c, nil
}

// Close closes the connection. It does not close routes that the caller passed to Dial.
func (c *Conn) Close() error {
	err := c.flows.Close()
	if c.ownRoutes {
		err = errors.Join(err, c.routes.Close())
	}
	return err
}

// FlushStale deletes UDP flows to newly published ports that still lead to the host itself, or to a pod that had the
// port earlier. A port leads to the first address of each family in pod. Only UDP needs this, since a UDP client that
// keeps sending keeps its flow forever. For other protocols, FlushStale does nothing.
func (c *Conn) FlushStale(ctx context.Context, pod []netip.Addr, ports ...nft.Port) error {
	local := func(a netip.Addr) bool {
		r, err := c.routes.Get(ctx, a)
		return err == nil && r.Type == unix.RTN_LOCAL
	}
	return c.flush(ctx, pod, ports, func(to netip.AddrPort, onAll bool, f *conntrack.Flow) bool {
		return f.Reply.Src != to && (!onAll || local(f.Orig.Dst.Addr()))
	})
}

// Flush deletes UDP flows to ports that are no longer published, if the flows lead to the first address of a family in
// pod. The kernel walks through its whole table of flows once for each family, which takes about 10 ms.
func (c *Conn) Flush(ctx context.Context, pod []netip.Addr, ports ...nft.Port) error {
	return c.flush(ctx, pod, ports,
		func(to netip.AddrPort, _ bool, f *conntrack.Flow) bool { return f.Reply.Src == to })
}

// flush calls match for each UDP flow to one of the ports, and deletes the flow if match returns true. to is the pod's
// address and port that the flow's host port leads to. onAll is set if the host port is published on all addresses.
//
// flush lists the flows once for each family, and then deletes the selected ones. For a single host port, it asks the
// kernel for the flows to this port. If there are more, it lists all UDP flows of the family.
func (c *Conn) flush(ctx context.Context, pod []netip.Addr, ports []nft.Port,
	match func(to netip.AddrPort, onAll bool, f *conntrack.Flow) bool) error {
	var questions []conntrack.Selector
	for i, a := range pod {
		if slices.ContainsFunc(pod[:i], func(first netip.Addr) bool { return first.Is4() == a.Is4() }) {
			continue // ports lead to the first address of each family
		}

		published := map[uint16][]nft.Port{} // single ports by HostPort
		for _, p := range ports {
			if p.Protocol != unix.IPPROTO_UDP || p.HostAddr.IsValid() && p.HostAddr.Is4() != a.Is4() {
				continue
			}
			for i := range max(p.Count, 1) {
				port := p.HostPort + i
				published[port] = append(published[port], nft.Port{HostAddr: p.HostAddr, PodPort: p.PodPort + i})
			}
		}

		q := conntrack.Selector{Family: nl.FamilyOf(a), Proto: unix.IPPROTO_UDP, Where: func(f *conntrack.Flow) bool {
			return slices.ContainsFunc(published[f.Orig.Dst.Port()], func(p nft.Port) bool {
				onAll := !p.HostAddr.IsValid() || p.HostAddr.IsUnspecified()
				return (onAll || f.Orig.Dst.Addr() == p.HostAddr) && match(netip.AddrPortFrom(a, p.PodPort), onAll, f)
			})
		}}
		if len(published) == 1 {
			q.Port = slices.Collect(maps.Keys(published))[0]
		}
		if len(published) > 0 {
			questions = append(questions, q)
		}
	}

	_, err := c.flows.Flush(ctx, questions...)
	return err
}

// refuse returns an error that matches tombolo.ErrInvalid. what describes the operation and its invalid argument.
func refuse(what string) error { return &tombolo.OpError{Op: what, Err: tombolo.ErrInvalid} }
