package dhcp6

import (
	"net/netip"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Lease is what a server granted, and all that is needed to renew and release it, by this
// process or another. Its JSON form has stable names, for records on disk.
//
// A Lease is never changed after it was handed out: renewals make new ones.
type Lease struct {
	// Address is the leased address. DHCPv6 names no prefix: what is on the link, and where
	// the default route leads, routers advertise.
	Address netip.Addr `json:"address"`
	// DNS are the name servers, best first (option 23), and Search is the domain search list (24).
	DNS    []netip.Addr `json:"dns,omitempty"`
	Search []string     `json:"search,omitempty"`
	// Server is the server's DUID (option 2).
	Server dhcpc.Hex `json:"server"`
	// DUID and IAID are what the server knows the client and its address by.
	DUID dhcpc.Hex `json:"duid"`
	IAID uint32    `json:"iaid"`
	// Obtained is when the message was sent that the server's REPLY answered. Renew (T1), Rebind
	// (T2), Preferred and Expire follow from it. A lease that never ends has no Renew, Rebind and
	// Expire; Preferred is zero where the address stays preferred. They
	// go by the clocks of those of a dhcpc.Lease.
	Obtained  time.Time `json:"obtained"`
	Renew     time.Time `json:"renew,omitzero"`
	Rebind    time.Time `json:"rebind,omitzero"`
	Preferred time.Time `json:"preferred,omitzero"`
	Expire    time.Time `json:"expire,omitzero"`
	// Ignored says what of the server's REPLY could not be used, and why, for a log.
	Ignored []string `json:"ignored,omitempty"`
}

// Validate says whether a lease can be renewed and released: whether address, server, identity and
// times are there and possible. Its error matches tombolo.ErrInvalid.
func (l *Lease) Validate() error {
	switch {
	case l == nil:
		return trace.Argument("no lease")
	case !l.Address.IsValid():
		return trace.Unusable("it has no address")
	case !usable(l.Address):
		return trace.Unusable("%s is not the address of a host", l.Address)
	case len(l.Server) < minDUID || len(l.Server) > maxDUID:
		return trace.Unusable("server identifier of %d bytes: want %d to %d", len(l.Server), minDUID, maxDUID)
	case len(l.DUID) < minDUID || len(l.DUID) > maxDUID:
		return trace.Unusable("client identifier of %d bytes: want %d to %d", len(l.DUID), minDUID, maxDUID)
	case l.Obtained.IsZero():
		return trace.Unusable("it does not say when it began")
	case l.Infinite():
		return nil
	case l.Renew.Before(l.Obtained) || l.Rebind.Before(l.Renew) || l.Expire.Before(l.Rebind):
		return trace.Unusable("times %s, %s, %s, %s are not in their order", l.Obtained.Format(time.RFC3339),
			l.Renew.Format(time.RFC3339), l.Rebind.Format(time.RFC3339), l.Expire.Format(time.RFC3339))
	}
	return nil
}

// Infinite says whether the lease never ends.
func (l *Lease) Infinite() bool {
	return l != nil && l.Renew.IsZero() && l.Rebind.IsZero() && l.Expire.IsZero()
}

// Left gives the time until the lease ends, 0 where it has ended, and -1 where it never will.
func (l *Lease) Left(now time.Time) time.Duration {
	switch {
	case l == nil:
		return 0
	case l.Infinite():
		return -1
	}
	return max(l.Expire.Sub(now), 0)
}

// PreferredFor gives the time for which new connections may come from the address, in the
// manner of Left.
func (l *Lease) PreferredFor(now time.Time) time.Duration {
	switch {
	case l == nil:
		return 0
	case l.Preferred.IsZero():
		return l.Left(now)
	}
	return max(l.Preferred.Sub(now), 0)
}

// usable says whether a server may give a host an address: unicast, and of more than the link.
func usable(a netip.Addr) bool {
	return a.Is6() && !a.Is4In6() && a.Zone() == "" && !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast() && !a.IsLinkLocalUnicast()
}

// The bounds of a DUID, its type included: RFC 8415, section 11.1.
const (
	minDUID = 3
	maxDUID = 130
)

// DUID makes a client identifier of type 4 (RFC 6355) of a UUID, or of 16 bytes of a hash: it
// stays the same for as long as that does.
func DUID(uuid [16]byte) dhcpc.Hex { return append(dhcpc.Hex{0, 4}, uuid[:]...) }
