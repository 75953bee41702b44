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

// Defaults of Config, and the limits of RFC 2131.
const (
	DefaultTimeout    = 30 * time.Second
	defaultRetransmit = 4 * time.Second  // the first pause before a message is sent again; doubled each time
	maxRetransmit     = 64 * time.Second // the longest such pause
	defaultLeaseTime  = time.Hour        // if a server names none
	minRenewWait      = 60 * time.Second // between later REQUESTs of one renewal
	confirmWait       = time.Second      // for an answer to the REQUEST of INIT-REBOOT
	silence           = 4 * time.Second  // of all servers, before Config.Last is used

	// Shorter times from a server would make each client ask it again and again. Then the lease counts as long enough
	// to be renewed, and T1 and T2 as missing.
	shortestLease = 10 * time.Second
	shortestT1    = 2 * time.Second
	shortestT2    = 4 * time.Second

	macLen       = 6
	maxOption    = 255  // bytes in an option's value that we send
	minMessage   = 576  // every host accepts an IP packet of that size
	usualMessage = 1500 // longer ones would be fragmented on the way
)

// Config holds the client's identity and its requests. MAC is required, and Dial for a Client. The other fields have
// defaults. Its JSON form contains everything that a server learns, except for the MAC.
type Config struct {
	// MAC is the hardware address of the interface, six bytes (chaddr).
	MAC net.HardwareAddr `json:"-"`
	// ClientID is the client identifier (option 61) with its type byte: at least two bytes. Servers that get one
	// identify the client by it, and otherwise by the MAC.
	ClientID Hex `json:"clientID,omitempty"`
	// HostName is option 12. The server may enter the client in its DNS with it.
	HostName string `json:"hostName,omitempty"`
	// VendorClass is option 60.
	VendorClass string `json:"vendorClass,omitempty"`
	// Request are codes of additional options to request. Their values are in Lease.Options.
	Request Hex `json:"request,omitempty"`
	// RequestOnly omits the usual options from the request.
	RequestOnly bool `json:"requestOnly,omitempty"`
	// Provide are options to send in each DISCOVER and REQUEST, such as 51 to ask for a lease time. Options that have
	// a field here, or that the protocol sets, are refused.
	Provide []Option `json:"provide,omitempty"`
	// Servers are the addresses of the accepted servers, as their identifier (option 54) or as the source of their
	// packets. If empty, all are accepted.
	Servers []netip.Addr `json:"servers,omitempty"`
	// Address is requested in a DISCOVER. The server need not give it.
	Address netip.Addr `json:"address,omitzero"`
	// Last is the client's previous lease before its restart, or nil. While it has not ended, servers are first asked
	// to confirm it (INIT-REBOOT). If no server answers at all within 4 s, or half of Timeout, the client uses it
	// again, with T1 and T2 at once (RFC 2131, section 3.2).
	Last *Lease `json:"-"`

	// Broadcast asks servers to broadcast their answers. A UDP socket needs this on an interface without an address;
	// a raw socket does not.
	Broadcast bool `json:"broadcast,omitempty"`
	// RapidCommit asks for the lease in two messages instead of four (RFC 4039). Servers that do not know it answer
	// with an OFFER as usual.
	RapidCommit bool `json:"rapidCommit,omitempty"`
	// DetectConflicts asks by ARP, before an address is used, whether a host has it (RFC 5227), and declines it if
	// so. It takes 4 to 7 seconds, and a transport for ARP.
	DetectConflicts bool `json:"detectConflicts,omitempty"`
	// LinkMTU limits Lease.MTU. 0 means no limit.
	LinkMTU int `json:"linkMTU,omitempty"`

	// Refuse returns the reason against a lease, or nil to accept it. Without Refuse all are accepted. held is the
	// lease that the client has, or nil. It is called for each OFFER and each ACK: a refused OFFER is skipped while
	// another server may offer a better one, and a refused ACK is answered with DECLINE.
	Refuse func(l, held *Lease) error `json:"-"`

	// Timeout limits Acquire, together with its context. 0 means DefaultTimeout.
	Timeout time.Duration `json:"-"`
	// Retransmit is the time until a DISCOVER is sent again. It is doubled each time up to 64 s, ± 1 s or a quarter,
	// whichever is less. 0 means 4 s.
	Retransmit time.Duration `json:"-"`

	// Dial opens a transport. If local is not valid, it is for a client without an address, which broadcasts from
	// 0.0.0.0. Otherwise it is for one with the address local. A Client closes the transport as soon as it waits for
	// no answer: it holds none while it is bound.
	Dial func(ctx context.Context, local netip.Addr) (Transport[*Packet], error) `json:"-"`

	clock clock // nil means the machine's; tests have another
}

// Option is one option of DHCP.
type Option struct {
	Code  uint8 `json:"code"`
	Value Hex   `json:"value,omitempty"`
}

// withDefaults checks the configuration and fills it in.
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

// reserved reports whether an option is not permitted in Config.Provide, because it is a mark, has a separate field,
// or belongs to the protocol.
func reserved(code uint8) bool {
	return slices.Contains([]uint8{0, 12, 50, 52, 53, 54, 55, 57, 60, 61, 80, 255}, code)
}

// usualOptions returns the options requested by default. RFC 3442 demands classless routes before the options that
// they replace.
func usualOptions() []uint8 {
	return []uint8{1, 121, 249, 33, 3, 6, 15, 119, 26, 28, 51, 54, 58, 59}
}

// requested returns the parameter request list.
func (c *Config) requested() []uint8 {
	var list []uint8
	if !c.RequestOnly {
		list = usualOptions()
	}
	for _, code := range c.Request {
		if !slices.Contains(list, code) {
			list = append(list, code)
		}
	}
	return list
}
