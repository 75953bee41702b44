package keeper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/lease/giveback"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// kernel is the node that the keeper runs on.
type kernel struct {
	host *netns.NS // nil: the keeper's own namespace
}

// enter opens the namespace that the record's path names, and makes sure that it is
// the one of old.
func (k kernel) enter(r *lease.Record) (pod, error) {
	if r.Host != nil {
		return k.enterHost(r)
	}
	ns, err := netns.Open(r.NetNS)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, netns.ErrNotNetNS) {
		return nil, k.unlessPort(r, err)
	}
	if err != nil {
		return nil, err
	}
	cookie, err := ns.Cookie()
	if err == nil && cookie != r.NetNSCookie {
		err = k.unlessPort(r, fmt.Errorf("%s is another network namespace by now (cookie %d, not %d)", r.NetNS, cookie, r.NetNSCookie))
	}
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	p := &kernelPod{host: k.host, ns: ns, r: r}
	if err := p.open(); err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return p, nil
}

// unlessPort says that a pod is gone whose namespace is not found, unless its port is
// there, whose other end is in that namespace: then it is only out of reach, because the
// keeper does not see the mounts of the runtime, say.
func (k kernel) unlessPort(r *lease.Record, cause error) error {
	if r.HostIf != "" {
		switch _, err := k.link(r.HostIf); {
		case err == nil:
			return fmt.Errorf("%w; but its port %s is there, so the pod is not gone: does the keeper see the mounts below /run/netns?", cause, r.HostIf)
		case !errors.Is(err, unix.ENODEV):
			return err
		}
	}
	return fmt.Errorf("%w: %w", errGone, cause)
}

// link gives the index of a link of the host. The error matches unix.ENODEV where there
// is none.
func (k kernel) link(name string) (int, error) {
	conn, err := nl.Dial(unix.NETLINK_ROUTE, &nl.Config{NetNS: k.host})
	if err != nil {
		return 0, err
	}
	index, err := linkIndex(conn, name)
	return index, errors.Join(err, conn.Close())
}

func linkIndex(conn *nl.Conn, name string) (int, error) {
	index, _, err := conn.LinkIndex(name)
	if err != nil {
		return 0, fmt.Errorf("find link %s: %w", name, err)
	}
	return index, nil
}

func (k kernel) release(ctx context.Context, r *lease.Record, l *dhcpc.Lease) error {
	return k.releaseBy(func(links *bridge.Conn) error { return giveback.Release(ctx, r, links, k.host, l) })
}

func (k kernel) release6(ctx context.Context, r *lease.Record) error {
	return k.releaseBy(func(links *bridge.Conn) error { return giveback.Release6(ctx, r, links, k.host) })
}

func (k kernel) releaseBy(send func(*bridge.Conn) error) error {
	links, err := bridge.Dial(&bridge.Config{NetNS: k.host})
	if err != nil {
		return err
	}
	defer links.Close()
	return send(links)
}

// kernelPod is a pod's namespace, entered by a netlink socket.
type kernelPod struct {
	host *netns.NS
	ns   *netns.NS
	r    *lease.Record
	conn *nl.Conn
	link int
}

func (p *kernelPod) open() error {
	conn, err := nl.Dial(unix.NETLINK_ROUTE, &nl.Config{NetNS: p.ns})
	if err != nil {
		return err
	}
	if p.link, err = linkIndex(conn, p.r.IfName); err != nil {
		return errors.Join(err, conn.Close())
	}
	p.conn = conn
	return nil
}

func (p *kernelPod) close() error { return errors.Join(p.conn.Close(), p.ns.Close()) }

// dial has the pod send from its own interface, and hears at the host's end of its link.
// In the pod's namespace a name says little: the pod may give it to a link of its own, and
// answer itself.
func (p *kernelPod) dial(ctx context.Context, local netip.Addr) (dhcpc.Transport, error) {
	port, err := p.port(ctx)
	if err != nil {
		return nil, err
	}
	sockets := transport.Config{NetNS: p.host, Link: port, MAC: []byte(p.r.Client.MAC), ARP: p.r.Client.DetectConflicts}
	witness, err := transport.DialWitness(&sockets)
	if err != nil {
		return nil, err
	}
	sockets.NetNS, sockets.Link = p.ns, p.link
	send, err := transport.Dialer(&sockets)(ctx, local)
	if err != nil {
		return nil, errors.Join(err, witness.Close())
	}
	return &heardOutside{witness.For(send), witness}, nil
}

// port gives the index of the host's end of the pod's link, which says by its alias that
// it is.
func (p *kernelPod) port(ctx context.Context) (int, error) {
	conn, err := bridge.Dial(&bridge.Config{NetNS: p.host})
	if err != nil {
		return 0, err
	}
	l, err := conn.Link(ctx, p.r.HostIf)
	if err := errors.Join(err, conn.Close()); err != nil {
		return 0, fmt.Errorf("find the pod's port: %w", err)
	}
	if !strings.HasPrefix(l.Alias, endpoint.AliasOwner(p.r.Hash())) {
		return 0, fmt.Errorf("find the pod's port: %s is another's: its alias is %q", p.r.HostIf, l.Alias)
	}
	return l.Index, nil
}

// heardOutside is a transport with the witness that it hears by.
type heardOutside struct {
	dhcpc.Transport
	witness *transport.Witness
}

func (h *heardOutside) Close() error { return errors.Join(h.Transport.Close(), h.witness.Close()) }

func (p *kernelPod) apply(a lease.Applied, left time.Duration) error {
	var errs []error
	if a.MTU != 0 && a.MTU != p.r.Applied.MTU {
		// The pod's end alone: the host's bridge may follow the lowest of its ports, and is
		// not the server's.
		var b nl.Batch
		link.Request{Name: p.r.IfName, MTU: &a.MTU}.Set(&b, "set MTU of link", p.r.IfName)
		errs = append(errs, p.conn.Execute(&b))
	}
	for _, prefix := range a.Addresses {
		ends := lifetime(left, time.Second)
		errs = append(errs, addr.On(p.conn).Replace(addr.Address{
			Prefix: prefix, Link: p.link, Broadcast: addr.Broadcast(prefix), Valid: ends, Preferred: ends,
		}))
	}
	for _, r := range a.Routes {
		_, err := route.On(p.conn).Ensure(p.route(r))
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (p *kernelPod) lacks(a lease.Applied) (bool, error) {
	have, err := addr.On(p.conn).List(addr.Filter{Link: p.link, Family: unix.AF_INET})
	return slices.ContainsFunc(a.Addresses, func(want netip.Prefix) bool {
		return !slices.ContainsFunc(have, func(a addr.Address) bool { return a.Prefix == want })
	}), err
}

func (p *kernelPod) route(r dhcpc.Route) route.Route {
	return lease.RouteOf(r, p.link, p.r.Policy.Priority)
}

func (p *kernelPod) withdraw(a lease.Applied) error {
	var errs []error
	for _, r := range slices.Backward(a.Routes) {
		errs = append(errs, route.On(p.conn).Remove(p.route(r)))
	}
	for _, prefix := range a.Addresses {
		errs = append(errs, addr.On(p.conn).Remove(addr.Address{Prefix: prefix, Link: p.link}))
	}
	return errors.Join(errs...)
}
