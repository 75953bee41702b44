package keeper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/route"
)

// A lease of the host's own (lease.Record.Host) is renewed on the bridge, as its client would have done on
// the NIC. Two things differ from a pod's: it is never released, and what the host has is taken away only
// when there is something in its place.

// hostPod is the host as one of its leases sees it: a bridge and the NIC that is its port. The bridge has the
// leased address, and, where the takeover left it there, the NIC too or only the NIC.
type hostPod struct {
	kernelPod
	nic int
}

// enterHost finds the bridge and its port. Once the lease has ended, the error matches errGone where one of them
// is no more; that the NIC is no port is repaired elsewhere.
func (k kernel) enterHost(r *lease.Record) (pod, error) {
	conn, err := nl.Dial(unix.NETLINK_ROUTE, &nl.Config{NetNS: k.host})
	if err != nil {
		return nil, err
	}
	p := &hostPod{kernelPod: kernelPod{host: k.host, r: r, conn: conn}}
	if err := p.find(); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return p, nil
}

func (p *hostPod) find() error {
	var b nl.Batch
	var bridge, nic link.Link
	link.Get(&b, p.r.Bridge, 0, &bridge, unix.IFLA_MASTER)
	link.Get(&b, p.r.Host.NIC, 0, &nic, unix.IFLA_MASTER)
	err := p.conn.Execute(&b)
	p.link, p.nic = bridge.Index, nic.Index
	switch {
	case errors.Is(err, fs.ErrNotExist) && p.r.Lease.Left(now()) == 0:
		return fmt.Errorf("%w: %w", errGone, err)
	case err != nil:
		return err
	case nic.Master != p.link:
		return fmt.Errorf("%s is not a port of %s any more: was it given back? `tombolo uplink status` says how it is", p.r.Host.NIC, p.r.Bridge)
	}
	return nil
}

func (p *hostPod) close() error { return p.conn.Close() }

// dial opens a socket on the bridge. Where the host's own client has its port to itself,
// a packet socket does what the other would.
func (p *hostPod) dial(ctx context.Context, local netip.Addr) (dhcpc.Transport, error) {
	cfg := &transport.Config{NetNS: p.host, Link: p.link, MAC: []byte(p.r.Client.MAC)}
	t, err := transport.Dialer(cfg)(ctx, local)
	if errors.Is(err, unix.EADDRINUSE) {
		return transport.Dialer(cfg)(ctx, netip.Addr{})
	}
	return t, err
}

// has gives an address as bridge and NIC have it.
func (p *hostPod) has(want netip.Prefix) ([]addr.Address, error) {
	list, err := addr.On(p.conn).List(addr.Filter{Family: unix.AF_INET})
	return slices.DeleteFunc(list, func(a addr.Address) bool { return a.Prefix != want || a.Link != p.link && a.Link != p.nic }), err
}

func (p *hostPod) lacks(a lease.Applied) (bool, error) {
	for _, prefix := range a.Addresses {
		if have, err := p.has(prefix); err != nil || len(have) == 0 {
			return true, err
		}
	}
	return false, nil
}

// apply sets the lifetimes of addresses that are there, and adds those that are not, with their routes. Routes of
// an address that is there are left as the host has them, unless the lease has others. It sets nothing else.
func (p *hostPod) apply(a lease.Applied, left time.Duration) error {
	if p.r.Host.Permanent {
		left = -1
	}
	// The record has both addresses while one takes the other's place, with whose routes it goes.
	set := len(p.r.Applied.Without(a).Addresses) > 0 || len(p.r.Applied.Routes) > 0 && len(a.Without(p.r.Applied).Routes) > 0
	var errs []error
	for _, prefix := range a.Addresses {
		have, err := p.has(prefix)
		if len(have) == 0 && err == nil {
			have, err = p.fresh(prefix)
			set = true
		}
		errs = append(errs, err)
		for _, one := range have {
			one.Valid = lifetime(left, time.Second)
			one.Preferred = one.Valid
			errs = append(errs, addr.On(p.conn).Replace(one))
		}
		if set {
			errs = append(errs, p.setRoutes(prefix, a.Routes))
		}
	}
	return errors.Join(errs...)
}

// fresh gives an address for the links that have the lease's last one, or else for the bridge. The route to its
// subnet is among those that are set then, since it leads to the bridge even if the NIC has the address.
func (p *hostPod) fresh(prefix netip.Prefix) ([]addr.Address, error) {
	var list []addr.Address
	for _, old := range p.r.Applied.Addresses {
		have, err := p.has(old)
		if err != nil {
			return nil, err
		}
		list = append(list, have...)
	}
	if len(list) == 0 {
		list = []addr.Address{{Link: p.link}}
	}
	for i := range list {
		list[i] = addr.Address{Link: list[i].Link, Label: list[i].Label, Prefix: prefix, Broadcast: addr.Broadcast(prefix), Flags: addr.NoPrefixRoute}
	}
	return list, nil
}

// setRoutes sets the routes of an address, which go with it.
func (p *hostPod) setRoutes(own netip.Prefix, routes []dhcpc.Route) error {
	var errs []error
	for _, r := range slices.Concat([]dhcpc.Route{{Dst: own.Masked()}}, routes) {
		one := p.route(r)
		one.Source, one.Protocol = own.Addr(), route.ProtocolDHCP
		_, err := route.On(p.conn).Ensure(one)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// withdraw takes addresses from bridge and NIC, and with each its routes. Without promote_secondaries, which systemd
// sets for every link, the kernel would take others of the same network along.
func (p *hostPod) withdraw(a lease.Applied) error {
	promote := func() error { return sysctl.Write(sysctl.Link("ipv4", p.r.Bridge, "promote_secondaries"), "1") }
	var errs []error
	if p.host == nil {
		errs = append(errs, promote())
	} else {
		errs = append(errs, p.host.Do(promote))
	}
	for _, r := range a.Routes {
		one := p.route(r)
		one.Protocol = route.ProtocolDHCP
		errs = append(errs, route.On(p.conn).Remove(one))
	}
	for _, prefix := range a.Addresses {
		for _, index := range []int{p.link, p.nic} {
			errs = append(errs, addr.On(p.conn).Remove(addr.Address{Prefix: prefix, Link: index}))
		}
	}
	return errors.Join(errs...)
}
