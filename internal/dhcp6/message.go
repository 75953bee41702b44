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
	"github.com/insomniacslk/dhcp/rfc1035label"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/trace"
)

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

// decodeOption decodes the options that the client reads, and keeps all others as bytes.
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

// refusal returns the status of the message if that is not Success. Otherwise it returns the status of the IA_NA.
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

// describe returns a short description of the message for a trace.
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

// grant is an address in an IA_NA, with its lifetimes.
type grant struct {
	addr             netip.Addr
	preferred, valid time.Duration
}

// grants reads our IA_NA. It returns the usable addresses, including those with a lifetime of 0, the times T1 and T2,
// and descriptions of the unusable parts.
func (m *message) grants() (list []grant, t1, t2 time.Duration, ignored []string) {
	if m.ia == nil {
		return nil, 0, 0, nil
	}

	t1, t2 = m.ia.T1, m.ia.T2
	if t1 > 0 && t2 > 0 && t1 > t2 {
		return nil, 0, 0, []string{fmt.Sprintf("IA_NA: T1 of %s is after T2 of %s", t1, t2)}
	}

	for _, o := range m.ia.Options.Options {
		a, ok := o.(*dhcpv6.OptIAAddress)
		if !ok {
			continue
		}

		addr, _ := netip.AddrFromSlice(a.IPv6Addr.To16())
		switch {
		case len(ignored) == maxIgnored:
			return list, t1, t2, ignored
		case !usable(addr):
			ignored = append(ignored, fmt.Sprintf("address %s: no host can have it", addr))
		case a.PreferredLifetime > a.ValidLifetime:
			ignored = append(ignored, fmt.Sprintf("address %s: preferred for %s, and valid for %s", addr,
				a.PreferredLifetime, a.ValidLifetime))
		case statusOf(a.Options.Status()) != iana.StatusSuccess:
			ignored = append(ignored, fmt.Sprintf("address %s: %s", addr, statusText(a.Options.Status())))
		default:
			list = append(list, grant{addr, a.PreferredLifetime, a.ValidLifetime})
		}
	}

	return list, t1, t2, ignored
}

// shortest is the minimum time between two messages of a renewal. It also applies if a server requests a shorter
// time.
const shortest = 2 * time.Second

// lease returns a lease of the address g, which the message m offers or grants. asked is the time when the client sent
// the request that m answers.
func (c *Config) lease(m *message, g grant, t1, t2 time.Duration, ignored []string, asked time.Time) *Lease6 {
	l := &Lease6{
		Address: g.addr, Server: slices.Clone(m.server), DUID: c.DUID, IAID: c.IAID,
		Obtained: asked, Ignored: ignored,
	}
	if g.preferred < forever {
		l.Preferred = asked.Add(g.preferred)
	}

	if g.valid < forever {
		l.Expire = asked.Add(g.valid)
		l.Renew, l.Rebind = c.times(l, g, t1, t2)
	}

	l.DNS, l.Search = m.dns(l), m.search(l)
	return l
}

// times returns T1 and T2, in this order and before the end of the lease. The server may leave them to the client, or
// send times after the end. They are then fractions of the preferred lifetime, as RFC 8415, section 21.4, recommends.
func (c *Config) times(l *Lease6, g grant, t1, t2 time.Duration) (renew, rebind time.Time) {
	base := g.preferred
	if base == 0 || base > g.valid {
		base = g.valid
	}

	if t2 == 0 || t2 > g.valid {
		t2 = base / 5 * 4
	}

	if t1 == 0 || t1 > t2 {
		t1 = min(base/2, t2)
	}

	t1 = min(max(t1, shortest), g.valid)
	t2 = min(max(t2, t1), g.valid)
	return l.Obtained.Add(t1), l.Obtained.Add(t2)
}

// dns returns the name servers of a message. It adds the unusable ones to l.Ignored.
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

// search returns the search domains of a message. It adds the unusable ones to l.Ignored.
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

// maxRT returns the value of SOL_MAX_RT or INF_MAX_RT (RFC 8415, sections 21.24 and 21.25). If the message has no
// valid value, it returns the previous value, which the parameter before contains.
func (m *message) maxRT(code dhcpv6.OptionCode, before time.Duration) time.Duration {
	if o := m.options.GetOne(code); o != nil {
		if b := o.ToBytes(); len(b) == 4 {
			if d := time.Duration(binary.BigEndian.Uint32(b)) * time.Second; d >= time.Minute && d <= 24*time.Hour {
				return d
			}
		}
	}
	return before
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

// addHostName adds the host name, if there is one. The flag S asks the server to enter the address in the DNS.
func (c *Config) addHostName(m *dhcpv6.Message) {
	if c.HostName != "" {
		m.AddOption(&dhcpv6.OptFQDN{Flags: 1, DomainName: &rfc1035label.Labels{Labels: []string{c.HostName}}})
	}
}

// addIANA adds our IA_NA, with the address a if that is valid. It leaves all times to the server.
func addIANA(m *dhcpv6.Message, iaid uint32, a netip.Addr) {
	ia := &dhcpv6.OptIANA{}
	binary.BigEndian.PutUint32(ia.IaId[:], iaid)
	if a.IsValid() {
		ia.Options.Add(&dhcpv6.OptIAAddress{IPv6Addr: net.IP(a.AsSlice())})
	}
	m.AddOption(ia)
}

// addServerID adds the server identifier.
func addServerID(m *dhcpv6.Message, server dhcpc.Hex) {
	m.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionServerID, OptionData: server})
}

// Release returns a RELEASE message for a lease. It uses only the lower 24 bits of xid. An unusable lease is an error
// that matches tombolo.ErrInvalid.
func Release(l *Lease6, xid uint32) ([]byte, error) {
	if err := l.Validate(); err != nil {
		return nil, err
	}
	c := &Config{DUID: l.DUID}
	m := c.write(dhcpv6.MessageTypeRelease, xid, 0)
	addServerID(m, l.Server)
	addIANA(m, l.IAID, l.Address)
	return m.ToBytes(), nil
}
