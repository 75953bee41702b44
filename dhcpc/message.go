package dhcpc

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/tombolo-cni/tombolo/internal/trace"
)

// message is a received DHCP message with further facts about its packet.
type message struct {
	*dhcpv4.DHCPv4
	address netip.Addr // the assigned address (yiaddr)
	server  netip.Addr // option 54; not valid if it is missing or no host's address
	source  netip.Addr // the IP packet's source; not valid if unknown
	nextHop Hex        // the frame's source MAC
	ignored []string   // options that were left out, for Lease.Ignored
}

// sender returns the server's address: the server identifier or, without one, the source address.
func (m *message) sender() netip.Addr {
	if m.server.IsValid() {
		return m.server
	}
	return m.source
}

// Offsets in bytes of fields in a DHCP message (RFC 2131, section 2).
const (
	snameAt, fileAt, cookieAt, optionsAt = 44, 108, 236, 240
)

// parse parses the DHCP message in a packet. An unusable option is no error: m.ignored lists it.
func parse(p *Packet) (m *message, err error) {
	m = &message{nextHop: p.SrcMAC, source: p.Src.Addr().Unmap()}
	b := p.Payload

	// Parse only the header, since one wrong option is no reason to reject the message.
	header := append(bytes.Clone(b[:min(len(b), optionsAt)]), dhcpv4.OptionEnd.Code())
	if m.DHCPv4, err = dhcpv4.FromBytes(header); err != nil {
		return nil, fmt.Errorf("read DHCP message: %w", err)
	}

	m.Options = dhcpv4.Options{}
	m.addOptions(b[optionsAt:])
	m.addOverloaded(b)
	m.address, _ = netip.AddrFromSlice(m.YourIPAddr.To4())
	id := m.Options.Get(dhcpv4.OptionServerIdentifier)
	if len(id) == 4 {
		if a := netip.AddrFrom4([4]byte(id)); usable(a) {
			m.server = a
		}
	}
	if id != nil && !m.server.IsValid() {
		m.ignore(54, "%q is no server's address", Hex(id))
	}

	return m, nil
}

// addOptions adds the options of one part of the message (options, file or sname) up to its End option, without
// truncated options. If an option of fixed size is repeated, it keeps the first value of that size. For example,
// dnsmasq sends the lease time twice if it is also configured as an option. addOptions joins the parts of other options
// (RFC 3396).
func (m *message) addOptions(b []byte) {
	for len(b) > 0 && b[0] != dhcpv4.OptionEnd.Code() {
		code := b[0]
		if code == dhcpv4.OptionPad.Code() {
			b = b[1:]
			continue
		}

		if len(b) < 2 || len(b) < 2+int(b[1]) {
			m.ignore(code, "cut short at the end of its field")
			return
		}

		value := slices.Clip(b[2 : 2+int(b[1])])
		b = b[2+len(value):]
		before, isKnown := m.Options[code]
		switch size := fixedSize(code); {
		case isKnown && len(before) == size && !bytes.Equal(before, value):
			m.ignore(code, "sent twice, as %s and %s: the first is taken", Hex(before), Hex(value))
		case isKnown && len(before) == size:
		case isKnown && len(value) == size:
			m.ignore(code, "sent in a wrong size before %s", Hex(value))
			m.Options[code] = value
		default:
			m.Options[code] = slices.Concat(before, value)
		}
	}
}

// fixedSize returns the size in bytes of an option whose size is fixed by RFC 2132, 2563, 3011 or 8925. For any other
// option it returns -1.
func fixedSize(code uint8) int {
	switch code {
	case 19, 20, 23, 27, 29, 30, 31, 34, 36, 37, 39, 46, 52, 53, 116:
		return 1
	case 13, 22, 26, 57:
		return 2
	case 1, 2, 16, 24, 28, 32, 35, 38, 50, 51, 54, 58, 59, 108, 118:
		return 4
	}
	return -1
}

// addOverloaded adds the options that a server put into the fields file and sname for lack of room (option 52). If an
// option is in both, file comes before sname (RFC 3396).
func (m *message) addOverloaded(payload []byte) {
	v := m.Options.Get(dhcpv4.OptionOptionOverload)
	if v != nil && (len(v) != 1 || v[0] == 0 || v[0] > 3) {
		m.ignore(52, "%q is none of 1, 2 and 3", Hex(v))
	}
	if len(v) != 1 {
		return
	}
	if v[0]&1 != 0 {
		m.addOptions(payload[fileAt:cookieAt])
	}
	if v[0]&2 != 0 {
		m.addOptions(payload[snameAt:fileAt])
	}
}

// whyForeign returns the reason why a message is no answer in the session's present transaction, or "" if it is one.
func (m *Machine) whyForeign(s *Session, msg *message) string {
	switch {
	case msg.OpCode != dhcpv4.OpcodeBootReply:
		return "not a server's"
	case msg.HWType != iana.HWTypeEthernet || !bytes.Equal(msg.ClientHWAddr, m.cfg.MAC):
		return "for another client"
	case binary.BigEndian.Uint32(msg.TransactionID[:]) != s.xid:
		return "for another transaction"
	}

	// A server may echo the client identifier (RFC 6842) or not (RFC 2131). So a missing one is no reason to reject
	// the message.
	id := msg.Options.Get(dhcpv4.OptionClientIdentifier)
	if id != nil && len(m.cfg.ClientID) > 0 && !bytes.Equal(id, m.cfg.ClientID) {
		return "for another client identifier"
	}

	switch msg.MessageType() {
	case dhcpv4.MessageTypeOffer, dhcpv4.MessageTypeAck, dhcpv4.MessageTypeNak:
		return ""
	}

	// Accepting a FORCERENEW would require authentication (RFC 3203), and the client has no key.
	return "not an answer"
}

// whyDoubtful returns the reason to reject an answer for this client, or "" to accept it. It rejects servers that are
// not in Config.Servers, and answers that may come from outside the LAN.
func (m *Machine) whyDoubtful(s *Session, msg *message, p *Packet) string {
	isAccepted := func(server netip.Addr) bool { return slices.Contains(m.cfg.Servers, server) }
	switch {
	case len(m.cfg.Servers) > 0 && !isAccepted(msg.server) && !isAccepted(msg.source):
		return fmt.Sprintf("not a server to accept, which are %v", m.cfg.Servers)
	case !isFromLAN(p, s.lease):
		return fmt.Sprintf("it came from %s to %s, as an answer from outside the LAN could", p.Src, p.Dst)
	}
	return ""
}

// isFromLAN reports whether an answer was broadcast, or came from port 67 of the lease's server or of an address in the
// lease's subnet other than the leased one. It returns true if the client has no lease, or the answer's destination is
// unknown. A malicious client could cooperate with a machine outside the LAN. That machine learns the client's
// transaction identifier, and can send from a DHCP server's port. But it cannot send from an address of the LAN, and it
// cannot broadcast there.
func isFromLAN(p *Packet, held *Lease) bool {
	if held == nil || !p.Dst.IsValid() || p.Dst.Addr() == broadcastAddr() {
		return true
	}
	from := p.Src.Addr()
	return p.Src.Port() == dhcpv4.ServerPort &&
		(from == held.Server || from != held.Address.Addr() && held.Address.Contains(from))
}

// draft returns a client's message of the given type with the fields that all types have.
func draft(kind dhcpv4.MessageType, xid uint32, mac, clientID []byte) *dhcpv4.DHCPv4 {
	d := &dhcpv4.DHCPv4{
		OpCode: dhcpv4.OpcodeBootRequest, HWType: iana.HWTypeEthernet, ClientHWAddr: net.HardwareAddr(mac),
		ClientIPAddr: net.IPv4zero, YourIPAddr: net.IPv4zero, ServerIPAddr: net.IPv4zero, GatewayIPAddr: net.IPv4zero,
		Options: dhcpv4.Options{},
	}
	binary.BigEndian.PutUint32(d.TransactionID[:], xid)
	d.UpdateOption(dhcpv4.OptMessageType(kind))
	if len(clientID) > 0 {
		d.UpdateOption(dhcpv4.OptClientIdentifier(clientID))
	}
	return d
}

// request returns a DISCOVER or a REQUEST to send now, and records the time for Lease.Obtained. The message contains
// the options that the client sends in both types. The caller adds the others: requested address, server identifier and
// rapid commit.
func (t *step) request(kind dhcpv4.MessageType) *dhcpv4.DHCPv4 {
	t.s.requestSent = t.now
	d := draft(kind, t.s.xid, t.cfg.MAC, t.cfg.ClientID)
	d.NumSeconds = t.s.secs
	set := func(code dhcpv4.OptionCode, value []byte) {
		if len(value) > 0 {
			d.Options[code.Code()] = value
		}
	}
	set(dhcpv4.OptionHostName, []byte(t.cfg.HostName))
	set(dhcpv4.OptionClassIdentifier, []byte(t.cfg.VendorClass))
	set(dhcpv4.OptionParameterRequestList, t.cfg.requested())

	// Ask for answers that need no fragmentation on the client's link, since a raw socket receives no fragments.
	size := min(max(cmp.Or(t.cfg.LinkMTU, defaultMessageSize), minMessage), defaultMessageSize)
	d.UpdateOption(dhcpv4.OptMaxMessageSize(uint16(size)))
	for _, o := range t.cfg.Provide {
		d.Options[o.Code] = o.Value
	}

	return d
}

// broadcast returns a packet with the message to all servers, from a client without an address.
func (t *step) broadcast(d *dhcpv4.DHCPv4) *Packet {
	if t.cfg.Broadcast || t.s.askBroadcast {
		d.SetBroadcast()
	}
	return packet(d, netip.IPv4Unspecified(), broadcastAddr())
}

func broadcastAddr() netip.Addr { return netip.AddrFrom4([4]byte{255, 255, 255, 255}) }

func packet(d *dhcpv4.DHCPv4, src, dst netip.Addr) *Packet {
	return &Packet{
		Src: netip.AddrPortFrom(src, dhcpv4.ClientPort), Dst: netip.AddrPortFrom(dst, dhcpv4.ServerPort),
		Payload: d.ToBytes(),
	}
}

// declineOf returns the DECLINE for an address that a server granted.
func declineOf(l *Lease, xid uint32) *Packet {
	d := draft(dhcpv4.MessageTypeDecline, xid, l.MAC, l.ClientID)
	d.UpdateOption(dhcpv4.OptRequestedIPAddress(ip(l.Address.Addr())))
	d.UpdateOption(dhcpv4.OptServerIdentifier(ip(l.Server)))
	d.UpdateOption(dhcpv4.OptMessage("address in use"))
	return packet(d, netip.IPv4Unspecified(), broadcastAddr())
}

// Release returns the RELEASE of a lease, addressed to the server that granted it. A packet socket anywhere on the
// server's link can send it, for example on the bridge after the client's own interface is gone. For this the packet
// has the MAC addresses, if known. No server answers a RELEASE. An unusable lease is an error that matches
// tombolo.ErrInvalid.
func Release(l *Lease, xid uint32) (*Packet, error) {
	if err := l.Validate(); err != nil {
		return nil, err
	}

	d := draft(dhcpv4.MessageTypeRelease, xid, l.MAC, l.ClientID)

	// The address belongs in ciaddr. RFC 2131, table 5, forbids option 50 in a RELEASE.
	d.ClientIPAddr = ip(l.Address.Addr())
	d.UpdateOption(dhcpv4.OptServerIdentifier(ip(l.Server)))
	p := packet(d, l.Address.Addr(), l.Server)
	p.SrcMAC, p.DstMAC = l.MAC, l.ServerMAC
	return p, nil
}

func ip(a netip.Addr) net.IP { return a.AsSlice() }

// The causes of errors, for errors.Is.
var (
	// ErrTimeout means that no lease came in time. The error that wraps it lists the messages sent and received. That
	// error also matches ErrNAK, ErrDeclined or ErrRefused if the last failure before the timeout was of this kind.
	ErrTimeout = trace.ErrTimeout
	// ErrNAK means that a server refused the requested address.
	ErrNAK = errors.New("server refused the address")
	// ErrDeclined means that the client declined an address because another host uses it.
	ErrDeclined = errors.New("address is in use by another host")
	// ErrRefused means that the client declined a granted address because Config.Refuse refused it.
	ErrRefused = errors.New("address not taken")
	// ErrExpired means that a lease ended before any server renewed it.
	ErrExpired = errors.New("lease expired")
)

// describe returns the description of a message, for step.note, such as "OFFER of 192.0.2.9 from 192.0.2.1".
func describe(m *message) string {
	s := m.MessageType().String()
	if m.MessageType() == dhcpv4.MessageTypeNone {
		s = "message of no type"
	}

	if m.address.IsValid() && !m.address.IsUnspecified() {
		s += " of " + m.address.String()
	}

	if from := m.sender(); from.IsValid() {
		s += " from " + from.String()
	}
	return s
}

// refusal returns the error for a NAK. requested is the address that the client had requested.
func refusal(m *message, requested netip.Addr) error {
	err := fmt.Errorf("%w %s: NAK from %s", ErrNAK, requested, m.sender())
	if text := trace.Printable(m.Message()); text != "" {
		err = fmt.Errorf("%w: %q", err, text)
	}
	return err
}
