package lease

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/route"
)

// Whatever a server says, the host's firewall lets a pod send from the address that it
// has leased, and leads published ports there. So there are addresses that no pod gets:
// those that another must have for the network to work.

// Impossible says why no pod can have a leased address, by what the lease says itself.
func Impossible(l *dhcpc.Lease) error {
	own, subnet := l.Address.Addr(), l.Address.Masked()
	switch {
	case own.IsLinkLocalUnicast():
		return errors.New("it is a link-local address (RFC 3927)")
	case own == l.Server:
		return errors.New("it is the server's own address")
	case l.OwnRouter:
		return errors.New("it is the address of a router of the lease")
	case own == l.Broadcast:
		return errors.New("it is the network's broadcast address")
	case subnet.Bits() < 31 && own == subnet.Addr():
		return fmt.Errorf("it is the address of the network %s itself", subnet)
	case subnet.Bits() < 31 && own == last(subnet):
		return fmt.Errorf("it is the broadcast address of %s", subnet)
	}
	return nil
}

// last gives the last address of an IPv4 network.
func last(p netip.Prefix) netip.Addr {
	a := p.Masked().Addr().As4()
	for i := p.Bits(); i < 32; i++ {
		a[i/8] |= 1 << (7 - i%8)
	}
	return netip.AddrFrom4(a)
}

// Taken says why a pod cannot have an address, by what the host has: where it is the
// host's own, and where the host sends to others by it, out of the pods' bridge. Of the
// latter it is nothing to say of an address that the pod has had already: the host may
// send to others by way of a pod.
func Taken(host *route.Conn, bridge int, a, had netip.Addr) error {
	r, err := host.Get(a)
	switch {
	case errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EINVAL):
		// No route, or one that says so.
	case err != nil:
		return fmt.Errorf("cannot tell whether it is the host's: %w", err)
	case r.Type == route.Local:
		return errors.New("it is the host's own address")
	case r.Type == route.Broadcast:
		return errors.New("it is a broadcast address of the host's")
	}
	if a == had {
		return nil
	}
	family := uint8(unix.AF_INET)
	if a.Is6() {
		family = unix.AF_INET6
	}
	list, err := host.List(route.Filter{Family: family, Link: bridge})
	if err != nil {
		return fmt.Errorf("cannot tell whether it is a gateway of the host's: %w", err)
	}
	for _, r := range list {
		if r.Gateway == a {
			return fmt.Errorf("it is a gateway of the host's, for %s", destination(r))
		}
		for _, hop := range r.Nexthops {
			if hop.Gateway == a {
				return fmt.Errorf("it is a gateway of the host's, for %s", destination(r))
			}
		}
	}
	return nil
}

func destination(r route.Route) string {
	if !r.Dst.IsValid() || r.Dst.Bits() == 0 {
		return "its default route"
	}
	return r.Dst.String()
}
