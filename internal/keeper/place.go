package keeper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
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
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

// kernel implements the interface node by requests to the kernel of the keeper's host.
type kernel struct {
	host    *netns.NS     // nil for the keeper's own namespace
	network *network.Node // if nil, follow does nothing
}

// podInterface is the interface of a pod with a leased address. The methods apply and withdraw complete a change that
// has begun, even if the keeper's context ends.
type podInterface struct {
	kernel
	*lease.Interface
	r  *lease.Record
	ns *netns.NS // the pod's network namespace
}

// enter opens the interface of a lease's pod, for the caller to close. If the pod no longer exists, the error matches
// errGone.
func (k kernel) enter(r *lease.Record) (pod, error) {
	ns, err := netns.OpenSame(r.NetNS, r.NetNSCookie)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, netns.ErrNotNetNS), errors.Is(err, netns.ErrOther):
		return nil, k.errUnlessPort(r, err)
	case err != nil:
		return nil, err
	}

	p := &podInterface{kernel: k, r: r, ns: ns}
	err = k.withLinks(func(links *bridge.Conn) (err error) {
		p.Interface, err = lease.InterfaceOf(context.Background(), r, ns, links)
		return err
	})
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return p, nil
}

// errUnlessPort returns an error for a pod whose namespace was not found. The error matches errGone only if the pod's
// port, the host's end of its link, is gone too, or is not recorded. If the port exists, so does the pod, but the
// keeper cannot reach it, for example because it does not see the runtime's mounts.
func (k kernel) errUnlessPort(r *lease.Record, cause error) error {
	if r.HostIf != "" {
		switch _, err := k.port(r.HostIf); {
		case err == nil:
			return fmt.Errorf(
				"%w; but its port %s is there, so the pod is not gone: does the keeper see the mounts below "+
					"/run/netns?",
				cause, r.HostIf)
		case !errors.Is(err, fs.ErrNotExist):
			return err
		}
	}

	return fmt.Errorf("%w: %w", errGone, cause)
}

// port returns the host's link with the given name, which is the host's end of a pod's link. If there is none, the
// error matches fs.ErrNotExist.
func (k kernel) port(name string) (l *bridge.Link, _ error) {
	err := k.withLinks(func(links *bridge.Conn) (err error) {
		l, err = links.Link(context.Background(), name)
		return err
	})
	return l, err
}

func (k kernel) withLinks(do func(*bridge.Conn) error) error {
	links, err := bridge.Dial(k.host)
	if err != nil {
		return err
	}
	defer links.Close()
	return do(links)
}

// checkConflict returns an error if the host's addresses or routes show that no pod can have the address a. at is the
// name of the host's link in the pods' network (lease.Record.At), and had is the pod's previous address: see
// lease.CheckConflict.
func (k kernel) checkConflict(at string, a, had netip.Addr) error {
	return k.withLinks(func(links *bridge.Conn) error {
		l, err := links.Link(context.Background(), at)
		if err != nil {
			return err
		}
		return lease.CheckConflict(context.Background(), links.Routes(), l.Index, a, had)
	})
}

// follow updates the host's rules for the pod after a change of its lease. It returns the old and the new
// addresses, or nil if nothing changed.
func (k kernel) follow(ctx context.Context, r *lease.Record) (from, to []netip.Prefix, _ error) {
	if k.network == nil {
		return nil, nil, nil
	}
	return k.network.Upkeep().Follow(ctx, network.Key{Network: r.Network, ContainerID: r.ContainerID, IfName: r.IfName})
}

// release sends a RELEASE of the DHCPv4 or DHCPv6 lease from the host, for a pod that no longer exists.
func (k kernel) release(ctx context.Context, r *lease.Record, six bool) error {
	return k.withLinks(func(links *bridge.Conn) error { return lease.Release(ctx, r, links, k.host, six) })
}

func (p *podInterface) close() error { return errors.Join(p.Conn.Close(), p.ns.Close()) }

// dial returns a transport that sends from the pod's interface and receives at the host's end of the pod's link. It
// sends through a UDP socket if local is a valid address, and otherwise through a packet socket. Receiving inside the
// pod would be unsafe: the pod may give the interface's name to another link, and answer itself.
func (p *podInterface) dial(_ context.Context, local netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) {
	sockets := &transport.Config{NetNS: p.ns, Link: p.Index, MAC: []byte(p.r.Client.MAC),
		ARP: p.r.Client.DetectConflicts}
	outside, err := p.hostEndConfig()
	if err != nil {
		return nil, err
	}

	send := transport.DialRaw
	if local.IsValid() {
		send = transport.DialUDP
	}
	return transport.DialWitness(outside, func() (dhcpc.Transport[*dhcpc.Packet], error) { return send(sockets) })
}

// dial6 returns a transport to DHCPv6 servers. It sends through a UDP socket in the pod, and receives at the host's end
// of the pod's link.
func (p *podInterface) dial6() (dhcpc.Transport[[]byte], error) {
	outside, err := p.hostEndConfig()
	if err != nil {
		return nil, err
	}
	return transport.DialWitness6(outside, func() (dhcpc.Transport[[]byte], error) {
		return transport.DialUDP6(&transport.Config{NetNS: p.ns, Link: p.Index})
	})
}

// hostEndConfig returns the configuration for receiving at the host's end of the pod's link. It returns an error if the
// link's alias does not name the pod.
func (p *podInterface) hostEndConfig() (*transport.Config, error) {
	l, err := p.port(p.r.HostIf)
	if err != nil {
		return nil, fmt.Errorf("find the pod's port: %w", err)
	}
	if !strings.HasPrefix(l.Alias, endpoint.AliasOwner(p.r.Hash())) {
		return nil, fmt.Errorf("find the pod's port: %s is another's: its alias is %q", p.r.HostIf, l.Alias)
	}
	return &transport.Config{NetNS: p.host, Link: l.Index, MAC: []byte(p.r.Client.MAC),
		ARP: p.r.Client.DetectConflicts}, nil
}

// has returns the interface's addresses that equal want. For IPv6 it ignores the prefix length, as
// lease.Interface.Keeps does.
func (p *podInterface) has(want netip.Prefix) ([]addr.Address, error) {
	list, err := addr.On(p.Conn).List(context.Background(), addr.Filter{})
	return slices.DeleteFunc(list, func(a addr.Address) bool {
		is := a.Prefix == want || want.Addr().Is6() && a.Prefix.Addr() == want.Addr()
		return !is || a.Link != p.Index
	}), err
}

func (p *podInterface) keeps(a lease.Applied) (lease.Applied, error) {
	return p.Keeps(context.Background(), a)
}

// formedAddresses returns the usable addresses that the pod formed from router advertisements. It recognizes them by
// the interface identifier, which the pod's kernel makes from the MAC.
func (p *podInterface) formedAddresses() ([]netip.Prefix, error) {
	list := []netip.Prefix{}
	local := addr.LinkLocal(net.HardwareAddr(p.r.Client.MAC))
	all, err := addr.On(p.Conn).List(context.Background(), addr.Filter{Link: p.Index, Family: unix.AF_INET6})
	for _, a := range all {
		isUsable := a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == 0 && !a.Prefix.Addr().IsLinkLocalUnicast()
		if isUsable && !a.Prefix.IsSingleIP() && ident.EndsAlike(a.Prefix.Addr(), local) {
			list = append(list, a.Prefix)
		}
	}

	return list, err
}

// apply adds addresses and routes to the pod, with the given lifetimes of the addresses. It skips addresses that
// already have about the right valid lifetime (see hasLifetime), and leaves the MTU as it is.
func (p *podInterface) apply(a lease.Applied, valid, preferred time.Duration) error {
	a.MTU = 0
	a.Addresses = slices.DeleteFunc(slices.Clone(a.Addresses),
		func(own netip.Prefix) bool { return p.hasLifetime(own, valid) })
	return p.Apply(context.Background(), a, valid, preferred, lease.ReplaceOwn(p.r.Applied.Routes))
}

// hasLifetime reports whether the pod has the address with a valid lifetime that differs from the given one by at most
// two seconds. It returns false for a lifetime without end. Setting the address again could cost the pod the address:
// see confirmAfter.
func (p *podInterface) hasLifetime(own netip.Prefix, valid time.Duration) bool {
	have, err := p.has(own)
	want := lease.Lifetime(valid, time.Second)
	if err != nil || len(have) == 0 || want == nil || have[0].Valid == nil {
		return false
	}
	return (*have[0].Valid - *want).Abs() <= 2*time.Second
}

// withdraw removes routes and addresses from the pod. For the removal it sets promote_secondaries, as systemd does for
// every link. Without it, the kernel would also remove other addresses in the same network, and then all their routes.
func (p *podInterface) withdraw(a lease.Applied) error {
	return p.withParameter(sysctl.Link("ipv4", p.Name, "promote_secondaries"), func() error {
		return p.Withdraw(context.Background(), a)
	})
}

const (
	// detection limits the wait for duplicate address detection. That takes up to two seconds: one until the kernel
	// sends its query, and one for the answer.
	detection = 10 * time.Second
	// lookPause is the interval between two checks for the result of duplicate address detection.
	lookPause = 20 * time.Millisecond
)

// inUse adds an IPv6 address to the pod, and reports whether another host has the address. If so, or after an error, it
// removes the address again. The kernel detects duplicates only while accept_dad is set, so inUse sets accept_dad for
// that time.
func (p *podInterface) inUse(
	ctx context.Context, a lease.Applied, valid, preferred time.Duration,
) (used bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, detection)
	defer cancel()
	err = p.withParameter(sysctl.Link("ipv6", p.Name, "accept_dad"), func() error {
		err := p.apply(a, valid, preferred)
		if err == nil {
			used, err = p.awaitDetection(ctx, a.Addresses[0])
		}
		if used || err != nil {
			err = errors.Join(err, p.withdraw(a))
		}
		return err
	})

	return used, err
}

// withParameter sets the kernel parameter at path to 1 in the pod's namespace, calls fn, and restores the parameter.
func (p *podInterface) withParameter(path string, fn func() error) error {
	before := ""
	err := p.ns.Do(func() (err error) {
		if before, err = sysctl.Read(path); err == nil && before != "1" {
			err = sysctl.Write(path, "1")
		}
		return err
	})
	if err != nil {
		return err
	}

	if err = fn(); before != "1" {
		err = errors.Join(err, p.ns.Do(func() error { return sysctl.Write(path, before) }))
	}

	return err
}

// awaitDetection waits for the result of duplicate address detection, and reports whether another host has the address.
// If the address has disappeared, it returns true.
func (p *podInterface) awaitDetection(ctx context.Context, own netip.Prefix) (bool, error) {
	for {
		have, err := p.has(own)
		switch {
		case err != nil:
			return false, err
		case len(have) == 0 || have[0].Flags&unix.IFA_F_DADFAILED != 0:
			return true, nil
		case have[0].Flags&unix.IFA_F_TENTATIVE == 0:
			return false, nil
		}

		select {
		case <-ctx.Done():
			return false, fmt.Errorf("look for other hosts that have %s: %w", own.Addr(), ctx.Err())
		case <-time.After(lookPause):
		}
	}
}
