package dhcpc

import (
	"net/netip"
	"time"

	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Lease is a lease from a server, with everything needed to renew and release it, by this process or another. The
// names in its JSON form are stable, so that programs can keep it on disk.
//
// The package never changes a Lease after returning it: renewals create new ones.
type Lease struct {
	// Address is the leased address with the prefix length of its network.
	Address netip.Prefix `json:"address"`
	// Routes are all the routes to install, in an order that the kernel accepts. If the server sent classless routes
	// (option 121, else 249), Routes has these. Otherwise it has the static routes (33) and a default route to the
	// first router. If a router is not on the link, a route to it comes first.
	Routes []Route `json:"routes,omitempty"`
	// Routers are the usable routers of option 3, best first. Install Routes, not these: if a server also sends
	// classless routes, clients must ignore its routers.
	Routers []netip.Addr `json:"routers,omitempty"`
	// OwnRouter means that Routers, or a route from the server, names the leased address itself as a router. Routes
	// then treats the destinations behind that router as directly on the link.
	OwnRouter bool `json:"ownRouter,omitempty"`
	// DNS are the name servers, best first (option 6).
	DNS []netip.Addr `json:"dns,omitempty"`
	// Domain is the domain name (option 15).
	Domain string `json:"domain,omitempty"`
	// Search is the domain search list (option 119).
	Search []string `json:"search,omitempty"`
	// MTU is the link's MTU in bytes (option 26), at least 576 and at most Config.LinkMTU. It is 0 if the server sent
	// none.
	MTU int `json:"mtu,omitempty"`
	// Broadcast is the broadcast address (option 28). It is not valid if the server sent none.
	Broadcast netip.Addr `json:"broadcast,omitzero"`

	// Server is the server's identifier (option 54), which is its address.
	Server netip.Addr `json:"server"`
	// ServerMAC is the source MAC of the frame with the ACK. It belongs to the server, or to the relay in between. It
	// is empty if the transport does not know it.
	ServerMAC Hex `json:"serverMAC,omitempty"`

	// Others are other servers that answered while the client acquired this lease or the leases before it.
	Others []netip.Addr `json:"others,omitempty"`

	// Obtained is the time of the REQUEST that the ACK answered. Renew (T1), Rebind (T2) and Expire are relative to
	// it, and all zero if the lease never ends.
	//
	// Within a process the times have a reading of the monotonic clock, which the kernel also uses for lifetimes of
	// addresses. That clock stops while the machine is suspended; Client.Run corrects the times. Times read from JSON
	// have only a reading of the wall clock.
	Obtained time.Time `json:"obtained"`
	Renew    time.Time `json:"renew,omitzero"`
	Rebind   time.Time `json:"rebind,omitzero"`
	Expire   time.Time `json:"expire,omitzero"`

	// MAC and ClientID identify the client to the server. MAC is chaddr. ClientID is option 61 with its type byte,
	// and is empty if the client sent none.
	MAC      Hex `json:"mac"`
	ClientID Hex `json:"clientID,omitempty"`

	// Options holds the values of the options in Config.Request, by code, as the server sent them.
	Options map[uint8]Hex `json:"options,omitempty"`
	// Ignored describes, for a log, rejected answers and the parts of the server's ACK that the client could not use,
	// with the reasons.
	Ignored []string `json:"ignored,omitempty"`
}

// Route is a route that a server sent.
type Route struct {
	Dst netip.Prefix `json:"dst"`
	// Gateway is the router; the zero value means that Dst is on the link.
	Gateway netip.Addr `json:"gateway,omitzero"`
}

// String returns the route in the form "10.0.0.0/8 via 192.0.2.1" or "192.0.2.1/32 on link".
func (r Route) String() string {
	if !r.Gateway.IsValid() {
		return r.Dst.String() + " on link"
	}
	return r.Dst.String() + " via " + r.Gateway.String()
}

// Validate returns an error if the lease cannot be resumed and released: it checks address, server, MAC and times.
// The error matches tombolo.ErrInvalid.
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

// Left returns the time until the lease ends. It returns 0 if the lease has ended or is nil, and -1 if it never ends.
func (l *Lease) Left(now time.Time) time.Duration {
	switch {
	case l == nil:
		return 0
	case l.Infinite():
		return -1
	}
	return max(l.Expire.Sub(now), 0)
}

// unconfirmed returns a copy of the lease with T1 and T2 set to now. So the client asks servers at once whether the
// lease is still valid. If Obtained is in the future, because the clock was set back, it moves the lease to begin
// now.
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

// usable reports whether a is an IPv4 address that a host may have: unicast, and neither loopback nor reserved.
func usable(a netip.Addr) bool {
	return a.Is4() && !a.IsUnspecified() && !a.IsLoopback() && a.As4()[0] != 0 && a.As4()[0] < 224
}
