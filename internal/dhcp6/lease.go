package dhcp6

import (
	"net/netip"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Lease6 is a lease that a server granted. It holds everything that this process or another needs to renew and release
// it. The names in its JSON form are stable, so that programs can keep it on disk.
//
// A Lease6 never changes: a renewal makes a new one.
type Lease6 struct {
	// Address is the leased address. DHCPv6 has no prefix length and no router. Router advertisements supply these.
	Address netip.Addr `json:"address"`
	// DNS are the name servers (option 23), best first. Search is the domain search list (option 24).
	DNS    []netip.Addr `json:"dns,omitempty"`
	Search []string     `json:"search,omitempty"`
	// Server is the server's DUID (option 2).
	Server dhcpc.Hex `json:"server"`
	// DUID and IAID identify the client and its address towards the server.
	DUID dhcpc.Hex `json:"duid"`
	IAID uint32    `json:"iaid"`
	// Obtained is the sending time of the message that the REPLY answered. Renew (T1), Rebind (T2), Preferred and
	// Expire are relative to it. They are zero in a lease that never ends. Preferred is also zero if the address
	// stays preferred for as long as it is valid. The times use the same clocks as the times of a dhcpc.Lease.
	Obtained  time.Time `json:"obtained"`
	Renew     time.Time `json:"renew,omitzero"`
	Rebind    time.Time `json:"rebind,omitzero"`
	Preferred time.Time `json:"preferred,omitzero"`
	Expire    time.Time `json:"expire,omitzero"`
	// Ignored names the parts of the server's REPLY that cannot be used, with the reasons, for a log.
	Ignored []string `json:"ignored,omitempty"`
}

// Validate returns an error if the lease cannot be renewed and released: address, server, identity and times must be
// present and possible. The error matches tombolo.ErrInvalid.
func (l *Lease6) Validate() error {
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

// Infinite reports whether the lease never ends.
func (l *Lease6) Infinite() bool {
	return l != nil && l.Renew.IsZero() && l.Rebind.IsZero() && l.Expire.IsZero()
}

// Left returns the time until the lease ends. It returns 0 if the lease has ended or is nil, and -1 if it never ends.
func (l *Lease6) Left(now time.Time) time.Duration {
	switch {
	case l == nil:
		return 0
	case l.Infinite():
		return -1
	}
	return max(l.Expire.Sub(now), 0)
}

// PreferredFor returns how long new connections may use the address as their source. Like Left, it returns 0 if that
// time is over, and -1 if it never ends.
func (l *Lease6) PreferredFor(now time.Time) time.Duration {
	switch {
	case l == nil:
		return 0
	case l.Preferred.IsZero():
		return l.Left(now)
	}
	return max(l.Preferred.Sub(now), 0)
}

// usable reports whether a server may assign the address to a host: a unicast address that is not link-local.
func usable(a netip.Addr) bool {
	return a.Is6() && !a.Is4In6() && a.Zone() == "" && !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast() &&
		!a.IsLinkLocalUnicast()
}

// minDUID and maxDUID are the minimum and maximum length of a DUID in bytes, including its type (RFC 8415, section
// 11.1).
const (
	minDUID = 3
	maxDUID = 130
)

// DUID returns a client identifier of type 4 (RFC 6355) made of a UUID, or of 16 bytes of a hash.
func DUID(uuid [16]byte) dhcpc.Hex { return append(dhcpc.Hex{0, 4}, uuid[:]...) }
