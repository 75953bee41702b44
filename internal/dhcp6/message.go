package dhcp6

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Lease6 is a lease that a server granted. It holds everything that this process or another needs to renew and release
// it. The names in its JSON form are stable, so that programs can keep it on disk.
//
// A Lease6 never changes: a renewal makes a new one.
type Lease6 struct {
	// Address is the leased address. DHCPv6 has no prefix length and no router. Router advertisements supply these.
	Address netip.Addr `json:"address"`
	// DNS are the name servers (option 23), best first. Search is the domain search list (option 24).
	DNS    []netip.Addr `json:"dns,omitempty"`
	Search []string     `json:"search,omitempty"`
	// Server is the server's DUID (option 2).
	Server dhcpc.Hex `json:"server"`
	// DUID and IAID identify the client and its address towards the server.
	DUID dhcpc.Hex `json:"duid"`
	IAID uint32    `json:"iaid"`
	// Obtained is the time when the client last sent the message that the REPLY answers. Renew (T1), Rebind (T2),
	// Preferred and Expire are relative to it. Renew, Rebind and Expire are zero in a lease that never ends. Preferred
	// is zero if the address stays preferred for ever. The times use the same clocks as the times of a dhcpc.Lease.
	Obtained  time.Time `json:"obtained"`
	Renew     time.Time `json:"renew,omitzero"`
	Rebind    time.Time `json:"rebind,omitzero"`
	Preferred time.Time `json:"preferred,omitzero"`
	Expire    time.Time `json:"expire,omitzero"`
	// Ignored names the parts of the server's REPLY that cannot be used, with the reasons, for a log.
	Ignored []string `json:"ignored,omitempty"`
}

// Validate returns an error if the lease cannot be renewed and released: address, server, identity and times must be
// present and possible. The error matches tombolo.ErrInvalid.
func (l *Lease6) Validate() error {
	switch {
	case l == nil:
		return trace.Argument("no lease")
	case !l.Address.IsValid():
		return trace.Unusable("it has no address")
	case !usable(l.Address):
		return trace.Unusable("%s is not the address of a host", l.Address)
	case len(l.Server) < minDUID || len(l.Server) > maxDUID:
		return trace.Unusable("server identifier of %d bytes: want %d to %d", len(l.Server), minDUID, maxDUID)
	case len(l.DUID) < minDUID || len(l.DUID) > maxDUID:
		return trace.Unusable("client identifier of %d bytes: want %d to %d", len(l.DUID), minDUID, maxDUID)
	}

	return trace.CheckTimes(l.Obtained, l.Renew, l.Rebind, l.Expire)
}

// Infinite reports whether the lease never ends.
func (l *Lease6) Infinite() bool {
	return l != nil && l.Renew.IsZero() && l.Rebind.IsZero() && l.Expire.IsZero()
}

// Left returns the time until the lease ends. It returns 0 if the lease has ended or is nil, and -1 if it never ends.
func (l *Lease6) Left(now time.Time) time.Duration {
	switch {
	case l == nil:
		return 0
	case l.Infinite():
		return -1
	}
	return max(l.Expire.Sub(now), 0)
}

// PreferredFor returns how long new connections may use the address as their source. Like Left, it returns 0 if that
// time is over, and -1 if it never ends.
func (l *Lease6) PreferredFor(now time.Time) time.Duration {
	switch {
	case l == nil:
		return 0
	case l.Preferred.IsZero():
		return l.Left(now)
	}
	return max(l.Preferred.Sub(now), 0)
}

// usable reports whether a server may assign the address to a host: a unicast address that is not link-local.
func usable(a netip.Addr) bool {
	return a.Is6() && !a.Is4In6() && a.Zone() == "" && !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast() &&
		!a.IsLinkLocalUnicast()
}

// minDUID and maxDUID are the minimum and maximum length of a DUID in bytes, including its type (RFC 8415, section
// 11.1).
const (
	minDUID = 3
	maxDUID = 130
)

// DUID returns a client identifier of type 4 (RFC 6355) made of a UUID, or of 16 bytes of a hash.
func DUID(uuid [16]byte) dhcpc.Hex { return append(dhcpc.Hex{0, 4}, uuid[:]...) }

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
	// RapidCommit requests the lease in two messages instead of four. Without it, or if no server supports it, the
	// client collects ADVERTISEs for about a second.
	RapidCommit bool
	// Refuse returns an error if the client must not use the lease l. held is the client's present lease, or nil. The
	// client ignores an offer that Refuse rejects, and declines a granted lease that Refuse rejects. A nil Refuse
	// accepts all leases.
	Refuse func(l, held *Lease6) error
	// DetectConflicts makes the client wait for the caller's duplicate address detection (state CHECKING) before it
	// uses a new address.
	DetectConflicts bool
}

// maxHostName is the longest DNS name, in bytes.
const maxHostName = 253

// check returns an error that matches tombolo.ErrInvalid if there is no Config, or a field is not valid.
func (c *Config) check() error {
	switch {
	case c == nil:
		return trace.Invalid("no configuration: a DHCPv6 client needs a DUID")
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

// maxServers, maxSearch and maxIgnored keep a server from filling a record or a pod's resolv.conf. The client ignores
// further entries.
const (
	maxServers = 16
	maxSearch  = 32
	maxIgnored = 16
)

// forever is an infinite lifetime (RFC 8415, section 7.7).
const forever = 0xffffffff * time.Second

// message is a received message, reduced to the parts that the client uses.
type message struct {
	kind       dhcpv6.MessageType
	xid        uint32
	client     []byte
	server     dhcpc.Hex
	preference uint8
	status     *dhcpv6.OptStatusCode
	rapid      bool
	ia         *dhcpv6.OptIANA // the first one with our IAID
	options    dhcpv6.MessageOptions
}

// parse decodes a message. If it cannot decode an option, it keeps the option as bytes, since an error in one option
// does not affect the others.
func parse(data []byte, iaid uint32) (*message, error) {
	const header = 4
	if len(data) < header {
		return nil, fmt.Errorf("%d bytes", len(data))
	}

	m := &message{kind: dhcpv6.MessageType(data[0]), xid: binary.BigEndian.Uint32(data) & 0xffffff}
	if err := m.options.FromBytesWithParser(data[header:], decodeOption); err != nil {
		return nil, err
	}

	for _, o := range m.options.Options {
		switch o := o.(type) {
		case *dhcpv6.OptIANA:
			if m.ia == nil && binary.BigEndian.Uint32(o.IaId[:]) == iaid {
				m.ia = o
			}
		case *dhcpv6.OptStatusCode:
			m.status = o
		}

		switch o.Code() {
		case dhcpv6.OptionClientID:
			m.client = o.ToBytes()
		case dhcpv6.OptionServerID:
			m.server = o.ToBytes()
		case dhcpv6.OptionRapidCommit:
			m.rapid = true
		case dhcpv6.OptionPreference:
			if b := o.ToBytes(); len(b) == 1 {
				m.preference = b[0]
			}
		}
	}

	return m, nil
}

// decodeOption decodes the options whose structure the client needs. It keeps malformed options and all others as
// bytes.
func decodeOption(code dhcpv6.OptionCode, data []byte) (dhcpv6.Option, error) {
	switch code {
	case dhcpv6.OptionIANA, dhcpv6.OptionStatusCode, dhcpv6.OptionDNSRecursiveNameServer, dhcpv6.OptionDomainSearchList,
		dhcpv6.OptionInformationRefreshTime:
		if o, err := dhcpv6.ParseOption(code, data); err == nil {
			return o, nil
		}
	}
	return &dhcpv6.OptionGeneric{OptionCode: code, OptionData: slices.Clone(data)}, nil
}

// statusOf returns the code of a status option. A missing option means Success.
func statusOf(s *dhcpv6.OptStatusCode) iana.StatusCode {
	if s == nil {
		return iana.StatusSuccess
	}
	return s.StatusCode
}

// refusal returns the status of the message if that is not Success. Otherwise it returns the status of our IA_NA, if
// the message has one. It returns nil for a missing status, which means Success.
func (m *message) refusal() *dhcpv6.OptStatusCode {
	if statusOf(m.status) != iana.StatusSuccess || m.ia == nil {
		return m.status
	}
	return m.ia.Options.Status()
}

// statusText returns a status as text, such as `NoAddrsAvail "no free address"`.
func statusText(s *dhcpv6.OptStatusCode) string {
	text := trace.Printable(s.StatusMessage)
	if text == "" {
		return s.StatusCode.String()
	}
	return fmt.Sprintf("%s %q", s.StatusCode, text)
}

// describe returns a short description of the message, for step.note.
func (m *message) describe() string {
	text := m.kind.String()
	if len(m.server) > 0 {
		text += " from " + m.server.String()
	}
	if s := m.refusal(); statusOf(s) != iana.StatusSuccess {
		text += ": " + statusText(s)
	}
	return text
}

// leases returns a lease of each usable address in our IA_NA. asked is the time when the client last sent the request
// that m answers. If a server ends an address by a lifetime of 0, the lease's Expire equals Obtained. why is a reason,
// for step.note, in case the caller finds no lease with a lifetime in list.
func (c *Config) leases(m *message, asked time.Time) (list []*Lease6, why string) {
	if m.ia == nil {
		return nil, ": no IA_NA of ours"
	}

	t1, t2 := m.ia.T1, m.ia.T2
	if t1 > 0 && t2 > 0 && t1 > t2 {
		return nil, fmt.Sprintf(": IA_NA: T1 of %s is after T2 of %s", t1, t2)
	}

	rest := &Lease6{} // the parts that all leases share
	rest.DNS, rest.Search = m.dns(rest), m.search(rest)
	for _, a := range m.ia.Options.Addresses() {
		addr, _ := netip.AddrFromSlice(a.IPv6Addr.To16())
		switch {
		case !usable(addr):
			rest.ignore("address %s: no host can have it", addr)
		case a.PreferredLifetime > a.ValidLifetime:
			rest.ignore("address %s: preferred for %s, and valid for %s", addr, a.PreferredLifetime, a.ValidLifetime)
		case statusOf(a.Options.Status()) != iana.StatusSuccess:
			rest.ignore("address %s: %s", addr, statusText(a.Options.Status()))
		default:
			list = append(list, c.lease(m, addr, a.PreferredLifetime, a.ValidLifetime, asked))
		}
	}

	for _, l := range list {
		l.DNS, l.Search, l.Ignored = rest.DNS, rest.Search, rest.Ignored
	}

	switch {
	case len(list) > 0:
		return list, fmt.Sprintf(": %s for no time", list[0].Address)
	case len(rest.Ignored) > 0:
		return nil, ": " + rest.Ignored[0]
	}
	return nil, ": no address"
}

// shortest is the minimum of T1, also if the server sent less. In a shorter lease, T1 is the end of the lease.
const shortest = 2 * time.Second

// lease returns a lease of the address a with the given lifetimes, without the options that m has for all addresses.
func (c *Config) lease(m *message, a netip.Addr, preferred, valid time.Duration, asked time.Time) *Lease6 {
	l := &Lease6{Address: a, Server: slices.Clone(m.server), DUID: c.DUID, IAID: c.IAID, Obtained: asked}
	if preferred < forever {
		l.Preferred = asked.Add(preferred)
	}

	if valid < forever {
		l.Expire = asked.Add(valid)
		t1, t2 := times(preferred, valid, m.ia.T1, m.ia.T2)
		l.Renew, l.Rebind = asked.Add(t1), asked.Add(t2)
	}
	return l
}

// times returns T1 and T2, in this order and not after the end of the lease. The server may leave them to the client,
// or send times after the end. They are then fractions of the preferred lifetime, as RFC 8415, section 21.4,
// recommends. If the preferred lifetime is 0, they are fractions of the valid lifetime.
func times(preferred, valid, t1, t2 time.Duration) (renew, rebind time.Duration) {
	base := preferred
	if base == 0 {
		base = valid
	}

	if t2 == 0 || t2 > valid {
		t2 = base / 5 * 4
	}

	if t1 == 0 || t1 > t2 {
		t1 = min(base/2, t2)
	}

	t1 = min(max(t1, shortest), valid)
	return t1, min(max(t2, t1), valid)
}

// dns returns the usable name servers of a message, each once and at most maxServers. It records unusable and further
// ones in l.Ignored.
func (m *message) dns(l *Lease6) []netip.Addr {
	var list []netip.Addr
	for _, ip := range m.options.DNS() {
		a, ok := netip.AddrFromSlice(ip)
		switch {
		case !ok || !a.Is6() || a.Is4In6() || a.IsUnspecified() || a.IsMulticast() || a.IsLoopback():
			l.ignore("DNS server %s", a)
		case len(list) == maxServers:
			l.ignore("DNS servers after the first %d", maxServers)
			return list
		case !slices.Contains(list, a):
			list = append(list, a)
		}
	}

	return list
}

// search returns the valid search domains of a message, at most maxSearch. It records the others in l.Ignored.
func (m *message) search(l *Lease6) []string {
	labels := m.options.DomainSearchList()
	if labels == nil {
		return nil
	}

	var list []string
	for _, name := range labels.Labels {
		switch {
		case !trace.IsDomain(name):
			l.ignore("search domain %.80q", name)
		case len(list) == maxSearch:
			l.ignore("search domains after the first %d", maxSearch)
			return list
		default:
			list = append(list, name)
		}
	}

	return list
}

// ignore adds an entry to l.Ignored, up to maxIgnored of them.
func (l *Lease6) ignore(format string, args ...any) {
	if len(l.Ignored) < maxIgnored {
		l.Ignored = append(slices.Clip(l.Ignored), fmt.Sprintf(format, args...))
	}
}

// write returns a message with the options that all messages have.
func (c *Config) write(kind dhcpv6.MessageType, xid uint32, elapsed time.Duration) *dhcpv6.Message {
	m := &dhcpv6.Message{MessageType: kind,
		TransactionID: dhcpv6.TransactionID{byte(xid >> 16), byte(xid >> 8), byte(xid)}}
	m.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionClientID, OptionData: c.DUID})

	// The elapsed time counts hundredths of a second, up to 0xffff.
	m.AddOption(dhcpv6.OptElapsedTime(min(max(elapsed, 0), 0xffff*10*time.Millisecond)))
	return m
}

// requestOptions adds the Option Request option. It requests name servers, search domains and the given options.
func requestOptions(m *dhcpv6.Message, more ...dhcpv6.OptionCode) {
	codes := append([]dhcpv6.OptionCode{dhcpv6.OptionDNSRecursiveNameServer, dhcpv6.OptionDomainSearchList}, more...)
	m.AddOption(dhcpv6.OptRequestedOption(codes...))
}

// message returns a message about an address in our IA_NA, whose times it leaves to the server. An invalid address
// and a nil server mean any.
func (c *Config) message(
	kind dhcpv6.MessageType, xid uint32, elapsed time.Duration, server dhcpc.Hex, a netip.Addr,
) *dhcpv6.Message {
	m := c.write(kind, xid, elapsed)
	if server != nil {
		m.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionServerID, OptionData: server})
	}

	ia := &dhcpv6.OptIANA{}
	binary.BigEndian.PutUint32(ia.IaId[:], c.IAID)
	if a.IsValid() {
		ia.Options.Add(&dhcpv6.OptIAAddress{IPv6Addr: net.IP(a.AsSlice())})
	}
	m.AddOption(ia)
	return m
}

// Release returns a RELEASE message for a lease. It uses only the lower 24 bits of xid. An unusable lease is an error
// that matches tombolo.ErrInvalid.
func Release(l *Lease6, xid uint32) ([]byte, error) {
	if err := l.Validate(); err != nil {
		return nil, err
	}
	c := &Config{DUID: l.DUID, IAID: l.IAID}
	return c.message(dhcpv6.MessageTypeRelease, xid, 0, l.Server, l.Address).ToBytes(), nil
}
