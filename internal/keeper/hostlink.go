package keeper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// bridgedNIC is the host as one of its leases sees it: a bridge and the NIC that is its
// port. The bridge has the leased address, and, where the takeover left it there, the NIC
// too or only the NIC.
type bridgedNIC struct {
	host   *netns.NS
	r      *lease.Record
	conn   *nl.Conn
	bridge int
	nic    int
}

// enterHost finds the bridge and its port in the host's own namespace. The error matches
// errGone where one of them is no more; that the NIC is no port is repaired elsewhere.
func (k kernel) enterHost(r *lease.Record) (pod, error) {
	if err := k.isHost(r); err != nil {
		return nil, err
	}
	conn, err := nl.Dial(unix.NETLINK_ROUTE, &nl.Config{NetNS: k.host})
	if err != nil {
		return nil, err
	}
	p := &bridgedNIC{host: k.host, r: r, conn: conn}
	if err := p.find(); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return p, nil
}

// isHost makes sure that this is the namespace in which the lease was adopted. Another
// one is that of a node in a container that was started again, or the keeper is not where
// it belongs.
func (k kernel) isHost(r *lease.Record) error {
	ns := k.host
	if ns == nil {
		own, err := netns.Current()
		if err != nil {
			return err
		}
		defer own.Close()
		ns = own
	}
	cookie, err := ns.Cookie()
	if err != nil {
		return err
	}
	if cookie != r.NetNSCookie {
		return fmt.Errorf("%w from here: it was adopted in another network namespace (cookie %d) than the keeper's (%d): does tombolod run in the host's?",
			errGone, r.NetNSCookie, cookie)
	}
	return nil
}

func (p *bridgedNIC) find() error {
	var b nl.Batch
	var bridge, nic link.Link
	link.Get(&b, p.r.Bridge, 0, &bridge, unix.IFLA_MASTER)
	link.Get(&b, p.r.Host.NIC, 0, &nic, unix.IFLA_MASTER)
	err := p.conn.Execute(&b)
	p.bridge, p.nic = bridge.Index, nic.Index
	switch {
	case errors.Is(err, unix.ENODEV) || errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %w", errGone, err)
	case err != nil:
		return err
	case nic.Master != p.bridge:
		return fmt.Errorf("%s is not a port of %s any more: was it given back? `tombolo uplink status` says how it is", p.r.Host.NIC, p.r.Bridge)
	}
	return nil
}

func (p *bridgedNIC) close() error { return p.conn.Close() }

// dial opens a socket on the bridge. Where the host's own client has its port to itself,
// a packet socket does what the other would.
func (p *bridgedNIC) dial(ctx context.Context, local netip.Addr) (dhcpc.Transport, error) {
	cfg := &transport.Config{NetNS: p.host, Link: p.bridge, MAC: []byte(p.r.Client.MAC)}
	t, err := transport.Dialer(cfg)(ctx, local)
	if errors.Is(err, unix.EADDRINUSE) {
		return transport.Dialer(cfg)(ctx, netip.Addr{})
	}
	return t, err
}

// has gives the addresses of bridge and NIC that are as one, whatever their prefix length.
// The error is that another link has it.
func (p *bridgedNIC) has(want netip.Addr) ([]addr.Address, error) {
	list, err := addr.On(p.conn).List(addr.Filter{Family: unix.AF_INET})
	if err != nil {
		return nil, err
	}
	elsewhere := 0
	here := slices.DeleteFunc(list, func(a addr.Address) bool {
		if a.Prefix.Addr() != want {
			return true
		}
		if a.Link != p.bridge && a.Link != p.nic {
			elsewhere = a.Link
			return true
		}
		return false
	})
	if len(here) == 0 && elsewhere != 0 {
		return nil, fmt.Errorf("%s is on link %d, and neither on %s nor on %s: somebody moved it", want, elsewhere, p.r.Bridge, p.r.Host.NIC)
	}
	return here, nil
}

func (p *bridgedNIC) routes(l *dhcpc.Lease) ([]lease.HostRoute, bool, error) {
	here, err := p.has(l.Address.Addr())
	if err != nil || len(here) == 0 {
		return nil, false, err
	}
	all, err := route.On(p.conn).List(route.Filter{Family: unix.AF_INET, Link: p.bridge, Type: route.Unicast})
	if err != nil {
		return nil, false, err
	}
	var list []lease.HostRoute
	for _, r := range all {
		if goesWith(r, l) {
			list = append(list, lease.HostRouteOf(r))
		}
	}
	return list, true, nil
}

// near is by how much a lifetime in the kernel, which counts in seconds, may differ from
// the lease's without being set again.
const near = 2 * time.Second

// apply sets the lifetimes of addresses that are there, and adds those that are not: where
// the host has an address of the lease already, else on the bridge. It sets nothing else.
func (p *bridgedNIC) apply(a lease.Applied, left time.Duration) error {
	for _, prefix := range a.Addresses {
		if err := p.applyOne(prefix, left); err != nil {
			return err
		}
	}
	return nil
}

func (p *bridgedNIC) applyOne(prefix netip.Prefix, left time.Duration) error {
	here, err := p.has(prefix.Addr())
	if err != nil {
		return err
	}
	var errs []error
	found := false
	for _, have := range here {
		if have.Prefix != prefix {
			continue // to be withdrawn
		}
		found = true
		if current(have.Valid, left) && current(have.Preferred, left) {
			continue
		}
		have.Valid, have.Preferred = lifetimes(left)
		errs = append(errs, addr.On(p.conn).Replace(have))
	}
	if !found {
		errs = append(errs, p.add(prefix, left))
	}
	return errors.Join(errs...)
}

// current says whether the kernel has a lifetime as it should be.
func current(have *time.Duration, left time.Duration) bool {
	if have == nil || left < 0 {
		return have == nil && left < 0
	}
	return (*have - left).Abs() <= near
}

// lifetimes are those of an address: nil is for ever.
func lifetimes(left time.Duration) (valid, preferred *time.Duration) {
	if left < 0 {
		return nil, nil
	}
	// The kernel refuses 0 s, and takes the largest number for ever.
	d := min(max(left, time.Second), (math.MaxUint32-1)*time.Second)
	return &d, &d
}

// add adds an address beside those that the host has of the lease, in their likeness.
func (p *bridgedNIC) add(prefix netip.Prefix, left time.Duration) error {
	var models []addr.Address
	for _, old := range p.r.Applied.Addresses {
		have, err := p.has(old.Addr())
		if err != nil {
			return err
		}
		models = append(models, have...)
	}
	if len(models) == 0 {
		models = []addr.Address{{Link: p.bridge, Broadcast: addr.Broadcast(prefix)}}
		// The route to its network is among those that are set then.
		if slices.ContainsFunc(p.r.Host.Routes, func(r lease.HostRoute) bool { return !r.Via.IsValid() && r.Dst == p.r.Lease.Address.Masked() }) {
			models[0].Flags = addr.NoPrefixRoute
		}
	}
	var errs []error
	done := map[int]bool{}
	for _, a := range models {
		if done[a.Link] {
			continue
		}
		done[a.Link] = true
		if a.Broadcast.IsValid() {
			a.Broadcast = addr.Broadcast(prefix)
		}
		a.Prefix, a.Peer = prefix, netip.Addr{}
		a.Valid, a.Preferred = lifetimes(left)
		errs = append(errs, addr.On(p.conn).Replace(a))
	}
	return errors.Join(errs...)
}

// withdraw takes addresses from bridge and NIC, and nothing else.
func (p *bridgedNIC) withdraw(a lease.Applied) error {
	var errs []error
	for _, index := range []int{p.bridge, p.nic} {
		errs = append(errs, p.withdrawFrom(index, a.Addresses))
	}
	return errors.Join(errs...)
}

// withdrawFrom takes addresses from a link. With the first of a network the kernel takes
// all the others away, unless promote_secondaries is set; and if it is, their routes, for
// a moment in which it promotes one of them: both are put back.
func (p *bridgedNIC) withdrawFrom(index int, gone []netip.Prefix) error {
	addrs, err := addr.On(p.conn).List(addr.Filter{Family: unix.AF_INET, Link: index})
	if err != nil {
		return err
	}
	rest := slices.DeleteFunc(slices.Clone(addrs), func(a addr.Address) bool { return slices.Contains(gone, a.Prefix) })
	if len(rest) == len(addrs) {
		return nil
	}
	routes, err := route.On(p.conn).List(route.Filter{Family: unix.AF_INET, Link: index, Type: route.Unicast})
	if err != nil {
		return err
	}
	errs := []error{p.promoteSecondaries(index)}
	for _, prefix := range gone {
		errs = append(errs, addr.On(p.conn).Remove(addr.Address{Prefix: prefix, Link: index}))
	}
	for _, a := range rest {
		if err := addr.On(p.conn).Add(a); !errors.Is(err, unix.EEXIST) {
			errs = append(errs, err)
		}
	}
	for _, r := range routes {
		if slices.ContainsFunc(gone, func(p netip.Prefix) bool { return p.Addr() == r.Source }) {
			continue
		}
		if err := route.On(p.conn).Add(r); !errors.Is(err, unix.EEXIST) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// promoteSecondaries sets net.ipv4.conf.<link>.promote_secondaries, as systemd does for
// every link. It stays set.
func (p *bridgedNIC) promoteSecondaries(index int) error {
	const promote = 20 // IPV4_DEVCONF_PROMOTE_SECONDARIES
	var b nl.Batch
	link.Request{Index: index, IPv4: []link.Parameter{{ID: promote, Value: 1}}}.Set(&b, "set promote_secondaries of link", strconv.Itoa(index))
	return p.conn.Execute(&b)
}

func (p *bridgedNIC) setRoutes(list []lease.HostRoute) error {
	var errs []error
	for _, r := range list {
		errs = append(errs, p.setRoute(r))
	}
	return errors.Join(errs...)
}

// setRoute leaves a route of another link alone that is in the way, where Replace would
// take its place.
func (p *bridgedNIC) setRoute(r lease.HostRoute) error {
	conn := route.On(p.conn)
	err := conn.Add(r.Route(p.bridge))
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	have, err := conn.List(route.Filter{Family: unix.AF_INET, Table: r.Table})
	if err != nil {
		return err
	}
	for _, one := range have {
		if sameKey(lease.HostRouteOf(one), r) && one.Link != p.bridge && one.Link != p.nic {
			return fmt.Errorf("set route %s: link %d has one of the same destination and metric", r.Route(p.bridge), one.Link)
		}
	}
	return conn.Replace(r.Route(p.bridge))
}

func (p *bridgedNIC) removeRoutes(list []lease.HostRoute) error {
	var errs []error
	for _, r := range list {
		errs = append(errs, route.On(p.conn).Remove(r.Route(p.bridge)))
	}
	return errors.Join(errs...)
}
