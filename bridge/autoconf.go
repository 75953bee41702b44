package bridge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// Autoconf selects the settings that a pod takes from router advertisements. The pod always takes addresses (RFC
// 4862), but never temporary ones (RFC 8981). Each address has the same interface identifier as addr.LinkLocal of the
// pod's MAC.
type Autoconf struct {
	// DefaultRoute makes the pod accept default routes and other routes (RFC 4191) from routers. Without it, the pod
	// accepts no routes from them, so the caller must add routes.
	DefaultRoute bool
}

// Autoconfigured holds the settings that a pod has received from router advertisements.
type Autoconfigured struct {
	// Advertised contains the addresses and the resolvers. If a resolver has a link-local address, its zone is the
	// name of the pod's interface.
	addr.Advertised
	// Gateways are the link-local addresses of the routers in the pod's default routes. They are empty without
	// Autoconf.DefaultRoute, or if no router offers a default route.
	Gateways []netip.Addr
}

// Solicitation is a request of a pod for router advertisements. Solicit returns it.
type Solicitation struct {
	conn     *nl.Conn
	watch    *addr.Watch
	autoconf Autoconf
	peer     string
	link     int
	// silent is set if the pod's sysctls keep the kernel from sending solicitations. formsNone is set if they keep it
	// from forming addresses.
	silent, formsNone bool
}

// Solicit makes a pod that was attached with port.Autoconf accept router advertisements, and sends a router
// solicitation. Call it when the port forwards, and after a guard (nft.Endpoint.SLAAC) permits the pod's addresses.
// The kernel sends the solicitation before Solicit returns, and again after 4 s. The kernel then repeats the
// solicitation with growing pauses until a router answers. Solicitation.Wait returns the result. If Solicit is called
// again, the kernel sends nothing, and Wait waits for the routers' periodic advertisements.
//
// Solicit does not change an IPv6 sysctl of the pod, such as autoconf or use_tempaddr, whose value is not the
// kernel's default. The pod's owner or runtime has chosen that value. If the pod then forms no addresses, Wait
// returns at once and without addresses.
//
// With port.LeaveIPv6 the interface may have received advertisements before, if another program has moved it into the
// pod. In that case, Solicit deletes the default routes that the kernel has learnt, unless Autoconf.DefaultRoute is
// set.
func (c *Conn) Solicit(ctx context.Context, pod *netns.NS, port Port) (*Solicitation, error) {
	if err := cmp.Or(ctx.Err(), c.checkPod(pod, true)); err != nil {
		return nil, err
	}

	if port.Autoconf == nil {
		return nil, &tombolo.OpError{Op: "solicit routers for", Object: port.Peer,
			Err: fmt.Errorf("%w: the port is not to be configured by them", tombolo.ErrInvalid)}
	}

	c.nl.RefreshCarrier(port.Name)
	s := &Solicitation{autoconf: *port.Autoconf, peer: port.Peer}
	if err := s.start(c, pod, &port); err != nil {
		return nil, errors.Join(err, s.Close())
	}

	return s, nil
}

// start first opens a socket for announcements, so that none is missed, and then makes the kernel send a solicitation.
func (s *Solicitation) start(c *Conn, pod *netns.NS, port *Port) error {
	var l *link.Info
	err := pod.Do(func() (err error) {
		if s.conn, err = c.dialPod(); err != nil {
			return err
		}

		if s.watch, err = addr.Listen(nil); err != nil {
			return err
		}

		if l, err = link.Find(context.Background(), s.conn, port.Peer, 0); err != nil {
			return err
		}
		return s.setSysctls(port, l)
	})
	if err != nil || s.silent {
		return err
	}

	s.link = l.Index
	token, err := token(l)
	if err == nil && l.Token != token {
		// Make the kernel notice the interface's carrier now, since it sends a solicitation only afterwards.
		s.conn.RefreshCarrier(port.Peer)
		err = link.Request{Index: l.Index, Token: token}.Apply(context.Background(), s.conn, "solicit routers for",
			port.Peer)
	}

	if err != nil || s.autoconf.DefaultRoute || !port.LeaveIPv6 {
		return err
	}

	return s.dropDefaults()
}

// setSysctls sets the sysctls in port.raSysctls, except those that another program has changed. It must run in the
// pod's network namespace.
func (s *Solicitation) setSysctls(port *Port, l *link.Info) error {
	for _, p := range port.raSysctls() {
		have, ok := l.IPv6.At(p.index)
		chosen := have
		if p.name == acceptRA().name && !port.LeaveIPv6 {
			// Attach has changed the interface's own value, so compare the namespace's default value instead.
			text, err := sysctl.Read(sysctl.Link("ipv6", "default", p.name))
			if err != nil {
				return err
			}
			n, _ := strconv.Atoi(text)
			chosen = int32(n)
		}

		if chosen != p.initial {
			p.want = chosen
		}

		if p.want == 0 {
			s.silent = s.silent || p.asks
			s.formsNone = s.formsNone || p.forms
		}

		if ok && have == p.want {
			continue
		}

		if err := sysctl.Write(sysctl.Link("ipv6", l.Name, p.name), p.value()); err != nil {
			return err
		}
	}

	return nil
}

// dropDefaults deletes the default routes that the kernel has learnt from router advertisements.
func (s *Solicitation) dropDefaults() error {
	ctx, conn := context.Background(), route.On(s.conn)
	learnt, err := s.learntDefaults(ctx, conn)
	for _, r := range learnt {
		err = errors.Join(err, conn.Remove(ctx, r))
	}
	return err
}

// learntDefaults lists the default routes that the kernel has learnt from router advertisements.
func (s *Solicitation) learntDefaults(ctx context.Context, conn *route.Conn) ([]route.Route, error) {
	list, err := conn.List(ctx, route.Filter{Family: unix.AF_INET6, Link: s.link, Protocol: unix.RTPROT_RA})
	return slices.DeleteFunc(list, func(r route.Route) bool { return !r.Gateway.IsValid() || r.Dst.Bits() > 0 }), err
}

// token returns the interface identifier that the kernel uses to form addresses. It is the identifier that the kernel
// would choose anyway. Setting it makes the kernel send a router solicitation (inet6_set_iftoken).
func token(l *link.Info) (netip.Addr, error) {
	if len(l.MAC) != 6 {
		return netip.Addr{}, &tombolo.OpError{Op: "solicit routers for", Object: l.Name,
			Err: fmt.Errorf("%w: it has the MAC %q", tombolo.ErrInvalid, l.MAC)}
	}
	id := addr.LinkLocal(l.MAC).As16()
	clear(id[:8])
	return netip.AddrFrom16(id), nil
}

// Wait waits until the pod has a usable address from a router advertisement. With Port.DAD, this takes one or two
// seconds after the advertisement. If ctx ends first, the error matches ctx's error and describes the progress: it
// also matches addr.ErrNoRouter, addr.ErrNoPrefix or addr.ErrDuplicate.
func (s *Solicitation) Wait(ctx context.Context) (*Autoconfigured, error) {
	if s.formsNone {
		return &Autoconfigured{}, nil
	}

	advertised, err := s.watch.Advertised(ctx, addr.On(s.conn), s.link)
	if err != nil {
		return nil, &tombolo.OpError{Op: "autoconfigure", Object: s.peer, Err: err}
	}

	got := &Autoconfigured{Advertised: *advertised}
	for i, a := range got.Servers {
		if a.IsLinkLocalUnicast() {
			got.Servers[i] = a.WithZone(s.peer)
		}
	}

	if !s.autoconf.DefaultRoute {
		return got, nil
	}

	// The kernel handles the routes of an advertisement before its prefixes, so the routes exist by now.
	learnt, err := s.learntDefaults(ctx, route.On(s.conn))

	for _, r := range learnt {
		got.Gateways = append(got.Gateways, r.Gateway)
	}

	return got, err
}

// Close closes the sockets, and changes nothing in the pod. A Wait in progress returns tombolo.ErrInvalid, and so
// does a second Close.
func (s *Solicitation) Close() error {
	var errs []error
	if s.watch != nil {
		errs = append(errs, s.watch.Close())
	}
	if s.conn != nil {
		errs = append(errs, s.conn.Close())
	}
	return errors.Join(errs...)
}
