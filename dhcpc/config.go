package dhcpc

import (
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Times and lengths for the client. DefaultTimeout, defaultRetransmit and defaultMessageSize apply if Config does not
// set Timeout, Retransmit or LinkMTU.
const (
	DefaultTimeout    = 30 * time.Second
	defaultRetransmit = 4 * time.Second  // the first pause before a message is sent again; doubled each time
	maxRetransmit     = 64 * time.Second // the longest such pause
	defaultLeaseTime  = time.Hour        // the lease time if a server names none
	minRenewWait      = 60 * time.Second // pauses between the REQUESTs of one renewal grow at least to this
	confirmWait       = time.Second      // the wait for an answer to the REQUEST of INIT-REBOOT
	silence           = 4 * time.Second  // the longest wait for any answer before Config.Last is used

	// If a server sends a lease time below shortestLease, the client uses shortestLease. If T1 or T2 is below its
	// limit, the client computes it. The limits keep a client from asking the server again and again.
	shortestLease = 10 * time.Second
	shortestT1    = 2 * time.Second
	shortestT2    = 4 * time.Second

	macLen             = 6
	maxOption          = 255  // the longest value, in bytes, of an option that we send
	minMessage         = 576  // every host accepts an IP packet of that size
	defaultMessageSize = 1500 // longer messages would be fragmented on the way
)

// Config holds the client's identity and the parameters of its requests. MAC is required, and so is Dial for a Client.
// The other fields have defaults. The JSON form contains everything that a server learns, except for MAC and Last.
type Config struct {
	// MAC is the hardware address of the interface, six bytes (chaddr).
	MAC net.HardwareAddr `json:"-"`
	// ClientID is the client identifier (option 61), including its type byte: at least two bytes. A server identifies
	// the client by its ClientID or, without one, by its MAC.
	ClientID Hex `json:"clientID,omitempty"`
	// HostName is the host name (option 12). The server may enter it in its DNS.
	HostName string `json:"hostName,omitempty"`
	// VendorClass is the vendor class identifier (option 60).
	VendorClass string `json:"vendorClass,omitempty"`
	// Request holds the codes of additional options to request. Lease.Options has their values.
	Request Hex `json:"request,omitempty"`
	// RequestOnly omits the default options from the request.
	RequestOnly bool `json:"requestOnly,omitempty"`
	// Provide holds options to send in each DISCOVER and REQUEST, such as option 51 to ask for a lease time. New
	// returns an error for options that have a field here, or that the protocol sets.
	Provide []Option `json:"provide,omitempty"`
	// Servers are the addresses of the accepted servers. An answer counts if its server identifier (option 54) or its
	// source address is in the list. An empty list accepts all servers.
	Servers []netip.Addr `json:"servers,omitempty"`
	// Address is the address to request in a DISCOVER. The server may assign another one.
	Address netip.Addr `json:"address,omitzero"`
	// Last is the client's lease from before its restart, or nil. If it has not ended, the client first asks servers to
	// confirm it (INIT-REBOOT). If no server answers within 4 s, or half of Timeout if that is less, the client uses
	// the lease again. T1 and T2 then count as reached (RFC 2131, section 3.2), unless the lease never ends.
	Last *Lease `json:"-"`

	// Broadcast asks servers to broadcast their answers. A UDP socket needs this on an interface without an address. A
	// raw socket needs it only on a macvlan whose MAC differs from the client's.
	Broadcast bool `json:"broadcast,omitempty"`
	// RapidCommit asks for the lease in two messages instead of four (RFC 4039). Servers that do not support this
	// answer with an OFFER, as without the option.
	RapidCommit bool `json:"rapidCommit,omitempty"`
	// DetectConflicts probes an address by ARP before the client uses it (RFC 5227), and declines it if another host
	// has it. This takes 4 to 7 seconds, and needs a transport that supports ARP.
	DetectConflicts bool `json:"detectConflicts,omitempty"`
	// LinkMTU is the link's MTU in bytes. It limits Lease.MTU, and the size of the answers that the client asks for
	// (option 57). 0 means no limit for Lease.MTU.
	LinkMTU int `json:"linkMTU,omitempty"`

	// Refuse returns the reason to refuse a lease, or nil to accept it. A nil Refuse accepts all leases. held is the
	// lease that the client already has, or nil. The client calls Refuse before it accepts an OFFER or an ACK, and
	// before it uses Last without an answer. It requests the address of a refused OFFER only if no server offers a
	// better one, and answers a refused ACK with a DECLINE.
	Refuse func(l, held *Lease) error `json:"-"`

	// Timeout limits Acquire, together with its context. 0 means DefaultTimeout.
	Timeout time.Duration `json:"-"`
	// Retransmit is the time until the client repeats a DISCOVER, or a REQUEST for an offer. It doubles each time up to
	// 64 s, and varies at random by 1 s or a quarter, whichever is less. 0 means 4 s.
	Retransmit time.Duration `json:"-"`

	// Dial opens a transport. If local is not valid, the client uses the transport to broadcast from 0.0.0.0, and to
	// send ARP probes. Otherwise it sends from local, its own address. A Client closes the transport as soon as it
	// expects no answer, so it has none open in the state BOUND.
	Dial func(ctx context.Context, local netip.Addr) (Transport[*Packet], error) `json:"-"`

	clock clock // nil means the machine's clock; tests replace it
}

// Option is one DHCP option.
type Option struct {
	Code  uint8 `json:"code"`
	Value Hex   `json:"value,omitempty"`
}

// withDefaults returns a copy of the configuration with its defaults filled in.
func (c *Config) withDefaults() *Config {
	cfg := *c
	cfg.MAC, cfg.ClientID = slices.Clone(c.MAC), slices.Clone(c.ClientID)
	cfg.Request, cfg.Provide, cfg.Servers = slices.Clone(c.Request), slices.Clone(c.Provide), slices.Clone(c.Servers)
	cfg.Timeout = cmp.Or(c.Timeout, DefaultTimeout)
	cfg.Retransmit = cmp.Or(c.Retransmit, defaultRetransmit)
	cfg.clock = cmp.Or[clock](c.clock, systemClock{})
	return &cfg
}

// check returns an error if there is no Config, or a field is not valid.
func (c *Config) check() error {
	switch {
	case c == nil:
		return trace.Invalid("no configuration: a DHCP client needs a MAC address")
	case len(c.MAC) != macLen:
		return trace.Invalidf("MAC address %q: want %d bytes, those of the interface", c.MAC, macLen)
	case len(c.ClientID) == 1 || len(c.ClientID) > maxOption:
		return trace.Invalidf("client identifier of %d bytes: want 2 to %d, the first being its type", len(c.ClientID),
			maxOption)
	case len(c.HostName) > maxOption:
		return trace.Invalidf("host name of %d bytes: want at most %d", len(c.HostName), maxOption)
	case len(c.VendorClass) > maxOption:
		return trace.Invalidf("vendor class of %d bytes: want at most %d", len(c.VendorClass), maxOption)
	case slices.ContainsFunc(c.Servers, func(a netip.Addr) bool { return !usable(a) }):
		return trace.Invalidf("servers %s: want IPv4 addresses of hosts", c.Servers)
	case c.Address.IsValid() && !usable(c.Address):
		return trace.Invalidf("address %s: want the IPv4 address of a host", c.Address)
	case c.Timeout < 0 || c.Retransmit < 0 || c.Retransmit > maxRetransmit:
		return trace.Invalidf("timeout %s, retransmission %s: want neither negative, and the latter at most %s",
			c.Timeout, c.Retransmit, maxRetransmit)
	case c.LinkMTU < 0:
		return trace.Invalidf("link MTU %d: want none that is negative", c.LinkMTU)
	}

	if c.Last != nil {
		if err := c.Last.Validate(); err != nil {
			return err
		}
	}

	return c.checkOptions()
}

func (c *Config) checkOptions() error {
	// These options are padding, the end mark, options with a field in Config, and options that the protocol sets.
	reserved := []uint8{0, 12, 50, 52, 53, 54, 55, 57, 60, 61, 80, 255}
	for _, o := range c.Provide {
		if slices.Contains(reserved, o.Code) {
			return trace.Invalidf(
				"option %d cannot be provided: it is a mark, has a field of its own, or the protocol sets it", o.Code)
		}
		if len(o.Value) > maxOption {
			return trace.Invalidf("option %d of %d bytes: want at most %d", o.Code, len(o.Value), maxOption)
		}
	}

	for _, code := range c.Request {
		if code == dhcpv4.OptionPad.Code() || code == dhcpv4.OptionEnd.Code() {
			return trace.Invalidf("option %d cannot be requested: it is no option but a mark", code)
		}
	}

	return nil
}

// defaultOptions returns the codes of the options that a client requests by default. RFC 3442 demands classless
// routes before static routes and routers, which they replace.
func defaultOptions() []uint8 {
	return []uint8{1, 121, 249, 33, 3, 6, 15, 119, 26, 28, 51, 54, 58, 59}
}

// requested returns the content of the parameter request list (option 55).
func (c *Config) requested() []uint8 {
	var list []uint8
	if !c.RequestOnly {
		list = defaultOptions()
	}
	for _, code := range c.Request {
		if !slices.Contains(list, code) {
			list = append(list, code)
		}
	}
	return list
}

// Lease is a lease from a server, with everything needed to renew and release it, by this process or another. The
// names in its JSON form are stable, so that programs can keep it on disk.
//
// The package never changes a Lease after returning it: renewals create new ones.
type Lease struct {
	// Address is the leased address with the prefix length of its network.
	Address netip.Prefix `json:"address"`
	// Routes are all the routes to install, in an order that the kernel accepts. If the server sent valid classless
	// routes (option 121, else 249), Routes has these. Otherwise it has the static routes (33) and a default route to
	// the first router. If a router is not on the link, a route to it comes first.
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
	// MTU is the link's MTU in bytes (option 26), or 0 if the server sent none. A value below 576 is raised to 576.
	// Then Config.LinkMTU, if it is not 0, limits the result.
	MTU int `json:"mtu,omitempty"`
	// Broadcast is the broadcast address (option 28). It is not valid if the server sent none that is usable.
	Broadcast netip.Addr `json:"broadcast,omitzero"`

	// Server is the server's address. This is its identifier (option 54) or, without one, the source address of its
	// packets.
	Server netip.Addr `json:"server"`
	// ServerMAC is the source MAC of the frame with the ACK or, if that is not known, with an earlier answer of this
	// server. It belongs to the server, or to the relay in between. It is empty if the transport does not know it.
	ServerMAC Hex `json:"serverMAC,omitempty"`

	// Others are the other servers that answered since the client's last search for servers by DISCOVER began, also
	// during renewals.
	Others []netip.Addr `json:"others,omitempty"`

	// Obtained is the time when the client sent its last REQUEST or DISCOVER before the ACK. Renew (T1), Rebind (T2)
	// and Expire count from it, and are all zero if the lease never ends.
	//
	// Within a process the times have a reading of the monotonic clock. Like the kernel's lifetimes of addresses, that
	// clock stops while the machine is suspended; Client.Run corrects the times. Times read from JSON have only a
	// reading of the wall clock.
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
	}

	return trace.CheckTimes(l.Obtained, l.Renew, l.Rebind, l.Expire)
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
// lease is still valid. If Obtained is in the future, because the clock was set back, the copy begins now. A lease that
// never ends is returned unchanged.
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

// Packet is either a DHCP message in UDP over IPv4, or an ARP packet.
type Packet struct {
	// Src and Dst are the UDP packet's source and destination. A transport may omit Dst in received packets.
	Src, Dst netip.AddrPort
	// SrcMAC and DstMAC are the Ethernet frame's source and destination. In a packet to send, nil lets the transport
	// choose. In a received packet, nil means that the transport does not know the MAC.
	SrcMAC, DstMAC Hex
	// Payload is the DHCP message.
	Payload []byte
	// ARP is the ARP packet, or nil. If it is set, Src, Dst and Payload are not.
	ARP *ARP
}

// ARP is an ARP packet (RFC 826) for IPv4 over Ethernet.
type ARP struct {
	Reply                bool
	SenderMAC, TargetMAC Hex // TargetMAC may be empty in a request
	SenderIP, TargetIP   netip.Addr
}

// Transport carries messages on one interface, for one goroutine. A Client uses messages of type *Packet. DHCPv6 uses
// the message's bytes. A Transport knows nothing about DHCP's states.
type Transport[M any] interface {
	// Send sends a message. It blocks only while the socket's buffer is full.
	Send(ctx context.Context, message M) error
	// Receive waits for a message to the client's port, or for an ARP packet if the transport supports ARP. It may
	// return packets for other clients. When the given time has come, the error matches os.ErrDeadlineExceeded. As soon
	// as ctx is done, Receive returns ctx's error.
	Receive(ctx context.Context, until time.Time) (M, error)
	// Close releases the transport's resources.
	Close() error
}

// Hex is a string of bytes. Its text form, also in JSON, is common for hardware addresses and in the lease files of
// DHCP servers: 02:00:0a:09:00:02.
type Hex []byte

// String returns the text form. It is empty if h has no bytes.
func (h Hex) String() string { return net.HardwareAddr(h).String() }

// MarshalText returns the text form.
func (h Hex) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// UnmarshalText parses the text form, also with digits in upper case, and returns an error for any other form.
func (h *Hex) UnmarshalText(text []byte) error {
	// Accept only two digits a byte with colons between them.
	b, err := hex.DecodeString(strings.ReplaceAll(string(text), ":", ""))
	if err != nil || !strings.EqualFold(Hex(b).String(), string(text)) {
		return fmt.Errorf("read %q: not bytes in hexadecimal with colons between them", text)
	}
	*h = b
	return nil
}
