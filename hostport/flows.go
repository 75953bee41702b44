package hostport

import (
	"context"
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/conntrack"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// Config says where the ports are. The zero value, and nil, mean the caller's own namespace.
type Config struct {
	// NetNS is the host's namespace; nil is that of the calling thread. It may be closed
	// after Dial.
	NetNS *netns.NS
	// Routes tells which addresses are the host's. It stays the caller's, and open as long as
	// the Conn; nil has Dial open one.
	Routes *route.Conn
}

// Conn has the kernel forget flows to host ports. Its methods may be called from several
// goroutines. Errors of the kernel are *tombolo.OpError, or wrap one.
type Conn struct {
	flows     *conntrack.Conn
	routes    *route.Conn
	ownRoutes bool
}

// Dial opens a connection. It needs CAP_SYS_ADMIN where cfg names a namespace.
func Dial(cfg *Config) (*Conn, error) {
	if cfg == nil {
		cfg = &Config{}
	}
	c := &Conn{routes: cfg.Routes, ownRoutes: cfg.Routes == nil}
	var err error
	if c.flows, err = conntrack.Dial(&conntrack.Config{NetNS: cfg.NetNS}); err != nil {
		return nil, err
	}
	if c.ownRoutes {
		if c.routes, err = route.Dial(&route.Config{NetNS: cfg.NetNS}); err != nil {
			return nil, errors.Join(err, c.flows.Close())
		}
	}
	return c, nil
}

// Close closes the connection.
func (c *Conn) Close() error {
	if c == nil || c.flows == nil {
		return c.usable(context.Background())
	}
	err := c.flows.Close()
	if c.ownRoutes {
		err = errors.Join(err, c.routes.Close())
	}
	return err
}

// usable refuses a Conn or a context that nothing can be done with.
func (c *Conn) usable(ctx context.Context) error {
	if c == nil || c.flows == nil {
		return refuse("use connection: it was not opened by Dial")
	}
	if ctx == nil {
		return refuse("use connection: the context is nil")
	}
	return c.flows.Usable()
}

// FlushStale is for a pod whose ports have just been published: it deletes the flows to these
// ports of the host that lead elsewhere than to the pod's addresses, to the host or to a pod that
// had the port before. A port leads to the first address of each family. Only UDP needs that, of
// which a client that goes on sending keeps its flow for ever; for other ports, nothing is done.
func (c *Conn) FlushStale(ctx context.Context, pod []netip.Addr, ports ...nft.Port) error {
	local := func(a netip.Addr) bool {
		r, err := c.routes.Get(a)
		return err == nil && r.Type == route.Local
	}
	return c.flush(ctx, pod, ports, func(p conntrack.Publication) conntrack.Filter { return p.Stale(local) })
}

// Flush is for ports that are published no more: it deletes the flows of UDP through these ports
// of the host to the pod's addresses. The kernel goes through all of its flows for that, which
// takes some 10 ms where it has many.
func (c *Conn) Flush(ctx context.Context, pod []netip.Addr, ports ...nft.Port) error {
	return c.flush(ctx, pod, ports, conntrack.Publication.Flows)
}

func (c *Conn) flush(ctx context.Context, pod []netip.Addr, ports []nft.Port, which func(conntrack.Publication) conntrack.Filter) error {
	if err := c.usable(ctx); err != nil {
		return err
	}
	var filters []conntrack.Filter
	for _, p := range publications(pod, ports) {
		filters = append(filters, which(p))
	}
	if len(filters) == 0 {
		return nil
	}
	_, err := c.flows.Flush(ctx, filters...)
	return err
}

// HasFlows says whether any of the ports has flows that outlive its rules, so that FlushStale and
// Flush have something to look for.
func HasFlows(ports ...nft.Port) bool {
	for _, p := range ports {
		if p.Protocol == unix.IPPROTO_UDP {
			return true
		}
	}
	return false
}

// publications are the ports of UDP, once for each family in which they lead to the pod.
func publications(pod []netip.Addr, ports []nft.Port) []conntrack.Publication {
	var list []conntrack.Publication
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
			list = append(list, conntrack.Publication{
				Proto: p.Protocol, Host: netip.AddrPortFrom(p.HostAddr, p.HostPort), Pod: netip.AddrPortFrom(a, p.PodPort),
			})
		}
	}
	return list
}

func refuse(what string) error { return &tombolo.OpError{Op: what, Err: tombolo.ErrInvalid} }
