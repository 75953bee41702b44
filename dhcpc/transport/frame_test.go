package transport

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/bpf"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func ownMAC() dhcpc.Hex { return dhcpc.Hex{2, 0, 10, 9, 0, 7} }

// reply is a DHCP answer, as far as filters look at it.
func reply() *dhcpc.Packet {
	payload := make([]byte, 244)
	payload[0] = bootReply
	copy(payload[hwaddrAt:], ownMAC())
	binary.BigEndian.PutUint32(payload[cookieAt:], cookie)
	copy(payload[240:], []byte{53, 1, 2, 255})
	return &dhcpc.Packet{
		Src: netip.MustParseAddrPort("10.9.0.1:67"), Dst: netip.MustParseAddrPort("255.255.255.255:68"),
		SrcMAC: dhcpc.Hex{2, 0, 10, 9, 0, 1}, DstMAC: broadcastMAC(), Payload: payload,
	}
}

func probe() *dhcpc.Packet {
	return &dhcpc.Packet{
		SrcMAC: ownMAC(), DstMAC: broadcastMAC(),
		ARP: &dhcpc.ARP{Reply: true, SenderMAC: ownMAC(), SenderIP: netip.MustParseAddr("10.9.0.7"), TargetMAC: make(dhcpc.Hex, 6), TargetIP: netip.IPv4Unspecified()},
	}
}

func frameOf(t testing.TB, p *dhcpc.Packet) []byte {
	t.Helper()
	return must.Of(encode(p, nil)).Get(t)
}

func TestFramesAreReadAsTheyWereWritten(t *testing.T) {
	t.Parallel()
	odd := reply()
	odd.Payload = append(odd.Payload, 1)
	for _, p := range []*dhcpc.Packet{reply(), odd, probe()} {
		got, err := decode(frameOf(t, p))
		must.Succeed(t, err)
		diff := cmp.Diff(p, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }))
		expect.That(t, diff == "", "written and read (-want +got):\n%s", diff)
	}
}

func TestPacketsThatCannotBeFrames(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*dhcpc.Packet){
		"no source MAC":       func(p *dhcpc.Packet) { p.SrcMAC = nil },
		"a MAC of 5 bytes":    func(p *dhcpc.Packet) { p.DstMAC = p.DstMAC[:5] },
		"no source":           func(p *dhcpc.Packet) { p.Src = netip.AddrPort{} },
		"IPv6":                func(p *dhcpc.Packet) { p.Dst = netip.MustParseAddrPort("[::1]:67") },
		"too long":            func(p *dhcpc.Packet) { p.Payload = make([]byte, 65508) },
		"ARP without address": func(p *dhcpc.Packet) { p.ARP = &dhcpc.ARP{SenderMAC: ownMAC()} },
	} {
		p := reply()
		change(p)
		frame, err := encode(p, nil)
		expect.That(t, err != nil, "%s: %x", name, frame)
	}
}

func sumAnew(f []byte) {
	header := f[etherLen : etherLen+int(f[etherLen]&15)*4]
	header[10], header[11] = 0, 0
	binary.BigEndian.PutUint16(header[10:], ^sum(0, header))
}

// frameChanges are what networks do to frames. Those that are taken are still answers.
func frameChanges() []struct {
	name    string
	change  func(f []byte) []byte
	decoded bool // by decode
	passed  bool // by the filter, which does not look at lengths and the header's sum
} {
	type row = struct {
		name            string
		change          func(f []byte) []byte
		decoded, passed bool
	}
	at := func(i int, b ...byte) func([]byte) []byte {
		return func(f []byte) []byte { copy(f[i:], b); sumAnew(f); return f }
	}
	const udp, message = etherLen + ipLen, etherLen + ipLen + udpHeaderLen
	return []row{
		{"none", func(f []byte) []byte { return f }, true, true},
		{"trailing padding", func(f []byte) []byte { return append(f, make([]byte, 30)...) }, true, true},
		{"a tag of VLAN 0", func(f []byte) []byte { return tagged(f, 5<<13) }, true, true},
		{"a tag of VLAN 7", func(f []byte) []byte { return tagged(f, 7) }, false, false},
		{"a tag cut short", func(f []byte) []byte { return tagged(f, 0)[:etherLen+2] }, false, false},
		{"IP options", func(f []byte) []byte {
			f = slices.Insert(f, etherLen+ipLen, 1, 1, 1, 0)
			f[etherLen] = 0x46
			binary.BigEndian.PutUint16(f[etherLen+2:], binary.BigEndian.Uint16(f[etherLen+2:])+4)
			sumAnew(f)
			return f
		}, true, true},
		{"no UDP checksum", at(udp+6, 0, 0), true, true},
		{"another source port", func(f []byte) []byte { f[udp], f[udp+6], f[udp+7] = 0x12, 0, 0; return f }, true, true},
		{"a UDP checksum that is not computed yet", at(udp+6, 0x12, 0x34), true, true},
		{"a wrong IP checksum", func(f []byte) []byte { f[etherLen+10]++; return f }, false, true},
		{"cut short", func(f []byte) []byte { return f[:len(f)-3] }, false, true},
		{"a UDP length over the packet", at(udp+4, 0xff, 0), false, true},
		{"a UDP length of 7", at(udp+4, 0, 7), false, true},
		{"an IP header of 16", func(f []byte) []byte { f[etherLen] = 0x44; return f }, false, false},
		{"IP version 6", at(etherLen, 0x65), false, true},
		{"the first fragment", at(etherLen+6, 0x20, 0), false, false},
		{"a later fragment", at(etherLen+6, 0, 100), false, false},
		{"TCP", at(etherLen+9, 6), false, false},
		{"to the server's port", at(udp+2, 0, 67), false, false},
		{"another protocol", at(12, 0x86, 0xdd), false, false},
		{"a request", func(f []byte) []byte { f[message], f[udp+6], f[udp+7] = 1, 0, 0; return f }, true, false},
		{"for another", func(f []byte) []byte { f[message+hwaddrAt+5], f[udp+6], f[udp+7] = 9, 0, 0; return f }, true, false},
		{"for one whose first bytes differ", func(f []byte) []byte { f[message+hwaddrAt], f[udp+6], f[udp+7] = 9, 0, 0; return f }, true, false},
		{"no DHCP", func(f []byte) []byte { f[message+cookieAt], f[udp+6], f[udp+7] = 9, 0, 0; return f }, true, false},
		{"an Ethernet header", func(f []byte) []byte { return f[:etherLen] }, false, false},
		{"nothing", func([]byte) []byte { return nil }, false, false},
	}
}

func TestFramesFromNetworks(t *testing.T) {
	t.Parallel()
	for _, tt := range frameChanges() {
		f := tt.change(frameOf(t, reply()))
		p, err := decode(f)
		if (err == nil) != tt.decoded || err != nil && !errors.Is(err, errNotOurs) {
			t.Errorf("%s: read %v, %v", tt.name, p, err)
		}
	}
}

func TestFilterOfFrames(t *testing.T) {
	t.Parallel()
	for _, arp := range []bool{false, true} {
		vm := must.Of(bpf.NewVM(frames(ownMAC(), arp))).Get(t)
		pass := func(f []byte) bool {
			n := must.Of(vm.Run(f)).Get(t)
			return n > 0
		}
		for _, tt := range frameChanges() {
			expect.Equal(t, pass(tt.change(frameOf(t, reply()))), tt.passed, "%s: passed", tt.name)
		}
		expect.Equal(t, pass(frameOf(t, probe())), arp, "ARP: passed")
		expect.Equal(t, pass(tagged(frameOf(t, probe()), 5<<13)), arp, "ARP with a tag of VLAN 0: passed")
	}
}

func TestFilterOfDatagrams(t *testing.T) {
	t.Parallel()
	vm := must.Of(bpf.NewVM(datagrams(ownMAC()))).Get(t)
	for _, tt := range frameChanges() {
		f := tt.change(frameOf(t, reply()))
		// Only what concerns the message: the kernel sees to the rest.
		if len(f) < etherLen+ipLen || f[etherLen] != 0x45 || !strings.Contains("none, trailing padding, a request, for another, for one whose first bytes differ, no DHCP", tt.name) {
			continue
		}
		n, err := vm.Run(f[etherLen+ipLen:])
		expect.That(t, err == nil && (n > 0) == tt.passed, "%s: passed %d, %v", tt.name, n, err)
	}
}

func TestBadARP(t *testing.T) {
	t.Parallel()
	good := frameOf(t, probe())
	for i, b := range map[int]byte{14: 1, 15: 6, 16: 9, 18: 8, 19: 16, 21: 3} {
		f := slices.Clone(good)
		f[i] = b
		p, err := decode(f)
		expect.That(t, errors.Is(err, errNotOurs), "byte %d is %d: read %v, %v", i, b, p.ARP, err)
	}
	expect.Is(t, expect.Err(decode(good[:len(good)-1])), errNotOurs, "cut short")
}

// FuzzFrame reads what may have come from a wire. What is read can be written, and is
// then read as the same.
func FuzzFrame(f *testing.F) {
	f.Fuzz(func(t *testing.T, frame []byte) {
		given := slices.Clone(frame)
		p, err := decode(frame)
		must.That(t, slices.Equal(given, frame), "changed what it was given")
		if err != nil {
			must.That(t, errors.Is(err, errNotOurs), "%v", err)
			return
		}
		written, err := encode(p, nil)
		must.Succeed(t, err)
		again, err := decode(written)
		must.Succeed(t, err)
		diff := cmp.Diff(p, again, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }))
		expect.That(t, diff == "", "read and written (-first +again):\n%s", diff)
	})
}
