package dhcpc

import (
	"net/netip"
	"time"

	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Lease is a lease from a server, with everything needed to renew and release it, by this process or another. Its
// JSON form has stable names, for records on disk.
//
// A Lease is never changed after it was returned: renewals create new ones.
type Lease struct {
	// Address is the leased address with the length of its network's prefix.
	Address netip.Prefix `json:"address"`
	// Routes are all the routes to install, in an order that the kernel accepts: classless ones (option 121, else
	// 249) if the server sent any, else static ones (33) and a default route to the first router. A router that is
	// not on the link is preceded by a route to it.
	Routes []Route `json:"routes,omitempty"`
	// Routers is option 3 as it was sent, best first. Install Routes, not these: if a server sends classless routes
	// too, clients must ignore its routers.
	Routers []netip.Addr `json:"routers,omitempty"`
	// OwnRouter means that the server named the leased address itself as a router, in any of these options. Then
	// Routes has its destinations on the link.
	OwnRouter bool `json:"ownRouter,omitempty"`
	// DNS are the name servers, best first (option 6).
	DNS []netip.Addr `json:"dns,omitempty"`
	// Domain is the domain name (option 15).
	Domain string `json:"domain,omitempty"`
	// Search is the domain search list (option 119).
	Search []string `json:"search,omitempty"`
	// MTU is the link's MTU (option 26), at least 576 and at most Config.LinkMTU, or 0 if the server sent none.
	MTU int `json:"mtu,omitempty"`
	// Broadcast is the broadcast address (option 28), if the server sent one.
	Broadcast netip.Addr `json:"broadcast,omitzero"`

	// Server is the server's identifier (option 54), which is its address.
	Server netip.Addr `json:"server"`
	// ServerMAC is the source of the frame with the ACK: the server's MAC, or that of the relay in between. It is
	// empty if the transport does not know it.
	ServerMAC Hex `json:"serverMAC,omitempty"`

	// Others are servers that also answered, while this lease or its predecessors were acquired.
	Others []netip.Addr `json:"others,omitempty"`

	// Obtained is the time of the REQUEST that the server's ACK answered. Renew (T1), Rebind (T2) and Expire follow
	// from it. All three are zero if the lease never ends. Within a process they have a reading of the monotonic
	// clock, which the kernel also uses for lifetimes of addresses. Neither clock counts the time of a suspended
	// machine; Client.Run does. Read from JSON, they have only the wall clock.
	Obtained time.Time `json:"obtained"`
	Renew    time.Time `json:"renew,omitzero"`
	Rebind   time.Time `json:"rebind,omitzero"`
	Expire   time.Time `json:"expire,omitzero"`

	// MAC and ClientID identify the client to the server (chaddr, and option 61 with its type byte, which is empty if
	// none was sent).
	MAC      Hex `json:"mac"`
	ClientID Hex `json:"clientID,omitempty"`

	// Options are the values, as sent, of the options in Config.Request.
	Options map[uint8]Hex `json:"options,omitempty"`
	// Ignored describes, for a log, the answers that were rejected and the parts of the server's ACK that could not
	// be used, with the reasons.
	Ignored []string `json:"ignored,omitempty"`
}

// Route is a route that a server sent.
type Route struct {
	Dst netip.Prefix `json:"dst"`
	// Gateway is the router; the zero value means that Dst is on the link.
	Gateway netip.Addr `json:"gateway,omitzero"`
}

// String returns "10.0.0.0/8 via 192.0.2.1" or "192.0.2.1/32 on link".
func (r Route) String() string {
	if !r.Gateway.IsValid() {
		return r.Dst.String() + " on link"
	}
	return r.Dst.String() + " via " + r.Gateway.String()
}

// Validate returns an error unless a lease can be resumed and released: it checks address, server, MAC and times. The
// error matches tombolo.ErrInvalid.
func (l *Lease) Validate() error {
	switch {
	case l == nil:
		return trace.Argument("no lease")
	case !l.Address.IsValid():
		return trace.Unusable("it has no address")
	case !usable(l.Address.Addr()):
		return trace.Unusable("%s is not the address of a host", l.Address)
	case !l.Server.IsValid():
		return trace.Unusable("it has no server")
	case !l.Server.Is4():
		return trace.Unusable("server %s is not an IPv4 address", l.Server)
	case len(l.MAC) != macLen:
		return trace.Unusable("MAC address %q is not of %d bytes", l.MAC, macLen)
	case l.Obtained.IsZero():
		return trace.Unusable("it does not say when it began")
	case l.Infinite():
		return nil
	case l.Renew.Before(l.Obtained) || l.Rebind.Before(l.Renew) || l.Expire.Before(l.Rebind):
		return trace.Unusable("times %s, %s, %s, %s are not in their order",
			l.Obtained.Format(time.RFC3339), l.Renew.Format(time.RFC3339), l.Rebind.Format(
				time.RFC3339), l.Expire.Format(time.RFC3339))
	}

	return nil
}

// Infinite reports whether the lease never ends.
func (l *Lease) Infinite() bool {
	return l != nil && l.Renew.IsZero() && l.Rebind.IsZero() && l.Expire.IsZero()
}

// Left returns the time until the lease ends, 0 if it has ended, and -1 if it never ends.
func (l *Lease) Left(now time.Time) time.Duration {
	switch {
	case l == nil:
		return 0
	case l.Infinite():
		return -1
	}
	return max(l.Expire.Sub(now), 0)
}

// unconfirmed returns a lease for a client that does not know whether it is still valid, so that servers are asked at
// once. If the lease lies in the future, because the clock was set, it lasts no longer than it was granted for.
func (l *Lease) unconfirmed(now time.Time) *Lease {
	if l.Infinite() {
		return l
	}
	next := *l
	if now.Before(l.Obtained) {
		next.Obtained, next.Expire = now, l.Expire.Add(now.Sub(l.Obtained))
	}
	next.Renew, next.Rebind = now, now
	return &next
}

// usable reports whether a host may have an address: unicast, and neither loopback nor reserved.
func usable(a netip.Addr) bool {
	return a.Is4() && !a.IsUnspecified() && !a.IsLoopback() && a.As4()[0] != 0 && a.As4()[0] < 224
}
