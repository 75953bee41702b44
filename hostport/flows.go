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

// FlushStale deletes UDP flows that go to newly published ports, but do not lead to the pod. Such flows lead to the
// host itself, or to a pod that had the port earlier. A port leads to the first address of each family in pod. Only
// UDP needs this, since a UDP client that keeps sending keeps its flow forever. For other protocols, FlushStale does
// nothing.
func (c *Conn) FlushStale(ctx context.Context, pod []netip.Addr, ports ...nft.Port) error {
	local := func(a netip.Addr) bool {
		r, err := c.routes.Get(ctx, a)
		return err == nil && r.Type == unix.RTN_LOCAL
	}
	return c.flush(ctx, pod, ports, func(p publication, f *conntrack.Flow) bool {
		return f.Reply.Src != p.pod && p.isTo(f) && (!p.isOfAll() || local(f.Orig.Dst.Addr()))
	})
}

// Flush deletes UDP flows to ports that are no longer published, if the flows lead to the addresses in pod. The
// kernel walks through its table of all flows, which takes some 10 ms if there are many.
func (c *Conn) Flush(ctx context.Context, pod []netip.Addr, ports ...nft.Port) error {
	return c.flush(ctx, pod, ports, func(p publication, f *conntrack.Flow) bool {
		return f.Reply.Src == p.pod &&
			p.isTo(f)
	})
}

// flush deletes the UDP flows for which match returns true. It sends one request for each family. If only one host port
// of the family is published, the kernel selects the flows by this port. Otherwise it lists all UDP flows.
func (c *Conn) flush(ctx context.Context, pod []netip.Addr, ports []nft.Port,
	match func(publication, *conntrack.Flow) bool) error {
	families := map[uint8]map[uint16][]publication{} // publications by family and host port
	for _, p := range publications(pod, ports) {
		family := nl.FamilyOf(p.pod.Addr())
		if families[family] == nil {
			families[family] = map[uint16][]publication{}
		}
		families[family][p.host.Port()] = append(families[family][p.host.Port()], p)
	}

	var questions []conntrack.Selector
	for family, published := range families {
		q := conntrack.Selector{Family: family, Proto: unix.IPPROTO_UDP, Where: func(f *conntrack.Flow) bool {
			return slices.ContainsFunc(published[f.Orig.Dst.Port()], func(p publication) bool { return match(p, f) })
		}}
		if len(published) == 1 {
			q.Port = slices.Collect(maps.Keys(published))[0]
		}
		questions = append(questions, q)
	}

	_, err := c.flows.Flush(ctx, questions...)
	return err
}

// publication is a UDP port of the host that leads to a pod.
type publication struct{ host, pod netip.AddrPort }

// isOfAll reports whether the port is published on all addresses of the host.
func (p publication) isOfAll() bool { return !p.host.Addr().IsValid() || p.host.Addr().IsUnspecified() }

// isTo reports whether the flow was opened to the port.
func (p publication) isTo(f *conntrack.Flow) bool {
	return f.Orig.Dst == p.host || p.isOfAll() && f.Orig.Dst.Port() == p.host.Port()
}

// publications returns a publication for each UDP port and each family in which the port leads to the pod.
func publications(pod []netip.Addr, ports []nft.Port) []publication {
	var list []publication
	for _, p := range ports {
		if p.Protocol != unix.IPPROTO_UDP {
			continue
		}

		var done [129]bool // by address length in bits: whether the family has an address already
		for _, a := range pod {
			if bits := a.BitLen(); bits == 0 || done[bits] || p.HostAddr.IsValid() && p.HostAddr.BitLen() != bits {
				continue
			}
			done[a.BitLen()] = true
			for i := range max(p.Count, 1) {
				list = append(list, publication{netip.AddrPortFrom(p.HostAddr, p.HostPort+i),
					netip.AddrPortFrom(a, p.PodPort+i)})
			}
		}
	}

	return list
}

// refuse returns an error that matches tombolo.ErrInvalid. what describes the operation and its invalid argument.
func refuse(what string) error { return &tombolo.OpError{Op: what, Err: tombolo.ErrInvalid} }
