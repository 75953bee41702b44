package dhcp6

import (
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Config describes the client and its requests. DUID is required.
type Config struct {
	// DUID is the DHCP unique identifier of the client. It has 3 to 130 bytes and begins with its type; see the
	// function DUID.
	DUID dhcpc.Hex
	// IAID distinguishes the client's addresses. It can be any number that stays the same for the client.
	IAID uint32
	// Address is the address to request in a SOLICIT. The server may assign another one.
	Address netip.Addr
	// HostName is the host name (option 39). The server may enter it in its DNS.
	HostName string
	// RapidCommit requests the lease in two messages instead of four. Without it, the client waits a second for
	// ADVERTISEs of better servers.
	RapidCommit bool
	// Refuse returns an error if the client must not use the lease l. held is the client's present lease, or nil. The
	// client ignores an offer that Refuse rejects, and declines a granted lease that Refuse rejects. A nil Refuse
	// accepts all leases.
	Refuse func(l, held *Lease6) error
	// DetectConflicts makes the client wait for the caller's duplicate address detection (state CHECKING) before it
	// uses a new address.
	DetectConflicts bool
}

// own checks the configuration and returns a copy.
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

// check returns an error that matches tombolo.ErrInvalid if a field is not valid.
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
