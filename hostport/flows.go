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

// Conn has the kernel forget flows to host ports. Its methods may be called from several
// goroutines. Errors of the kernel are *tombolo.OpError, or wrap one.
type Conn struct {
	flows     *conntrack.Conn
	routes    *route.Conn
	ownRoutes bool
}

// Dial opens a connection in the host's namespace; nil is that of the calling thread, and
// another one takes CAP_SYS_ADMIN. routes tells which addresses are the host's. It stays the
// caller's, and open as long as the Conn; nil has Dial open one.
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

// Close closes the connection.
func (c *Conn) Close() error {
	err := c.flows.Close()
	if c.ownRoutes {
		err = errors.Join(err, c.routes.Close())
	}
	return err
}

// FlushStale is for a pod whose ports have just been published: it deletes the flows to these
// ports of the host that lead elsewhere than to the pod's addresses, to the host or to a pod that
// had the port before. A port leads to the first address of each family. Only UDP needs that, of
// which a client that goes on sending keeps its flow for ever; for other ports, nothing is done.
func (c *Conn) FlushStale(ctx context.Context, pod []netip.Addr, ports ...nft.Port) error {
	local := func(a netip.Addr) bool {
		r, err := c.routes.Get(ctx, a)
		return err == nil && r.Type == unix.RTN_LOCAL
	}
	return c.flush(ctx, pod, ports, func(p publication, f *conntrack.Flow) bool {
		return f.Reply.Src != p.pod && p.isTo(f) && (!p.isOfAll() || local(f.Orig.Dst.Addr()))
	})
}

// Flush is for ports that are published no more: it deletes the flows of UDP through these ports
// of the host to the pod's addresses. The kernel goes through all of its flows for that, which
// takes some 10 ms where it has many.
func (c *Conn) Flush(ctx context.Context, pod []netip.Addr, ports ...nft.Port) error {
	return c.flush(ctx, pod, ports, func(p publication, f *conntrack.Flow) bool { return f.Reply.Src == p.pod && p.isTo(f) })
}

// flush asks the kernel once for each family: for one port, or for all flows of UDP.
func (c *Conn) flush(ctx context.Context, pod []netip.Addr, ports []nft.Port, match func(publication, *conntrack.Flow) bool) error {
	families := map[uint8]map[uint16][]publication{} // by the host's port
	for _, p := range publications(pod, ports) {
		family := nl.FamilyOf(p.pod.Addr())
		if families[family] == nil {
			families[family] = map[uint16][]publication{}
		}
		families[family][p.host.Port()] = append(families[family][p.host.Port()], p)
	}
	var questions []conntrack.Question
	for family, published := range families {
		q := conntrack.Question{Family: family, Proto: unix.IPPROTO_UDP, Where: func(f *conntrack.Flow) bool {
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

// publication is a port of UDP of the host that leads to a pod.
type publication struct{ host, pod netip.AddrPort }

// isOfAll says that it is of all of the host's addresses.
func (p publication) isOfAll() bool { return !p.host.Addr().IsValid() || p.host.Addr().IsUnspecified() }

// isTo says that a flow began towards the port.
func (p publication) isTo(f *conntrack.Flow) bool {
	return f.Orig.Dst == p.host || p.isOfAll() && f.Orig.Dst.Port() == p.host.Port()
}

// publications are those of the ports, once for each family in which they lead to the pod.
func publications(pod []netip.Addr, ports []nft.Port) []publication {
	var list []publication
	for _, p := range ports {
		if p.Protocol != unix.IPPROTO_UDP {
			continue
		}
		var done [129]bool // by an address's bits: the family has its first
		for _, a := range pod {
			if bits := a.BitLen(); bits == 0 || done[bits] || p.HostAddr.IsValid() && p.HostAddr.BitLen() != bits {
				continue
			}
			done[a.BitLen()] = true
			for i := range max(p.Count, 1) {
				list = append(list, publication{netip.AddrPortFrom(p.HostAddr, p.HostPort+i), netip.AddrPortFrom(a, p.PodPort+i)})
			}
		}
	}
	return list
}

func refuse(what string) error { return &tombolo.OpError{Op: what, Err: tombolo.ErrInvalid} }
