package dhcpc

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// The cast of these tests.
const (
	serverIP = "10.9.0.1"
	rogueIP  = "10.9.0.66"
	clientIP = "10.9.0.7"
	otherIP  = "10.9.0.8"
)

func ownMAC() net.HardwareAddr { return net.HardwareAddr{2, 0, 10, 9, 0, 7} }
func otherMAC() Hex            { return Hex{2, 0, 10, 9, 0, 8} }
func serverMAC() Hex           { return Hex{2, 0, 10, 9, 0, 1} }
func ownID() []byte            { return []byte("\x00pod-7") }
func addr(s string) netip.Addr { return netip.MustParseAddr(s) }
func epoch() time.Time         { return time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC) }
func testConfig() *Config      { return &Config{MAC: ownMAC(), ClientID: ownID(), HostName: "pod-7"} }
func seconds(n int) []byte     { return binary.BigEndian.AppendUint32(nil, uint32(n)) }
func raw4(list ...string) []byte {
	var b []byte
	for _, s := range list {
		b = append(b, addr(s).AsSlice()...)
	}
	return b
}

// bench runs one Session by hand.
type bench struct {
	t    testing.TB
	m    *Machine
	s    Session
	now  time.Time
	out  Output
	sent *dhcpv4.DHCPv4 // the last DHCP message
	to   *Packet        // and its packet
}

func newBench(t testing.TB, change ...func(*Config)) *bench {
	t.Helper()
	cfg := testConfig()
	for _, f := range change {
		f(cfg)
	}
	m := must.Of(NewMachine(cfg)).Get(t)
	b := &bench{t: t, m: m, now: epoch()}
	b.s = m.Start(b.now, 1)
	return b
}

func (b *bench) step(e *Packet) {
	b.t.Helper()
	b.s, b.out = b.m.Step(b.s, b.now, e)
	if p := b.out.Send; p != nil && p.ARP == nil {
		d := must.Of(dhcpv4.FromBytes(p.Payload)).Get(b.t, "sent what is no message")
		b.sent, b.to = d, p
	}
}

func (b *bench) tick() {
	b.t.Helper()
	if b.s.Wake().IsZero() {
		b.t.Fatalf("%s: no wake-up time", b.s.state)
	}
	if b.s.Wake().After(b.now) {
		b.now = b.s.Wake()
	}
	b.step(nil)
}

func (b *bench) at(t time.Time) {
	b.t.Helper()
	b.now = t
	b.step(nil)
}

func (b *bench) want(state state) {
	b.t.Helper()
	if b.s.state != state {
		b.t.Fatalf("state is %s, want %s; heard %v", b.s.state, state, b.s.trace.Heard)
	}
}

func (b *bench) wantSent(kind dhcpv4.MessageType) {
	b.t.Helper()
	must.That(b.t, b.out.Send != nil && b.out.Send.ARP == nil && b.sent.MessageType() == kind,
		"sent %v, want a %s", b.out.Send, kind)
}

func (b *bench) wantNothingSent() {
	b.t.Helper()
	must.That(b.t, b.out.Send == nil, "sent %v, want nothing", b.sent)
}

// change changes an answer.
type change func(*dhcpv4.DHCPv4)

func set(code uint8, value []byte) change { return func(d *dhcpv4.DHCPv4) { d.Options[code] = value } }
func without(code uint8) change           { return func(d *dhcpv4.DHCPv4) { delete(d.Options, code) } }
func yiaddr(s string) change              { return func(d *dhcpv4.DHCPv4) { d.YourIPAddr = addr(s).AsSlice() } }
func from(s string) change                { return set(54, raw4(s)) }

// answer makes an answer to the last message, of a server with nothing odd about it.
func answer(to *dhcpv4.DHCPv4, kind dhcpv4.MessageType, changes ...change) *Packet {
	d := &dhcpv4.DHCPv4{
		OpCode: dhcpv4.OpcodeBootReply, HWType: to.HWType, TransactionID: to.TransactionID, ClientHWAddr: to.ClientHWAddr,
		ClientIPAddr: net.IPv4zero, YourIPAddr: addr(clientIP).AsSlice(), ServerIPAddr: net.IPv4zero, GatewayIPAddr: net.IPv4zero,
		Options: dhcpv4.Options{},
	}
	d.UpdateOption(dhcpv4.OptMessageType(kind))
	set(54, raw4(serverIP))(d)
	if kind == dhcpv4.MessageTypeNak {
		d.YourIPAddr = net.IPv4zero
	} else {
		set(1, raw4("255.255.255.0"))(d)
		set(3, raw4(serverIP))(d)
		set(51, seconds(3600))(d)
	}
	for _, c := range changes {
		c(d)
	}
	source := addr(serverIP)
	if v := d.Options[54]; len(v) == 4 {
		source = netip.AddrFrom4([4]byte(v))
	}
	return &Packet{
		Src: netip.AddrPortFrom(source, dhcpv4.ServerPort), Dst: netip.AddrPortFrom(addr("255.255.255.255"), dhcpv4.ClientPort),
		SrcMAC: serverMAC(), Payload: d.ToBytes(),
	}
}

func (b *bench) hear(kind dhcpv4.MessageType, changes ...change) {
	b.t.Helper()
	b.step(answer(b.sent, kind, changes...))
}

// requesting brings the session to REQUESTING, and bound to BOUND.
func (b *bench) requesting(offer ...change) *bench {
	b.t.Helper()
	b.tick()
	b.hear(dhcpv4.MessageTypeOffer, offer...)
	b.want(requesting)
	return b
}

func (b *bench) bound(ack ...change) *bench {
	b.t.Helper()
	b.requesting()
	b.hear(dhcpv4.MessageTypeAck, ack...)
	b.want(bound)
	return b
}

// option fails the test unless the last message has an option of a value; nil: has it
// not.
func (b *bench) option(code uint8, want []byte) {
	b.t.Helper()
	got, ok := b.sent.Options[code]
	if ok != (want != nil) || !bytes.Equal(got, want) {
		b.t.Errorf("%s has %x in option %d, want %x", b.sent.MessageType(), got, code, want)
	}
}

// testLease is a lease of an hour, granted at the epoch.
func testLease() *Lease {
	return &Lease{
		Address: netip.PrefixFrom(addr(clientIP), 24), Server: addr(serverIP), ServerMAC: serverMAC(),
		MAC: Hex(ownMAC()), ClientID: ownID(),
		Obtained: epoch(), Renew: epoch().Add(30 * time.Minute), Rebind: epoch().Add(3150 * time.Second), Expire: epoch().Add(time.Hour),
	}
}
