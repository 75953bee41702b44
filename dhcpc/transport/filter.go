package transport

import (
	"encoding/binary"
	"math"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

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

// answer adds tests that accept only a DHCP answer to a MAC address. load returns an instruction that loads size
// bytes at an offset in the message.
func (p *program) answer(mac []byte, load func(off, size int) bpf.Instruction) {
	p.add(load(opAt, 1))
	p.need(bootReply)
	p.add(load(hwaddrAt, 4))
	p.need(binary.BigEndian.Uint32(mac))
	p.add(load(hwaddrAt+4, 2))
	p.need(uint32(binary.BigEndian.Uint16(mac[4:])))
	p.add(load(cookieAt, 4))
	p.need(cookie)
	p.add(bpf.RetConstant{Val: accept})
}

// incoming returns a program that rejects packets from this machine and packets to other machines. Packets to other
// machines arrive in promiscuous mode. The kernel also counts frames of an unknown VLAN as such.
func incoming() program {
	return program{
		bpf.LoadExtension{Num: bpf.ExtType},
		bpf.JumpIf{Cond: bpf.JumpLessOrEqual, Val: unix.PACKET_MULTICAST, SkipTrue: 1},
		bpf.RetConstant{Val: reject},
	}
}

// incomingFor is like incoming, but also accepts frames to a MAC address that is not the interface's own, which the
// kernel classes as PACKET_OTHERHOST. The socket must be for all protocols, because the kernel removes VLAN tags
// before sockets for a single protocol receive the frame.
func incomingFor(mac []byte) program {
	p := append(ofNoVLAN(), bpf.LoadExtension{Num: bpf.ExtType})
	other := program{}
	other.need(unix.PACKET_OTHERHOST)
	other.add(bpf.LoadAbsolute{Off: 0, Size: 4})
	other.need(binary.BigEndian.Uint32(mac))
	other.add(bpf.LoadAbsolute{Off: 4, Size: 2})
	other.need(uint32(binary.BigEndian.Uint16(mac[4:])))
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

	high, low := bpf.LoadAbsolute{Off: 0, Size: 4}, bpf.LoadAbsolute{Off: 4, Size: 2}
	p.add(high, bpf.JumpIf{Cond: bpf.JumpEqual, Val: math.MaxUint32, SkipTrue: 5})
	p.need(binary.BigEndian.Uint32(mac))
	p.add(low, bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(binary.BigEndian.Uint16(mac[4:])), SkipTrue: 4},
		bpf.RetConstant{Val: reject})
	p.add(low) // the rest of the broadcast address
	p.need(math.MaxUint16)
	return p
}

// vlanID is the mask of the VLAN's number in a tag. The other bits hold the frame's priority.
const vlanID = 0x0fff

// withPriorityTag returns a program for untagged frames and for frames with a tag of VLAN 0 in their data. Such a tag
// makes the Ethernet header longer. So withPriorityTag calls the function takes with each length, and combines the
// two programs.
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
	p.answer(mac, func(off, size int) bpf.Instruction {
		return bpf.LoadAbsolute{Off: uint32(udpHeaderLen + off), Size: size}
	})
	return p
}
