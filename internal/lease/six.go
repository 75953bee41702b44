package lease

import (
	"crypto/sha256"
	"fmt"
	"net/netip"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/dhcp6"
)

// Six is what a record has of DHCPv6: the keeper alone speaks it, since its codec would make the
// plugin slower. ADD writes who the client is and waits; DEL sends Release as it is.
type Six struct {
	DUID dhcpc.Hex `json:"duid"`
	IAID uint32    `json:"iaid"`
	// Lease is what the pod has; nil before it has one, and after it was lost.
	Lease *dhcp6.Lease `json:"lease,omitempty"`
	// Address is what the pod had last, and is asked for again.
	Address netip.Addr `json:"address,omitzero"`
	// Release is the message that gives Lease back.
	Release dhcpc.Hex `json:"release,omitempty"`
	// Checking says that the pod has Lease's address so as to look whether another host has it:
	// the firewall lets no pod ask about an address that is not its own.
	Checking bool   `json:"checking,omitempty"`
	Error    string `json:"error,omitempty"` // the last trouble, while it lasts
	Note     string `json:"note,omitempty"`  // why the lease is not renewed yet, while there is time left
	// Stateless says that the pod has its addresses by routers, and wants Information alone.
	Stateless   bool         `json:"stateless,omitempty"`
	Information *Information `json:"information,omitempty"`
}

// Information is what a server tells clients without a lease.
type Information struct {
	DNS    []netip.Addr `json:"dns,omitempty"`
	Search []string     `json:"search,omitempty"`
	Until  time.Time    `json:"until"` // when to ask again
}

// SixOf returns the identity that a DHCPv4 client has towards DHCPv6 servers: a DUID of a 16-byte hash of its client
// identifier, or of the MAC address if that is the client identifier.
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

// Leased6 gives the address that a pod has by DHCPv6; it is not valid where it has none.
func (r *Record) Leased6() netip.Prefix {
	if r.Six == nil || r.Six.Lease == nil {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(r.Six.Lease.Address, r.Six.Lease.Address.BitLen())
}

// Releases6 says whether there is a message to send when a pod goes: one whose identity outlives it
// keeps its address for as long as the lease runs.
func (r *Record) Releases6(now time.Time) bool {
	return r.Six != nil && len(r.Six.Release) > 0 && r.Six.Lease.Left(now) != 0 && !r.Client.Sticky
}

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

// Config returns the client's configuration, without clock and transport.
func (s *Six) Config(hostName string) *dhcp6.Config {
	return &dhcp6.Config{DUID: s.DUID, IAID: s.IAID, Address: s.Address, HostName: hostName, RapidCommit: true, DetectConflicts: true}
}
