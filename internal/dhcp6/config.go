package dhcp6

import (
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Config has the client's identity and what it asks for. DUID is needed.
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
	// Refuse says why a lease cannot be used, and is nil where it can; nil takes all. held is the lease that the
	// client has, nil if none. An offered one is passed over, and a granted one is declined.
	Refuse func(l, held *Lease) error
	// DetectConflicts goes by way of CHECKING.
	DetectConflicts bool
}

// own checks the configuration and copies it.
func (c *Config) own() (*Config, error) {
	if c == nil {
		return nil, trace.Invalid("no configuration: a DHCPv6 client needs a DUID")
	}
	cfg := *c
	cfg.DUID = slices.Clone(c.DUID)
	return &cfg, cfg.check()
}

// maxHostName is the longest name of the DNS, in bytes.
const maxHostName = 253

func (c *Config) check() error {
	switch {
	case len(c.DUID) < minDUID || len(c.DUID) > maxDUID:
		return trace.Invalidf("DUID of %d bytes: want %d to %d, the first two being its type", len(c.DUID), minDUID, maxDUID)
	case c.Address.IsValid() && !usable(c.Address):
		return trace.Invalidf("address %s: want the IPv6 address of a host", c.Address)
	case len(c.HostName) > maxHostName:
		return trace.Invalidf("host name of %d bytes: want at most %d", len(c.HostName), maxHostName)
	}
	return nil
}
