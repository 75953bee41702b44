package bridge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// Conn manages the bridges of one network namespace through one netlink socket. Several goroutines may call its
// methods at the same time.
type Conn struct {
	nl *nl.Conn
	// dialPod opens a socket in the network namespace of the calling thread.
	dialPod func() (*nl.Conn, error)

	home netns.ID // the bridges' namespace; the zero ID if unknown

	mu      sync.Mutex
	ipv6    *sysctl.Dir              // see hostIPv6
	waiting map[string]*podNamespace // by port name; the pods that Wait has not yet waited for
}

// Dial opens a connection to the network namespace ns, which contains the bridges. If ns is nil, Dial uses the
// namespace of the calling thread. If ns is not nil, Dial needs CAP_SYS_ADMIN, and the caller may close ns
// afterwards.
func Dial(ns *netns.NS) (*Conn, error) {
	c, err := nl.Dial(unix.NETLINK_ROUTE, ns)
	if err != nil {
		return nil, err
	}
	home := ns
	if ns == nil {
		if home, err = netns.Current(); err != nil {
			return nil, errors.Join(err, c.Close())
		}
		defer home.Close()
	}

	return &Conn{nl: c, dialPod: dialRoute, home: home.ID()}, nil
}

// checkPod returns an error if pod is nil or closed. It also returns an error if pod is the bridges' own network
// namespace, unless same is set.
func (c *Conn) checkPod(pod *netns.NS, same bool) error {
	var err error
	switch {
	case pod.FD() < 0:
		err = fmt.Errorf("%w: it is closed: %w", tombolo.ErrInvalid, unix.EBADF)
	case !same && pod.ID() == c.home:
		err = fmt.Errorf("%w: it is the namespace that the bridge is in", tombolo.ErrInvalid)
	default:
		return nil
	}
	return &tombolo.OpError{Op: "use pod's network namespace", Object: pod.String(), Err: err}
}

// On returns a Conn that uses the open socket s and closes it in Close. The Conn calls dialPod within a pod's namespace
// to open a socket there. If dialPod is nil, it opens an rtnetlink socket. Programs use Dial. On is for other packages
// that share a socket, and for tests that answer in the kernel's place.
func On(s tombolo.Socket, dialPod func() (tombolo.Socket, error)) *Conn {
	if dialPod == nil {
		return &Conn{nl: nl.Of(s), dialPod: dialRoute}
	}
	return &Conn{nl: nl.Of(s), dialPod: func() (*nl.Conn, error) {
		inPod, err := dialPod()
		return nl.Of(inPod), err
	}}
}

func dialRoute() (*nl.Conn, error) { return nl.Dial(unix.NETLINK_ROUTE, nil) }

// Close closes all sockets of the Conn, including those for pods that were attached with NoWait and not waited for.
// It changes nothing in such pods.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, inPod := range c.waiting {
		inPod.close()
	}

	c.waiting = nil
	if c.ipv6 != nil {
		_ = c.ipv6.Close() // an error does not matter: the kernel has answered all requests
		c.ipv6 = nil
	}
	return c.nl.Close()
}

// Addresses returns a connection for addresses in the bridges' network namespace. It uses c's socket, so the caller
// does not need to close it.
func (c *Conn) Addresses() *addr.Conn { return addr.On(c.Socket()) }

// Routes returns a connection for routes in the bridges' network namespace. It uses c's socket, so the caller does
// not need to close it.
func (c *Conn) Routes() *route.Conn { return route.On(c.Socket()) }

// Socket returns the connection's socket for use by other packages, such as bandwidth.On. The Conn c still owns the
// socket.
func (c *Conn) Socket() tombolo.Socket {
	return c.nl
}

// VLANs returns a connection for VLANs of the bridges. It uses c's socket, so the caller does not need to close it.
func (c *Conn) VLANs() *vlan.Conn { return vlan.On(c.Socket()) }

// ErrForeign is wrapped by errors about a link whose alias does not begin with the expected owner. A link without an
// alias is such a link too.
var ErrForeign = errors.New("the link belongs to another owner")

// Detach deletes a port, and with it the pod's interface, addresses and routes. In the same step it deletes the links
// named in also, such as an ifb for bandwidth limits. It is no error if a link does not exist. If the alias of a link
// does not begin with owner, the link belongs to another program. Detach keeps such a link and returns an error that
// matches ErrForeign. An empty owner matches any alias.
//
// Detach takes 12 to 36 ms, since the kernel waits for RCU grace periods. Several links at once take no longer than
// one.
func (c *Conn) Detach(ctx context.Context, name, owner string, also ...string) error {
	c.closeWaiting(name)
	var errs []error
	var ours []*Link
	for _, name := range append([]string{name}, also...) {
		l, err := c.ownedLink(ctx, "delete link", name, owner)
		switch {
		case err == nil:
			ours = append(ours, l)
		case !errors.Is(err, fs.ErrNotExist):
			errs = append(errs, err)
		}
	}

	if len(ours) > 0 {
		errs = append(errs, c.delLinks(ctx, ours))
	}

	return errors.Join(errs...)
}

// Shut sets a port down. The pod cannot set it up again, so no packet passes the port any more. Then the caller can
// delete the rules that guard against spoofed packets before it deletes the port, which takes much longer. It is no
// error if the port does not exist. If the alias does not begin with owner, Shut changes nothing and returns an error
// that matches ErrForeign. An empty owner matches any alias.
func (c *Conn) Shut(ctx context.Context, name, owner string) error {
	return c.change(ctx, "set link down", name, owner, func(_ *Link, r *link.Request) bool {
		r.Change = unix.IFF_UP
		return true
	})
}

// SetAlias changes the alias of a link: see Port.Alias. It is no error if the link does not exist. If the present
// alias does not begin with owner, SetAlias changes nothing and returns an error that matches ErrForeign. An empty
// owner matches any alias.
func (c *Conn) SetAlias(ctx context.Context, name, owner, alias string) error {
	return c.change(ctx, "set alias of link", name, owner, func(l *Link, r *link.Request) bool {
		r.Alias = &alias
		return l.Alias != alias
	})
}

// change sends a request that changes a link of the owner. ask fills in the request, and returns false if no change is
// needed. If the link's alias does not begin with owner, the error matches ErrForeign. It is no error if the link does
// not exist.
func (c *Conn) change(ctx context.Context, op, name, owner string, ask func(*Link, *link.Request) bool) error {
	l, err := c.ownedLink(ctx, op, name, owner)
	if r := (link.Request{}); err == nil && ask(l, &r) {
		r.Index = l.Index
		err = r.Apply(ctx, c.nl, op, name)
	}

	return nl.PassAbsent(err)
}

// delLinks deletes links. It is no error if a link is gone.
func (c *Conn) delLinks(ctx context.Context, list []*Link) error {
	var b nl.Batch
	if len(list) == 1 {
		// Delete the link by its index, which identifies the link that was checked. Another link may have its name by
		// now.
		link.Request{Index: list[0].Index}.Delete(&b, list[0].Name)
	} else {
		delTogether(&b, list)
	}

	err := c.nl.Do(ctx, &b)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}

	var errs []error
	for i := range b.Len() {
		errs = append(errs, nl.PassAbsent(b.Err(i)))
	}

	return errors.Join(errs...)
}

// dyingGroup is XORed with the index of a link to get a link group that no other link has. A group has 32 bits, and
// other programs choose small numbers.
const dyingGroup = 0x746f0000

// delTogether appends requests that put the links into one group and delete the group. The kernel then waits for RCU
// grace periods only once, and not once for each link.
func delTogether(b *nl.Batch, list []*Link) {
	group := uint32(dyingGroup) ^ uint32(list[0].Index)
	for _, l := range list {
		link.Request{Index: l.Index, Group: &group}.Set(b, "set group of link", l.Name)
	}
	link.Request{Group: &group}.Delete(b, list[0].Name)
}

// ownedLink returns the index, the name and the alias of a link. If the alias does not begin with owner, the error
// matches ErrForeign.
func (c *Conn) ownedLink(ctx context.Context, op, name, owner string) (*Link, error) {
	l, err := c.link(ctx, name, 0, unix.IFLA_IFNAME, unix.IFLA_IFALIAS)
	if err == nil && !strings.HasPrefix(l.Alias, owner) {
		err = &tombolo.OpError{Op: op, Object: l.Name,
			Err: fmt.Errorf("%w: its alias is %q, where %q is expected", ErrForeign, l.Alias, owner)}
	}
	return l, err
}

// Autoconf selects the settings that a pod accepts from router advertisements. The pod takes addresses (RFC 4862). They
// have the same interface identifier as addr.LinkLocal of the pod's MAC. The pod takes no temporary addresses (RFC
// 8981), unless its sysctls are set otherwise (see Solicit).
type Autoconf struct {
	// DefaultRoute makes the pod accept default routes and other routes (RFC 4191) from routers. Without it, the pod
	// accepts only routes to prefixes of 48 to 64 bits, so the caller must add a default route.
	DefaultRoute bool
}

// Autoconfigured holds the settings that a pod has received from router advertisements.
type Autoconfigured struct {
	// Advertised contains the addresses, name servers and search domains. If a name server has a link-local address,
	// its zone is the name of the pod's interface.
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
	// silent is set if the pod's sysctls keep the kernel from sending solicitations. formsNone is set if Wait does not
	// expect addresses, because of silent or because the sysctls keep the kernel from forming addresses.
	silent, formsNone bool
}

// Solicit makes a pod that was attached with port.Autoconf accept router advertisements, and sends a router
// solicitation. Call it when the port forwards, and after a guard (nft.Endpoint.SLAAC) permits the pod's addresses. The
// kernel sends the solicitation before Solicit returns. Until a router answers, it repeats the solicitation, first
// after about 4 s, then with growing pauses. Solicitation.Wait returns the result. If Solicit is called again, the
// kernel sends nothing, and Wait waits for the routers' periodic advertisements.
//
// Solicit does not change an IPv6 sysctl of the pod, such as autoconf or use_tempaddr, whose value is not the kernel's
// default. The pod's owner or runtime has chosen that value. With some values the kernel sends no solicitation or forms
// no addresses. Then Wait returns at once, without addresses.
//
// With port.LeaveIPv6 the interface may have received advertisements before, if another program has moved it into the
// pod. So Solicit then deletes the default routes that the kernel has learnt, unless Autoconf.DefaultRoute is set or
// the pod's sysctls prevent solicitations.
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

// start first opens the sockets, so that no announcement is missed. Then it sets the sysctls and makes the kernel send
// a solicitation. It also deletes default routes that the kernel learnt earlier, as Solicit describes.
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

// setSysctls sets the sysctls in port.raSysctls, except those that another program has changed. It sets s.silent and
// s.formsNone according to the resulting values. It must run in the pod's network namespace.
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
// seconds after the advertisement. If the pod's sysctls keep the kernel from sending solicitations or forming
// addresses, Wait returns at once with an empty result. If another node has the address, the error matches
// addr.ErrDuplicate. If ctx ends first, the error matches ctx's error and the reason, such as addr.ErrNoRouter or
// addr.ErrNoPrefix.
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

// Close closes the sockets, and changes nothing in the pod. A Wait in progress returns an error that matches
// tombolo.ErrInvalid, and so does a second Close.
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
