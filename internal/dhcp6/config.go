package dhcp6

import (
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Config describes the client and its requests. DUID is required.
type Config struct {
	// DUID identifies the client. It has 3 to 130 bytes and begins with its type; see the function DUID.
	DUID dhcpc.Hex
	// IAID distinguishes the client's addresses. Any number will do, as long as it stays the same.
	IAID uint32
	// Address is the address that a SOLICIT requests. The server may assign another.
	Address netip.Addr
	// HostName is option 39. The server may enter it in its DNS.
	HostName string
	// RapidCommit requests the lease in two messages instead of four. Without it, the client waits a second for
	// ADVERTISEs of better servers.
	RapidCommit bool
	// Refuse returns an error if the client must not use the lease l. held is the client's present lease, or nil. The
	// client ignores an offer that Refuse rejects, and declines a granted lease that it rejects. A nil Refuse accepts
	// all leases.
	Refuse func(l, held *Lease) error
	// DetectConflicts makes the client enter CHECKING before it uses a new address.
	DetectConflicts bool
}

// own returns a copy of the configuration, after checking it.
func (c *Config) own() (*Config, error) {
	if c == nil {
		return nil, trace.Invalid("no configuration: a DHCPv6 client needs a DUID")
	}
	cfg := *c
	cfg.DUID = slices.Clone(c.DUID)
	return &cfg, cfg.check()
}

// maxHostName is the longest DNS name, in bytes.
const maxHostName = 253

// check returns an error that matches tombolo.ErrInvalid for a value that cannot be used.
func (c *Config) check() error {
	switch {
	case len(c.DUID) < minDUID || len(c.DUID) > maxDUID:
		return trace.Invalidf("DUID of %d bytes: want %d to %d, the first two being its type", len(c.DUID), minDUID,
			maxDUID)
	case c.Address.IsValid() && !usable(c.Address):
		return trace.Invalidf("address %s: want the IPv6 address of a host", c.Address)
	case len(c.HostName) > maxHostName:
		return trace.Invalidf("host name of %d bytes: want at most %d", len(c.HostName), maxHostName)
	}

	return nil
}
