package dhcpc

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/internal/trace"
)

// The defaults of Config, and limits from RFC 2131.
const (
	DefaultTimeout    = 30 * time.Second
	defaultRetransmit = 4 * time.Second  // the first pause before a message is sent again; doubled each time
	maxRetransmit     = 64 * time.Second // the longest such pause
	defaultLeaseTime  = time.Hour        // the lease time if a server names none
	minRenewWait      = 60 * time.Second // the shortest pause between later REQUESTs of one renewal
	confirmWait       = time.Second      // the wait for an answer to the REQUEST of INIT-REBOOT
	silence           = 4 * time.Second  // the time without any answer before Config.Last is used

	// If a server sends a lease time below shortestLease, the client uses shortestLease. If T1 or T2 is below its
	// limit, the client computes it. Otherwise clients would ask the server again and again.
	shortestLease = 10 * time.Second
	shortestT1    = 2 * time.Second
	shortestT2    = 4 * time.Second

	macLen             = 6
	maxOption          = 255  // bytes in an option's value that we send
	minMessage         = 576  // every host accepts an IP packet of that size
	defaultMessageSize = 1500 // longer messages would be fragmented on the way
)

// Config holds the client's identity and the parameters of its requests. MAC is required, and so is Dial for a
// Client. The other fields have defaults. The JSON form contains everything that a server learns, except for the MAC.
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
	// Last is the client's lease from before its restart, or nil. If it has not ended, the client first asks servers
	// to confirm it (INIT-REBOOT). If no server answers within 4 s, or half of Timeout if that is less, the client
	// uses the lease again. T1 and T2 then count as reached (RFC 2131, section 3.2).
	Last *Lease `json:"-"`

	// Broadcast asks servers to broadcast their answers. A UDP socket needs this on an interface without an address;
	// a raw socket does not.
	Broadcast bool `json:"broadcast,omitempty"`
	// RapidCommit asks for the lease in two messages instead of four (RFC 4039). Servers that do not support this
	// answer with an OFFER, as without the option.
	RapidCommit bool `json:"rapidCommit,omitempty"`
	// DetectConflicts probes an address by ARP before the client uses it (RFC 5227), and declines it if another host
	// has it. This takes 4 to 7 seconds, and needs a transport that supports ARP.
	DetectConflicts bool `json:"detectConflicts,omitempty"`
	// LinkMTU is the upper limit for Lease.MTU, in bytes. 0 means no limit.
	LinkMTU int `json:"linkMTU,omitempty"`

	// Refuse returns the reason to refuse a lease, or nil to accept it. A nil Refuse accepts all leases. held is the
	// lease that the client already has, or nil. The client calls Refuse for each OFFER and each ACK. It uses a
	// refused OFFER only if no server offers a better one, and answers a refused ACK with a DECLINE.
	Refuse func(l, held *Lease) error `json:"-"`

	// Timeout limits Acquire, together with its context. 0 means DefaultTimeout.
	Timeout time.Duration `json:"-"`
	// Retransmit is the time until the client sends a DISCOVER again. It doubles each time up to 64 s, and varies at
	// random by 1 s or a quarter, whichever is less. 0 means 4 s.
	Retransmit time.Duration `json:"-"`

	// Dial opens a transport. If local is not valid, the transport is for a client without an address, which
	// broadcasts from 0.0.0.0. A valid local is the client's own address. A Client closes the transport as soon as it
	// expects no answer, so it has none open in the state BOUND.
	Dial func(ctx context.Context, local netip.Addr) (Transport[*Packet], error) `json:"-"`

	clock clock // nil means the machine's clock; tests replace it
}

// Option is one DHCP option.
type Option struct {
	Code  uint8 `json:"code"`
	Value Hex   `json:"value,omitempty"`
}

// withDefaults returns a copy of the configuration with its defaults filled in, or an error if a field is not valid.
func (c *Config) withDefaults() (*Config, error) {
	if c == nil {
		return nil, trace.Invalid("no configuration: a DHCP client needs a MAC address")
	}

	cfg := *c
	cfg.MAC, cfg.ClientID = slices.Clone(c.MAC), slices.Clone(c.ClientID)
	cfg.Request, cfg.Provide, cfg.Servers = slices.Clone(c.Request), slices.Clone(c.Provide), slices.Clone(c.Servers)
	cfg.Timeout = cmp.Or(c.Timeout, DefaultTimeout)
	cfg.Retransmit = cmp.Or(c.Retransmit, defaultRetransmit)
	if cfg.clock == nil {
		cfg.clock = systemClock{}
	}
	return &cfg, cfg.check()
}

func (c *Config) check() error {
	switch {
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
	for _, o := range c.Provide {
		if reserved(o.Code) {
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

// reserved reports whether Config.Provide must not contain an option: because it is padding or an end mark, has a
// field of its own, or belongs to the protocol.
func reserved(code uint8) bool {
	return slices.Contains([]uint8{0, 12, 50, 52, 53, 54, 55, 57, 60, 61, 80, 255}, code)
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
