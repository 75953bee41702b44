package transport

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
)

// Lengths in bytes, and bits of the IPv4 header's flags and fragment offset.
const (
	etherLen, macLen = 14, 6
	tagLen           = 4 // the length of an 802.1Q tag
	ipLen, arpLen    = 20, 28
	ip6Len           = 40

	dontFragment   = 0x4000
	moreFragments  = 0x2000
	fragmentOffset = 0x1fff

	timeToLive = 64
)

// errNotOurs is the error about a frame without a valid DHCP or ARP packet for a client. The socket's filter rejects
// most such frames.
var errNotOurs = errors.New("not a DHCP or ARP packet for a client")

// broadcastMAC returns the broadcast address, for a receiver whose MAC is unknown. A host also accepts packets for
// its IP address that are sent to this MAC.
func broadcastMAC() dhcpc.Hex { return dhcpc.Hex{0xff, 0xff, 0xff, 0xff, 0xff, 0xff} }

// encode returns a packet as an Ethernet frame. If the packet has no source MAC, it uses own. If it has no
// destination MAC, it uses the broadcast address.
func encode(p *dhcpc.Packet, own []byte) ([]byte, error) {
	src, dst := []byte(p.SrcMAC), []byte(p.DstMAC)
	if len(src) == 0 {
		src = own
	}

	if len(dst) == 0 {
		dst = broadcastMAC()
	}

	if len(src) != macLen || len(dst) != macLen {
		return nil, fmt.Errorf("frame from %s to %s: want MAC addresses of %d bytes", dhcpc.Hex(src), dhcpc.Hex(dst),
			macLen)
	}

	frame := slices.Concat(dst, src)
	if p.ARP != nil {
		return appendARP(frame, p.ARP)
	}

	return appendIP(frame, p)
}

// appendIP appends the packet with its IPv4 and UDP headers.
func appendIP(b []byte, p *dhcpc.Packet) ([]byte, error) {
	if !p.Src.Addr().Is4() || !p.Dst.Addr().Is4() {
		return nil, fmt.Errorf("packet from %s to %s: want IPv4 addresses", p.Src, p.Dst)
	}

	total := ipLen + udpHeaderLen + len(p.Payload)
	if total > 0xffff {
		return nil, fmt.Errorf("message of %d bytes: too long for a packet", len(p.Payload))
	}

	be := binary.BigEndian
	b = be.AppendUint16(b, unix.ETH_P_IP)
	start := len(b)
	b = append(b, 0x45, 0)
	b = be.AppendUint16(b, uint16(total))
	b = be.AppendUint16(b, 0)
	b = be.AppendUint16(b, dontFragment)
	b = append(b, timeToLive, unix.IPPROTO_UDP, 0, 0)
	b = append(b, p.Src.Addr().AsSlice()...)
	b = append(b, p.Dst.Addr().AsSlice()...)
	be.PutUint16(b[start+10:], ^sum(0, b[start:]))

	return appendUDP(b, b[start+12:], p.Src.Port(), p.Dst.Port(), p.Payload), nil
}

// appendUDP appends a UDP packet with its checksum. addresses are the IP source and destination addresses, one after
// the other.
func appendUDP(b, addresses []byte, src, dst uint16, payload []byte) []byte {
	be := binary.BigEndian
	udp, length := len(b), udpHeaderLen+len(payload)
	b = be.AppendUint16(b, src)
	b = be.AppendUint16(b, dst)
	b = be.AppendUint16(b, uint16(length))
	b = be.AppendUint16(b, 0)
	b = append(b, payload...)
	pseudo := sum(unix.IPPROTO_UDP+uint32(length), addresses) // of the pseudo header
	checksum := ^sum(uint32(pseudo), b[udp:])
	if checksum == 0 {
		checksum = 0xffff // a checksum of 0 means "no checksum"
	}

	be.PutUint16(b[udp+6:], checksum)
	return b
}

// appendARP appends an ARP packet. An empty target MAC becomes zero.
func appendARP(b []byte, a *dhcpc.ARP) ([]byte, error) {
	target := []byte(a.TargetMAC)
	if len(target) == 0 {
		target = make([]byte, macLen)
	}

	if len(a.SenderMAC) != macLen || len(target) != macLen || !a.SenderIP.Is4() || !a.TargetIP.Is4() {
		return nil, fmt.Errorf("ARP packet from %s %s to %s %s: want Ethernet and IPv4 addresses", a.SenderMAC,
			a.SenderIP, a.TargetMAC, a.TargetIP)
	}

	op := uint16(1)
	if a.Reply {
		op = 2
	}

	be := binary.BigEndian
	b = be.AppendUint16(b, unix.ETH_P_ARP)
	b = be.AppendUint16(b, unix.ARPHRD_ETHER)
	b = be.AppendUint16(b, unix.ETH_P_IP)
	b = append(b, macLen, 4)
	b = be.AppendUint16(b, op)
	b = append(append(b, a.SenderMAC...), a.SenderIP.AsSlice()...)
	return append(append(b, target...), a.TargetIP.AsSlice()...), nil
}

// tagged inserts an 802.1Q tag after a frame's MAC addresses, unless vlan is 0.
func tagged(frame []byte, vlan uint16) []byte {
	if vlan == 0 {
		return frame
	}
	return slices.Insert(frame, 2*macLen, unix.ETH_P_8021Q>>8, unix.ETH_P_8021Q&0xff, byte(vlan>>8), byte(vlan))
}

// sum returns the ones' complement sum of 16-bit words, beginning with start (RFC 1071).
func sum(start uint32, b []byte) uint16 {
	s := start
	for ; len(b) >= 2; b = b[2:] {
		s += uint32(binary.BigEndian.Uint16(b))
		s = s&0xffff + s>>16
	}
	if len(b) == 1 {
		s += uint32(b[0]) << 8
		s = s&0xffff + s>>16
	}
	return uint16(s)
}

// untagged returns a frame without its tag of VLAN 0, which only carries a priority. It returns a copy if the frame
// has such a tag, and otherwise the frame itself.
func untagged(frame []byte) []byte {
	be := binary.BigEndian
	if len(frame) < etherLen+tagLen || be.Uint16(frame[2*macLen:]) != unix.ETH_P_8021Q ||
		be.Uint16(frame[2*macLen+2:])&vlanID != 0 {
		return frame
	}
	return slices.Concat(frame[:2*macLen], frame[2*macLen+tagLen:])
}

// decode parses an Ethernet frame. The result does not refer to the frame's bytes. decode ignores the UDP checksum: a
// sender on the same machine leaves its computation to a device, and a virtual device never computes it.
func decode(frame []byte) (*dhcpc.Packet, error) {
	if len(frame) < etherLen {
		return nil, errNotOurs
	}

	frame = slices.Clone(untagged(frame))
	p := &dhcpc.Packet{DstMAC: dhcpc.Hex(frame[:6:6]), SrcMAC: dhcpc.Hex(frame[6:12:12])}
	body := frame[etherLen:]
	switch binary.BigEndian.Uint16(frame[12:]) {
	case unix.ETH_P_ARP:
		a, err := decodeARP(body)
		p.ARP = a
		return p, err
	case unix.ETH_P_IP:
		return p, decodeIP(p, body)
	}

	return nil, errNotOurs
}

// decodeIP parses an IPv4 packet with UDP to a DHCP client's port into p.
func decodeIP(p *dhcpc.Packet, b []byte) error {
	be := binary.BigEndian
	if len(b) < ipLen || b[0]>>4 != 4 {
		return errNotOurs
	}

	header, total := int(b[0]&0xf)*4, int(be.Uint16(b[2:]))
	switch {
	case header < ipLen || total < header+udpHeaderLen || total > len(b):
		return fmt.Errorf("%w: lengths %d and %d in %d bytes", errNotOurs, header, total, len(b))
	case be.Uint16(b[6:])&(moreFragments|fragmentOffset) != 0:
		return fmt.Errorf("%w: fragment", errNotOurs)
	case b[9] != unix.IPPROTO_UDP:
		return errNotOurs
	case sum(0, b[:header]) != 0xffff:
		return fmt.Errorf("%w: IP checksum", errNotOurs)
	}

	udp := b[header:total] // Ethernet's padding may follow
	length := int(be.Uint16(udp[4:]))
	if length < udpHeaderLen || length > len(udp) {
		return fmt.Errorf("%w: UDP length %d in %d bytes", errNotOurs, length, len(udp))
	}

	udp = udp[:length:length]
	p.Src = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[12:16])), be.Uint16(udp))
	p.Dst = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[16:20])), be.Uint16(udp[2:]))
	if p.Dst.Port() != dhcpv4.ClientPort {
		return errNotOurs
	}

	p.Payload = udp[udpHeaderLen:]
	return nil
}

// decodeARP parses an ARP packet for Ethernet and IPv4.
func decodeARP(b []byte) (*dhcpc.ARP, error) {
	be := binary.BigEndian
	if len(b) < arpLen || be.Uint16(b) != unix.ARPHRD_ETHER || be.Uint16(b[2:]) != unix.ETH_P_IP || b[4] != macLen ||
		b[5] != 4 {
		return nil, errNotOurs
	}

	op := be.Uint16(b[6:])
	if op != 1 && op != 2 {
		return nil, errNotOurs
	}
	return &dhcpc.ARP{
		Reply:     op == 2,
		SenderMAC: dhcpc.Hex(b[8:14:14]), SenderIP: netip.AddrFrom4([4]byte(b[14:18])),
		TargetMAC: dhcpc.Hex(b[18:24:24]), TargetIP: netip.AddrFrom4([4]byte(b[24:28])),
	}, nil
}

// decode6 parses an Ethernet frame with a message to a DHCPv6 client, and returns a copy of the message.
func decode6(frame []byte) ([]byte, error) {
	be := binary.BigEndian
	frame = untagged(frame)
	if len(frame) < etherLen+ip6Len+udpHeaderLen || be.Uint16(frame[12:]) != unix.ETH_P_IPV6 {
		return nil, errNotOurs
	}

	b := frame[etherLen:]
	length := int(be.Uint16(b[4:]))
	if b[0]>>4 != 6 || b[6] != unix.IPPROTO_UDP || length < udpHeaderLen || length > len(b)-ip6Len {
		return nil, errNotOurs
	}

	udp := b[ip6Len : ip6Len+length] // Ethernet's padding may follow
	switch {
	case int(be.Uint16(udp[4:])) != length:
		return nil, fmt.Errorf("%w: UDP length %d in %d bytes", errNotOurs, be.Uint16(udp[4:]), length)
	case be.Uint16(udp[2:]) != clientPort6:
		return nil, errNotOurs
	}

	return append([]byte{}, udp[udpHeaderLen:]...), nil
}

// Offsets and values of the fields of a DHCP message that a filter compares (RFC 2131, section 2). A filter does not
// compare the transaction identifier, which changes during the socket's life. chaddr suffices to reject answers to
// other clients.
const (
	opAt, hwaddrAt, cookieAt = 0, 28, 236
	bootReply                = 2
	cookie                   = 0x63825363
	udpHeaderLen             = 8
)

const (
	accept = 1 << 16 // the number of bytes to pass: the whole packet
	reject = 0
)

// program is a list of BPF instructions. Its jumps mostly decide whether the next instruction, which rejects the
// packet, is skipped.
type program []bpf.Instruction

func (p *program) add(list ...bpf.Instruction) { *p = append(*p, list...) }

// need adds a test that rejects the packet unless the loaded value is v.
func (p *program) need(v uint32) {
	p.add(bpf.JumpIf{Cond: bpf.JumpEqual, Val: v, SkipTrue: 1}, bpf.RetConstant{Val: reject})
}

// load returns an instruction that loads size bytes at an offset.
type load func(off, size int) bpf.Instruction

// atFrame loads bytes of the frame or, in the filter of a UDP socket, of the UDP packet.
func atFrame(off, size int) bpf.Instruction { return bpf.LoadAbsolute{Off: uint32(off), Size: size} }

// needMAC adds tests that reject the packet unless it has the MAC address at the offset off.
func (p *program) needMAC(mac []byte, off int, at load) {
	p.add(at(off, 4))
	p.need(binary.BigEndian.Uint32(mac))
	p.add(at(off+4, 2))
	p.need(uint32(binary.BigEndian.Uint16(mac[4:])))
}

// answer adds tests that accept only a DHCP answer to a MAC address. at loads bytes of the message.
func (p *program) answer(mac []byte, at load) {
	p.add(at(opAt, 1))
	p.need(bootReply)
	p.needMAC(mac, hwaddrAt, at)
	p.add(at(cookieAt, 4))
	p.need(cookie)
	p.add(bpf.RetConstant{Val: accept})
}

// incoming returns a program that rejects packets from this machine, frames of a VLAN, and packets to other machines.
// Packets to other machines arrive in promiscuous mode. It accepts frames to mac even if that is not the interface's
// own address and the kernel therefore classes them as PACKET_OTHERHOST. The socket must be for all protocols, because
// the kernel removes VLAN tags before sockets for a single protocol receive the frame.
func incoming(mac []byte) program {
	p := append(ofNoVLAN(), bpf.LoadExtension{Num: bpf.ExtType})
	other := program{}
	other.need(unix.PACKET_OTHERHOST)
	other.needMAC(mac, 0, atFrame)
	p.add(bpf.JumpIf{Cond: bpf.JumpLessOrEqual, Val: unix.PACKET_MULTICAST, SkipTrue: uint8(len(other))})
	return append(p, other...)
}

// ofNoVLAN returns a program that rejects frames with a VLAN tag, which the kernel keeps beside the frame. It does
// not reject VLAN 0, whose tag only carries a priority (IEEE 802.1Q, section 6.9): Linux treats such a frame as
// untagged.
func ofNoVLAN() program {
	return program{
		bpf.LoadExtension{Num: bpf.ExtVLANTagPresent},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0, SkipTrue: 3},
		bpf.LoadExtension{Num: bpf.ExtVLANTag},
		bpf.JumpIf{Cond: bpf.JumpBitsNotSet, Val: vlanID, SkipTrue: 1},
		bpf.RetConstant{Val: reject},
	}
}

// leaving returns a program for the other end of the client's link. It accepts only frames that leave by this
// interface to the MAC address mac or to the broadcast address. It rejects frames of a VLAN, and frames with mac as
// their source.
func leaving(mac []byte) program {
	p := append(ofNoVLAN(), bpf.LoadExtension{Num: bpf.ExtType})
	p.need(unix.PACKET_OUTGOING)

	// Reject frames of the client itself. A bridge may send them back through the port where they came in.
	p.add(
		bpf.LoadAbsolute{Off: 6, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: binary.BigEndian.Uint32(mac), SkipTrue: 3},
		bpf.LoadAbsolute{Off: 10, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(binary.BigEndian.Uint16(mac[4:])), SkipTrue: 1},
		bpf.RetConstant{Val: reject},
	)

	unicast := program{}
	unicast.needMAC(mac, 0, atFrame)
	p.add(atFrame(0, 4), bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: math.MaxUint32, SkipTrue: 2},
		atFrame(4, 2), bpf.JumpIf{Cond: bpf.JumpEqual, Val: math.MaxUint16, SkipTrue: uint8(len(unicast))})
	return append(p, unicast...)
}

// vlanID is the mask of the VLAN's number in a tag. The other bits hold the frame's priority.
const vlanID = 0x0fff

// withPriorityTag returns a program for untagged frames and for frames with a tag of VLAN 0 in their data. Such a tag
// makes the Ethernet header longer. So withPriorityTag calls takes once with each length of the header in bytes, and
// combines the two programs.
func withPriorityTag(takes func(headerLen uint32) program) program {
	const typeAt, tagAt = 2 * macLen, 2*macLen + 2
	plain := takes(etherLen)
	p := program{
		bpf.LoadAbsolute{Off: typeAt, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.ETH_P_8021Q, SkipTrue: uint8(len(plain))},
	}
	p.add(plain...)
	p.add(
		bpf.LoadAbsolute{Off: tagAt, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpBitsNotSet, Val: vlanID, SkipTrue: 1},
		bpf.RetConstant{Val: reject},
	)
	p.add(takes(etherLen + tagLen)...)
	return p
}

// frames returns a program that accepts Ethernet frames with DHCP answers to a MAC address, from any source port and
// with any IP options. If withARP is set, it also accepts ARP. It rejects fragments, since this package does not
// reassemble them.
func frames(mac []byte, withARP bool) program {
	return withPriorityTag(func(headerLen uint32) program {
		var p program
		p.add(bpf.LoadAbsolute{Off: headerLen - 2, Size: 2})
		if withARP {
			p.add(bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.ETH_P_ARP, SkipTrue: 1}, bpf.RetConstant{Val: accept})
		}

		p.need(unix.ETH_P_IP)
		p.add(
			bpf.LoadAbsolute{Off: headerLen + 6, Size: 2},
			bpf.JumpIf{Cond: bpf.JumpBitsNotSet, Val: moreFragments | fragmentOffset, SkipTrue: 1},
			bpf.RetConstant{Val: reject},
			bpf.LoadAbsolute{Off: headerLen + 9, Size: 1},
		)
		p.need(unix.IPPROTO_UDP)
		p.add(bpf.LoadMemShift{Off: headerLen}) // X becomes the length of the IP header
		p.add(bpf.LoadIndirect{Off: headerLen + 2, Size: 2})
		p.need(dhcpv4.ClientPort)
		p.answer(mac, func(off, size int) bpf.Instruction {
			return bpf.LoadIndirect{Off: headerLen + uint32(udpHeaderLen+off), Size: size}
		})
		return p
	})
}

// frames6 returns a program that accepts Ethernet frames with UDP to a DHCPv6 client's port. It rejects extension
// headers, and so fragments. Servers send fragments only for messages longer than the link's MTU.
func frames6() program {
	return withPriorityTag(func(headerLen uint32) program {
		p := program{bpf.LoadAbsolute{Off: headerLen - 2, Size: 2}}
		p.need(unix.ETH_P_IPV6)
		p.add(bpf.LoadAbsolute{Off: headerLen + 6, Size: 1})
		p.need(unix.IPPROTO_UDP)
		p.add(bpf.LoadAbsolute{Off: headerLen + ip6Len + 2, Size: 2})
		p.need(clientPort6)
		p.add(bpf.RetConstant{Val: accept})
		return p
	})
}

// datagrams returns a program for a UDP socket that accepts DHCP answers to a MAC address. A filter on such a socket
// sees packets from the UDP header on.
func datagrams(mac []byte) program {
	var p program
	p.answer(mac, func(off, size int) bpf.Instruction { return atFrame(udpHeaderLen+off, size) })
	return p
}
