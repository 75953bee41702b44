package dhcp6

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
)

// Ports, and the group of all servers and relays on a link: RFC 8415, sections 7.1 and 7.2.
const (
	ClientPort = 546
	ServerPort = 547
	Group      = "ff02::1:2"
)

// DefaultTimeout bounds Acquire and Inform: a server that has to be waited for a second, and asked a
// few times, is heard in it.
const DefaultTimeout = 30 * time.Second

// Transport carries messages on one interface. A Client uses it from one goroutine.
type Transport interface {
	// Send sends a message from ClientPort of the interface's link-local address to
	// ServerPort of Group. It does not wait for anything but room.
	Send(ctx context.Context, message []byte) error
	// Receive waits for a message to ClientPort. It may give those of others. It ends with
	// os.ErrDeadlineExceeded at a time, and with ctx's error as soon as ctx is done.
	Receive(ctx context.Context, until time.Time) ([]byte, error)
	// Close gives up what the transport holds.
	Close() error
}

// Config has the client's identity and what it asks for. DUID is needed, and Dial for a
// Client; the rest has defaults.
type Config struct {
	// DUID identifies the client, type included, in 3 to 130 bytes; see the function DUID.
	DUID dhcpc.Hex
	// IAID tells the client's addresses apart: any number that stays the same.
	IAID uint32
	// Address is asked for in a SOLICIT; the server need not give it.
	Address netip.Addr
	// HostName is option 39, by which the server may enter the client in its DNS.
	HostName string
	// RapidCommit asks for the lease in two messages rather than four. Without it, an
	// ADVERTISE is waited for a second, for a better server.
	RapidCommit bool
	// Request are codes of options to ask for besides DNS servers (23) and search list (24).
	// Their values are in Lease.Options.
	Request []uint16
	// Refuse says why a lease cannot be used, and is nil where it can; nil takes all. held is the
	// lease that the client has, nil if none. What is offered is passed over, and what is
	// granted is declined.
	Refuse func(l, held *Lease) error
	// DetectConflicts goes by way of CHECKING. A Client does so where it has InUse.
	DetectConflicts bool

	// InUse adds a lease's address to the interface, and says whether duplicate address
	// detection found it with another host: then it takes the address away again. Nil: nothing is checked.
	InUse func(ctx context.Context, l *Lease) (bool, error)
	// Timeout bounds Acquire and Inform, together with their context; 0 is DefaultTimeout.
	Timeout time.Duration
	// Dial opens a transport. A Client closes it as soon as it waits for no answer.
	Dial func(ctx context.Context) (Transport, error)
	// Clock tells the time; nil is the machine's.
	Clock dhcpc.Clock
}

// withDefaults checks the configuration and fills it in.
func (c *Config) withDefaults() (*Config, error) {
	if c == nil {
		return nil, invalid("no configuration: a DHCPv6 client needs a DUID")
	}
	cfg := *c
	cfg.DUID, cfg.Request = slices.Clone(c.DUID), slices.Clone(c.Request)
	if cfg.Timeout == 0 {
		cfg.Timeout = DefaultTimeout
	}
	if cfg.Clock == nil {
		cfg.Clock = dhcpc.SystemClock{}
	}
	cfg.DetectConflicts = cfg.DetectConflicts || cfg.InUse != nil
	return &cfg, cfg.check()
}

// maxHostName is the longest name of the DNS, in bytes.
const maxHostName = 253

func (c *Config) check() error {
	switch {
	case len(c.DUID) < minDUID || len(c.DUID) > maxDUID:
		return invalidf("DUID of %d bytes: want %d to %d, the first two being its type", len(c.DUID), minDUID, maxDUID)
	case c.Address.IsValid() && !usable(c.Address):
		return invalidf("address %s: want the IPv6 address of a host", c.Address)
	case len(c.HostName) > maxHostName:
		return invalidf("host name of %d bytes: want at most %d", len(c.HostName), maxHostName)
	case c.Timeout < 0:
		return invalidf("timeout %s: want none that is negative", c.Timeout)
	}
	for _, code := range c.Request {
		if mayNotRequest(dhcpv6.OptionCode(code)) {
			return invalidf("option %d cannot be requested: the protocol sets it", code)
		}
	}
	return nil
}

// mayNotRequest are the options that RFC 8415, section 24, keeps out of the Option Request option.
func mayNotRequest(code dhcpv6.OptionCode) bool {
	return code <= 20 && code != dhcpv6.OptionVendorOpts
}

// invalid is an error that matches dhcpc.ErrInvalid and tombolo.ErrInvalid.
type invalid string

func (e invalid) Error() string { return string(e) }

func (e invalid) Is(target error) bool {
	return target == dhcpc.ErrInvalid || target == tombolo.ErrInvalid
}

func invalidf(format string, args ...any) error { return invalid(fmt.Sprintf(format, args...)) }

// argument is the error about an argument that cannot be meant.
func argument(what string) error { return invalid(tombolo.ErrInvalid.Error() + ": " + what) }
