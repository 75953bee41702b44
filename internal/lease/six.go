package lease

import (
	"crypto/sha256"
	"fmt"
	"net/netip"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/dhcp6"
)

// Six is the DHCPv6 part of a record. Only the keeper speaks DHCPv6, since the codec would slow the plugin down. ADD
// writes the client's identity and waits for the keeper. DEL sends the message in Release unchanged.
type Six struct {
	DUID dhcpc.Hex `json:"duid"`
	IAID uint32    `json:"iaid"`
	// Lease is the pod's lease. It is nil before the first lease and after the loss of one.
	Lease *dhcp6.Lease6 `json:"lease,omitempty"`
	// Address is the pod's last address, which the client requests again.
	Address netip.Addr `json:"address,omitzero"`
	// Release is the encoded RELEASE message for Lease.
	Release dhcpc.Hex `json:"release,omitempty"`
	// Checking is set while the pod has Lease's address only for duplicate address detection. The record must name
	// the address for this, since the firewall drops the pod's queries about other addresses.
	Checking bool   `json:"checking,omitempty"`
	Error    string `json:"error,omitempty"` // the present problem
	Note     string `json:"note,omitempty"`  // why the lease is not renewed yet, while time is left
	// Stateless is set if the pod gets its addresses from router advertisements, and only Information by DHCPv6.
	Stateless   bool         `json:"stateless,omitempty"`
	Information *NameService `json:"information,omitempty"`
}

// NameService holds the options for clients without a lease.
type NameService struct {
	DNS    []netip.Addr `json:"dns,omitempty"`
	Search []string     `json:"search,omitempty"`
	Until  time.Time    `json:"until"` // when to request them again
}

// SixOf returns the DHCPv6 identity for a DHCPv4 client. The DUID is a 16-byte hash of the client identifier. If the
// client is identified by its MAC address, the DUID is the MAC.
func SixOf(c *Client) *Six {
	s := &Six{IAID: 1}
	const ethernet, byLinkLayer = 1, 3
	if len(c.ClientID) == 0 || c.ClientID[0] == ethernet {
		s.DUID = append(dhcpc.Hex{0, byLinkLayer, 0, ethernet}, c.MAC...)
		return s
	}
	sum := sha256.Sum256(append([]byte("tombolo duid "), c.ClientID...))
	s.DUID = dhcp6.DUID([16]byte(sum[:16]))
	return s
}

// Leased6 returns the pod's DHCPv6 address with a prefix length of 128. It returns the zero Prefix if the pod has
// none.
func (r *Record) Leased6() netip.Prefix {
	if r.Six == nil || r.Six.Lease == nil {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(r.Six.Lease.Address, r.Six.Lease.Address.BitLen())
}

// Releases6 reports whether the DHCPv6 lease must be released when the pod ends. A sticky client keeps its lease
// until that runs out.
func (r *Record) Releases6(now time.Time) bool {
	return r.Six != nil && len(r.Six.Release) > 0 && r.Six.Lease.Left(now) != 0 && !r.Client.Sticky
}

// check returns an error if the DHCPv6 part could not be read back or used.
func (s *Six) check() error {
	switch {
	case s == nil:
		return nil
	case s.Lease == nil && len(s.Release) > 0:
		return fmt.Errorf("DHCPv6: it has a RELEASE and no lease")
	case s.Lease != nil:
		if err := s.Lease.Validate(); err != nil {
			return fmt.Errorf("DHCPv6: %w", err)
		}
	}

	if len(s.DUID) < 3 || len(s.DUID) > 130 || s.Address.IsValid() && !s.Address.Is6() {
		return fmt.Errorf("DHCPv6: DUID %s, address %s", s.DUID, s.Address)
	}
	return nil
}

// Config returns the DHCPv6 client's configuration.
func (s *Six) Config(hostName string) *dhcp6.Config {
	return &dhcp6.Config{DUID: s.DUID, IAID: s.IAID, Address: s.Address, HostName: hostName, RapidCommit: true,
		DetectConflicts: true}
}
