package dhcp6

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
)

// A delegated prefix (RFC 8415, section 6.3) is part of the lease of the address: both are asked for in
// each message, granted and renewed together, and the lease ends when the first of them does.

// shortestPrefix is the least length of a delegated prefix, in bits. The client makes it unreachable but for what it
// routes itself: by 2000::/3, a server would take the whole Internet from it. Registries hold /12 and longer.
const shortestPrefix = 12

// delegable says whether a server may delegate a prefix.
func delegable(p netip.Prefix) bool {
	return p.Bits() >= shortestPrefix && p.Bits() < 128 && usable(p.Addr()) && p == p.Masked()
}

// delegation adds our IA_PD, with a prefix where one is given, else with the length that is wanted.
func (c *Config) delegation(m *dhcpv6.Message, p netip.Prefix) {
	if c.PrefixLength == 0 {
		return
	}
	if !p.IsValid() {
		p = netip.PrefixFrom(netip.IPv6Unspecified(), c.PrefixLength)
	}
	pd := &dhcpv6.OptIAPD{}
	binary.BigEndian.PutUint32(pd.IaId[:], c.IAID)
	pd.Options.Add(&dhcpv6.OptIAPrefix{Prefix: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 128)}})
	m.AddOption(pd)
}

// delegated chooses a prefix of our IA_PD, if possible the one that is wanted, and shortens the address's
// grant to its times. It says why there is none.
func (c *Config) delegated(m *message, want netip.Prefix, g *grant, t1, t2 *time.Duration) (_ netip.Prefix, why string) {
	if c.PrefixLength == 0 {
		return netip.Prefix{}, ""
	}
	switch pd := m.pd; {
	case pd == nil:
		return netip.Prefix{}, "no IA_PD of ours"
	case statusOf(pd.Options.Status()) != iana.StatusSuccess:
		return netip.Prefix{}, "IA_PD: " + statusText(pd.Options.Status())
	case pd.T1 > 0 && pd.T2 > 0 && pd.T1 > pd.T2:
		return netip.Prefix{}, fmt.Sprintf("IA_PD: T1 of %s is after T2 of %s", pd.T1, pd.T2)
	}
	var found netip.Prefix
	var times grant
	why = "no prefix"
	for _, o := range m.pd.Options.Prefixes() {
		if o.Prefix == nil {
			continue
		}
		bits, _ := o.Prefix.Mask.Size()
		a, _ := netip.AddrFromSlice(o.Prefix.IP.To16())
		p := netip.PrefixFrom(a, bits)
		switch {
		case !delegable(p):
			why = fmt.Sprintf("prefix %s: none that can be delegated", p)
		case o.PreferredLifetime > o.ValidLifetime:
			why = fmt.Sprintf("prefix %s: preferred for %s, and valid for %s", p, o.PreferredLifetime, o.ValidLifetime)
		case statusOf(o.Options.Status()) != iana.StatusSuccess:
			why = fmt.Sprintf("prefix %s: %s", p, statusText(o.Options.Status()))
		case o.ValidLifetime == 0:
			why = fmt.Sprintf("prefix %s for no time", p)
		case !found.IsValid() || p == want:
			found, times = p, grant{preferred: o.PreferredLifetime, valid: o.ValidLifetime}
		}
	}
	if !found.IsValid() {
		return found, why
	}
	g.preferred, g.valid = min(g.preferred, times.preferred), min(g.valid, times.valid)
	*t1, *t2 = sooner(*t1, m.pd.T1), sooner(*t2, m.pd.T2)
	return found, ""
}

// sooner gives the shorter of two times, of which 0 is left to the client.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}
