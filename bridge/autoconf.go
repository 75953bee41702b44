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

// Autoconf says which settings a pod takes from router advertisements. It always takes addresses (RFC 4862), but
// never temporary ones (RFC 8981). They end as the addr.LinkLocal of its MAC does, so they are known when the prefix
// is.
type Autoconf struct {
	// DefaultRoute makes the pod send through the routers. Without it the pod takes no route from them, neither a
	// default route nor others that they advertise (RFC 4191). The caller must then add routes.
	DefaultRoute bool
}

// Autoconfigured holds the settings that a pod has from router advertisements.
type Autoconfigured struct {
	// Addresses and resolvers are as in addr.Advertised. A resolver with a link-local address has the pod's interface
	// as its zone.
	addr.Advertised
	// Gateways are the link-local addresses of the routers of the pod's default routes. There may be none. It is
	// empty without Autoconf.DefaultRoute.
	Gateways []netip.Addr
}

// Solicitation is a pod's request for router advertisements.
type Solicitation struct {
	conn     *nl.Conn
	heard    *addr.Watch
	autoconf Autoconf
	peer     string
	link     int
	// The pod's parameters keep the kernel from asking for advertisements, and from forming addresses by them.
	silent, formsNone bool
}

// Solicit makes a pod that was attached with port.Autoconf accept router advertisements, and ask for one. Call it
// when the port forwards, and after a guard knows the pod's addresses. The kernel sends the solicitation before
// Solicit returns, again 4 s later, and then less and less often until a router answers. Wait returns the result.
// After a second Solicit the kernel sends nothing; Wait then waits for the routers' periodic advertisements.
//
// If an IPv6 parameter, such as autoconf or use_tempaddr, differs from its value in a new namespace, the pod's owner or
// runtime has chosen it, and Solicit keeps it. If the pod forms no address because of it, Wait returns none at once.
//
// With port.LeaveIPv6 the interface may have received advertisements before, since another program moved it into the
// pod. Then Solicit deletes the default routes that the kernel has learnt, unless Autoconf.DefaultRoute is set.
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
	if err := s.ask(c, pod, &port); err != nil {
		return nil, errors.Join(err, s.Close())
	}

	return s, nil
}

// ask starts to listen before anything can come, and then asks.
func (s *Solicitation) ask(c *Conn, pod *netns.NS, port *Port) error {
	var l *link.Link
	err := pod.Do(func() error {
		var err error
		if s.conn, err = c.dialPod(); err != nil {
			return err
		}

		if s.heard, err = addr.Listen(nil); err != nil {
			return err
		}

		if l, err = link.Find(s.conn, port.Peer); err != nil {
			return err
		}
		return s.hear(port, l)
	})
	if err != nil || s.silent {
		return err
	}

	s.link = l.Index
	token, err := token(l)
	if err == nil && l.Token != token {
		// The kernel asks only once it takes the interface for ready to send.
		s.conn.RefreshCarrier(port.Peer)
		var b nl.Batch
		link.Request{Index: l.Index, Token: token}.Set(&b, "solicit routers for", port.Peer)
		err = s.conn.Execute(&b)
	}

	if err != nil || s.autoconf.DefaultRoute || !port.LeaveIPv6 {
		return err
	}

	return s.dropDefaults()
}

// hear sets the parameters of port.hearing that no other program has changed. It is called in the pod's namespace.
func (s *Solicitation) hear(port *Port, l *link.Link) error {
	for _, p := range port.hearing() {
		have, ok := l.IPv6.At(p.index)
		chosen := have
		if p.name == acceptRA().name && !port.LeaveIPv6 {
			// The interface has the value that Attach wrote, so look at the namespace's default.
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

// token returns the interface identifier for the addresses that the kernel forms. The kernel itself would choose the
// same identifier. Setting it makes the kernel ask for advertisements again (inet6_set_iftoken).
func token(l *link.Link) (netip.Addr, error) {
	if len(l.MAC) != 6 {
		return netip.Addr{}, &tombolo.OpError{Op: "solicit routers for", Object: l.Name,
			Err: fmt.Errorf("%w: it has the MAC %q", tombolo.ErrInvalid, l.MAC)}
	}
	id := addr.LinkLocal(l.MAC).As16()
	clear(id[:8])
	return netip.AddrFrom16(id), nil
}

// Wait waits until the pod has a usable address from a router advertisement. With Port.DAD that takes a second or two
// after the advertisement. If ctx is done, the error describes the progress until then: it matches addr.ErrNoRouter,
// addr.ErrNoPrefix or addr.ErrDuplicate, and ctx's error.
func (s *Solicitation) Wait(ctx context.Context) (*Autoconfigured, error) {
	if s.formsNone {
		return &Autoconfigured{}, nil
	}

	advertised, err := s.heard.Advertised(ctx, addr.On(s.conn), s.link)
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

	// Of an advertisement, the kernel handles the routes before the prefixes.
	learnt, err := s.learntDefaults(ctx, route.On(s.conn))

	for _, r := range learnt {
		got.Gateways = append(got.Gateways, r.Gateway)
	}

	return got, err
}

// Close ends the wait, and leaves the pod as it is. A Wait in progress and another Close return tombolo.ErrInvalid.
func (s *Solicitation) Close() error {
	var errs []error
	if s.heard != nil {
		errs = append(errs, s.heard.Close())
	}
	if s.conn != nil {
		errs = append(errs, s.conn.Close())
	}
	return errors.Join(errs...)
}
