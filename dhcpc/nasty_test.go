package dhcpc

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

// Servers are wrong in ways that have names. Each of these still gets its client a
// lease that works, or at least does not keep another server from giving one.

func TestServersWithOddOptions(t *testing.T) {
	t.Parallel()
	const minute, hour = time.Minute, time.Hour
	for _, tt := range []struct {
		name        string
		ack         []change
		prefix      string
		t1, t2, end time.Duration
		routes      string
		ignored     string // what is said about it
	}{
		{name: "nothing odd", prefix: "10.9.0.7/24", t1: 30 * minute, t2: 3150 * time.Second, end: hour, routes: "0.0.0.0/0 via 10.9.0.1"},
		{name: "no lease time", ack: []change{without(51)}, t1: 30 * minute, t2: 3150 * time.Second, end: hour, ignored: "no lease time: 1h0m0s assumed"},
		{name: "a lease time of 3 bytes", ack: []change{set(51, []byte{0, 0, 9})}, t1: 30 * minute, t2: 3150 * time.Second, end: hour, ignored: "option 51: 3 bytes, want 4"},
		{name: "no mask", ack: []change{without(1)}, prefix: "10.9.0.7/8", end: hour, ignored: "no subnet mask: /8 assumed"},
		{name: "a mask with a hole", ack: []change{set(1, raw4("255.0.255.0"))}, prefix: "10.9.0.7/8", end: hour, ignored: "option 1: ff:00:ff:00 is no subnet mask"},
		{name: "a mask of half of all addresses", ack: []change{set(1, raw4("128.0.0.0"))}, prefix: "10.9.0.7/8", end: hour, ignored: "option 1: 80:00:00:00 is no subnet mask"},
		{name: "a mask of two class A networks", ack: []change{set(1, raw4("254.0.0.0"))}, prefix: "10.9.0.7/8", end: hour, ignored: "is no subnet mask"},
		{name: "a mask of zeros", ack: []change{set(1, raw4("0.0.0.0"))}, prefix: "10.9.0.7/8", end: hour, ignored: "is no subnet mask"},
		{name: "T1 over T2 over the lease", ack: []change{set(58, seconds(9000)), set(59, seconds(8000))}, t1: 30 * minute, t2: 3150 * time.Second, end: hour, ignored: "T2 of 2h13m20s in a lease of 1h0m0s"},
		{name: "T2 at the lease's end", ack: []change{set(59, seconds(3600))}, t1: 30 * minute, t2: 3150 * time.Second, end: hour, ignored: "T2 of 1h0m0s in a lease of 1h0m0s"},
		{name: "T1 at T2", ack: []change{set(58, seconds(2400)), set(59, seconds(2400))}, t1: 22*minute + 51*time.Second, t2: 40 * minute, end: hour, ignored: "T1 of 40m0s with T2 of 40m0s"},
		{name: "T1 over T2", ack: []change{set(58, seconds(3000)), set(59, seconds(2400))}, t1: 22*minute + 51*time.Second, t2: 40 * minute, end: hour, ignored: "T1 of 50m0s with T2 of 40m0s"},
		{name: "T1 and T2 of zero", ack: []change{set(58, seconds(0)), set(59, seconds(0))}, t1: 30 * minute, t2: 3150 * time.Second, end: hour, ignored: "T1 of 0s"},
		{name: "T1 and T2 for ever", ack: []change{set(58, seconds(-1)), set(59, seconds(-1))}, t1: 30 * minute, t2: 3150 * time.Second, end: hour},
		{name: "T1 and T2 of its choice", ack: []change{set(58, seconds(60)), set(59, seconds(120))}, t1: minute, t2: 2 * minute, end: hour},
		{name: "a lease of 1 s", ack: []change{set(51, seconds(1))}, t1: 5 * time.Second, t2: 8750 * time.Millisecond, end: 10 * time.Second, ignored: "option 51: a lease of 1s: 10s assumed"},
		{name: "T1 and T2 of 1 s", ack: []change{set(58, seconds(1)), set(59, seconds(1))}, t1: 30 * minute, t2: 3150 * time.Second, end: hour, ignored: "T1 of 1s"},
		{name: "T1 of 1 s", ack: []change{set(58, seconds(1)), set(59, seconds(2400))}, t1: 22*minute + 51*time.Second, t2: 40 * minute, end: hour, ignored: "T1 of 1s with T2 of 40m0s"},
		{name: "T1 and T2 that may be", ack: []change{set(58, seconds(2)), set(59, seconds(4))}, t1: 2 * time.Second, t2: 4 * time.Second, end: hour},
		{name: "a lease of 136 years", ack: []change{set(51, seconds(0xfffffffe))}, t1: 0xfffffffe * time.Second / 2, end: 0xfffffffe * time.Second},
		{name: "classless routes cut short", ack: []change{set(121, []byte{24, 10, 8, 0, 10, 9, 0})}, end: hour, routes: "0.0.0.0/0 via 10.9.0.1", ignored: "option 121: cut short after 0 routes"},
		{name: "classless routes with 33 bits", ack: []change{set(121, append([]byte{33, 10, 8, 0, 0, 0}, raw4(serverIP)...))}, end: hour, routes: "0.0.0.0/0 via 10.9.0.1", ignored: "option 121: a destination of 33 bits"},
		{name: "trailing padding", ack: []change{set(0xfa, nil)}, end: hour},
		{name: "routers that are none", ack: []change{set(3, raw4("0.0.0.0", "224.0.0.1", serverIP))}, end: hour, routes: "0.0.0.0/0 via 10.9.0.1", ignored: "option 3: 224.0.0.1 is no host's address"},
		{name: "half a router", ack: []change{set(3, append(raw4(serverIP), 10, 9))}, end: hour, routes: "0.0.0.0/0 via 10.9.0.1", ignored: "option 3: 6 bytes are no list of addresses"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t).requesting()
			b.hear(ack, tt.ack...)
			b.want(bound)
			l := b.out.Bound
			expect.That(t, tt.prefix == "" || l.Address.String() == tt.prefix,
				"address %s, want %s", l.Address, tt.prefix)
			for _, at := range []struct {
				got  time.Time
				want time.Duration
			}{{l.Renew, tt.t1}, {l.Rebind, tt.t2}, {l.Expire, tt.end}} {
				if got := at.got.Sub(l.Obtained).Truncate(time.Millisecond); at.want != 0 && got.Round(time.Second) != at.want.Round(time.Second) && got != at.want {
					t.Errorf("time %s, want %s", got, at.want)
				}
			}
			if tt.routes != "" && routeText(l.Routes) != tt.routes {
				t.Errorf("routes %s, want %s", routeText(l.Routes), tt.routes)
			}
			if got := strings.Join(l.Ignored, "; "); !strings.Contains(got, tt.ignored) || tt.ignored == "" && tt.name == "nothing odd" && got != "" {
				t.Errorf("ignored %q, want %q", got, tt.ignored)
			}
			expect.Success(t, l.Validate())
		})
	}
}

func routeText(list []Route) string {
	var text []string
	for _, r := range list {
		text = append(text, r.String())
	}
	return strings.Join(text, ", ")
}

func TestOffersThatNobodyCouldUse(t *testing.T) {
	t.Parallel()
	for name, changes := range map[string][]change{
		"a lease of 0 s":           {set(51, seconds(0))},
		"no address":               {yiaddr("0.0.0.0")},
		"a multicast address":      {yiaddr("224.0.0.5")},
		"the broadcast address":    {yiaddr("255.255.255.255")},
		"loopback":                 {yiaddr("127.0.0.1")},
		"server identifier 0":      {from("0.0.0.0")},
		"no type":                  {without(53)},
		"a type of 2 bytes":        {set(53, []byte{2, 2})},
		"a client's message":       {func(d *dhcpv4.DHCPv4) { d.OpCode = dhcpv4.OpcodeBootRequest }},
		"a foreign chaddr":         {func(d *dhcpv4.DHCPv4) { d.ClientHWAddr = []byte(otherMAC()) }},
		"a chaddr too short":       {func(d *dhcpv4.DHCPv4) { d.ClientHWAddr = ownMAC()[:5] }},
		"a chaddr too long":        {func(d *dhcpv4.DHCPv4) { d.ClientHWAddr = append(ownMAC(), 0) }},
		"another kind of hardware": {func(d *dhcpv4.DHCPv4) { d.HWType = 6 }},
		"a foreign xid":            {func(d *dhcpv4.DHCPv4) { d.TransactionID[3]++ }},
		"a foreign client id":      {set(61, []byte("\x00pod-8"))},
	} {
		b := newBench(t)
		b.tick()
		b.hear(offer, changes...)
		if b.s.state != selecting || b.out.Send != nil {
			t.Errorf("%s: %s, sent %v", name, b.s.state, b.out.Send)
			continue
		}
		expect.Equal(t, len(b.s.trace.Heard), 1, "%s: heard %v, want a word about it", name, b.s.trace.Heard)
		b.hear(offer, from(rogueIP)) // another server
		b.want(requesting)
	}
}

func TestServerThatEchoesTheClientIdentifier(t *testing.T) { // RFC 6842
	t.Parallel()
	b := newBench(t)
	b.requesting(set(61, ownID()))
	b.hear(ack, set(61, ownID()))
	b.want(bound)
}

func TestTwoServersOfWhichOneRefusesEverything(t *testing.T) {
	t.Parallel()
	t.Run("what was asked of the other", func(t *testing.T) {
		b := newBench(t).requesting()
		b.hear(nak, from(rogueIP))
		b.want(requesting)
		b.hear(nak, without(54)) // its source says that it is the one that was asked
		b.want(initial)
	})
	t.Run("without saying who it is", func(t *testing.T) {
		b := newBench(t).requesting()
		p := answer(b.sent, nak, without(54))
		p.Src = netip.AddrPortFrom(addr(rogueIP), dhcpv4.ServerPort)
		b.step(p)
		b.want(requesting)
	})
	t.Run("and it is the first to offer", func(t *testing.T) {
		b := newBench(t)
		b.requesting(from(rogueIP), yiaddr(otherIP))
		b.hear(nak, from(rogueIP))
		b.want(initial)
		b.tick()
		b.hear(offer, from(rogueIP), yiaddr(otherIP))
		b.want(selecting)
		b.hear(offer)
		b.want(requesting)
		b.hear(ack)
		b.want(bound)
	})
	t.Run("and it is the only one to offer", func(t *testing.T) {
		b := newBench(t)
		b.requesting(from(rogueIP))
		b.hear(nak, from(rogueIP))
		b.tick()
		b.hear(offer, from(rogueIP))
		b.want(selecting)
		expect.Equal(t, b.s.wake.Sub(b.now), betterOffer, "holds the OFFER back for")
		b.tick()
		b.want(requesting)
	})
	t.Run("of a renewal", func(t *testing.T) {
		b := newBench(t).bound()
		b.tick()
		b.hear(nak, from(rogueIP))
		b.want(renewing)
	})
}

func TestOfferThenSilence(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.requesting(from(rogueIP))
	for b.s.state == requesting {
		b.tick()
	}
	waited := b.now.Sub(epoch())
	expect.That(t, waited <= 15*time.Second, "gave up on the server after %s", waited)
	b.hear(offer, from(rogueIP))
	b.hear(offer)
	b.want(requesting)
	b.option(54, raw4(serverIP))
	expect.Contains(t, b.s.trace.Heard.String(), "2 OFFERs of 10.9.0.7 from 10.9.0.66", "heard")
}

func TestAckOfAnotherAddress(t *testing.T) {
	t.Parallel()
	b := newBench(t).requesting()
	b.hear(ack, yiaddr(otherIP))
	b.want(requesting)
	b.hear(ack)
	b.want(bound)
	b.tick()
	b.hear(ack, yiaddr(otherIP))
	b.want(renewing)
	b.hear(ack)
	b.want(bound)
}

// udhcpc takes each of these.
func TestAnswersThatAPlainClientBelieves(t *testing.T) {
	t.Parallel()
	withoutID := func(c *Config) { c.ClientID = nil }
	for name, tt := range map[string]struct {
		offer, ack change
		config     func(*Config)
		server     string
	}{
		"no server identifier":             {without(54), without(54), func(*Config) {}, serverIP},
		"a server identifier cut short":    {set(54, []byte{10, 9}), set(54, []byte{10, 9}), func(*Config) {}, serverIP},
		"the ACK of another server":        {from(serverIP), from(rogueIP), func(*Config) {}, rogueIP},
		"an identifier that nobody sent":   {set(61, ownID()), set(61, ownID()), withoutID, serverIP},
		"a server that is to be accepted":  {from(serverIP), from(serverIP), func(c *Config) { c.Servers = []netip.Addr{addr(serverIP)} }, serverIP},
		"the source of a server to accept": {without(54), without(54), func(c *Config) { c.Servers = []netip.Addr{addr(serverIP)} }, serverIP},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, tt.config).requesting(tt.offer)
			b.hear(ack, tt.ack)
			b.want(bound)
			expect.Equal(t, b.s.Lease().Server, addr(tt.server), "server")
			b.tick()
			b.hear(ack, from(otherIP)) // it shares leases with the first
			expect.Equal(t, b.s.state == bound, len(b.m.cfg.Servers) == 0, "bound again")
		})
	}
}

func TestTwoServersAreNamed(t *testing.T) {
	t.Parallel()
	b := newBench(t).requesting()
	b.hear(offer, from(rogueIP), yiaddr(otherIP))
	b.hear(ack)
	expect.Equal(t, fmt.Sprint(b.s.Lease().Others), "[10.9.0.66]", "others")
	b.tick()
	b.hear(ack)
	expect.Equal(t, fmt.Sprint(b.s.Lease().Others), "[10.9.0.66]", "others after a renewal")
}

func TestOnlyServersToAcceptAreBelieved(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.Servers = []netip.Addr{addr(serverIP)} })
	b.tick()
	b.hear(offer, from(rogueIP), yiaddr(otherIP))
	b.want(selecting)
	const why = "OFFER of 10.9.0.8 from 10.9.0.66: not a server to accept, which are [10.9.0.1]"
	expect.Equal(t, b.out.Unbelieved, why, "unbelieved")
	b.hear(offer)
	b.hear(ack)
	b.want(bound)
	expect.Equal(t, strings.Join(b.s.Lease().Ignored, "; "), why, "ignored")
	expect.Equal(t, len(b.s.Lease().Others), 0, "others")
}

// A server takes its time for each answer, as long as the client's timeout allows.
func TestASlowServer(t *testing.T) {
	t.Parallel()
	for _, slow := range []time.Duration{5 * time.Second, 14 * time.Second, 40 * time.Second} {
		b := newBench(t)
		type late struct {
			at time.Time
			p  *Packet
		}
		var queue []late
		for b.s.state != bound && b.now.Sub(epoch()) < 3*slow {
			if len(queue) > 0 && !queue[0].at.After(b.s.Wake()) {
				b.now = queue[0].at
				p := queue[0].p
				queue = queue[1:]
				b.step(p)
			} else {
				b.tick()
			}
			if b.out.Send != nil {
				kind := map[dhcpv4.MessageType]dhcpv4.MessageType{discover: offer, request: ack}[b.sent.MessageType()]
				queue = append(queue, late{b.now.Add(slow), answer(b.sent, kind)})
			}
		}
		b.want(bound)
		expect.That(t, b.now.Sub(epoch()) <= 2*slow+2*time.Second, "a server that takes %s gives a lease after %s", slow, b.now.Sub(epoch()))
	}
}

func TestAckWithoutServerIdentifier(t *testing.T) {
	t.Parallel()
	b := newBench(t).requesting()
	b.hear(ack, without(54)) // the source names the server
	b.want(bound)
	for range 2 {
		b.tick()
		b.want(renewing)
		p := answer(b.sent, ack, without(54))
		p.Src, p.SrcMAC = netip.AddrPort{}, nil // a transport that knows little
		b.step(p)
		b.want(bound)
		if l := b.out.Bound; l.Server != addr(serverIP) || l.ServerMAC.String() != serverMAC().String() {
			t.Errorf("the lease is of %s at %s, want those of before", l.Server, l.ServerMAC)
		}
	}
}

func TestServerOfSeveralAddresses(t *testing.T) {
	t.Parallel()
	b := newBench(t).bound()
	b.tick()
	p := answer(b.sent, ack, from(otherIP))
	p.Src = netip.AddrPortFrom(addr(serverIP), dhcpv4.ServerPort) // the one that was asked
	b.step(p)
	b.want(bound)
	got := b.out.Bound.Server
	expect.That(t, got == addr(otherIP), "the lease is of %s, want what the server calls itself", got)
}

func TestAnswersHoweverTheyCome(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*Packet){
		"broadcast":                     func(*Packet) {},
		"unicast":                       func(p *Packet) { p.Dst = netip.AddrPortFrom(addr(clientIP), dhcpv4.ClientPort) },
		"from another port":             func(p *Packet) { p.Src = netip.AddrPortFrom(addr(serverIP), 4711) },
		"from a relay":                  func(p *Packet) { p.Src = netip.AddrPortFrom(addr(otherIP), 67) },
		"padded":                        func(p *Packet) { p.Payload = append(p.Payload, make([]byte, 300)...) },
		"with rubbish behind the end":   func(p *Packet) { p.Payload = append(p.Payload, 0xfe, 200, 1) },
		"without an end":                func(p *Packet) { p.Payload = cutEnd(p.Payload) },
		"of 1500 bytes":                 func(p *Packet) { p.Payload = append(cutEnd(p.Payload), filler(1472-len(cutEnd(p.Payload)))...) },
		"with a second, equal identity": func(p *Packet) { p.Payload = append(cutEnd(p.Payload), 61, 6, 0, 'p', 'o', 'd', '-', '7', 255) },
	} {
		b := newBench(t)
		b.tick()
		for _, kind := range []dhcpv4.MessageType{offer, ack} {
			p := answer(b.sent, kind)
			change(p)
			b.step(p)
		}
		if b.s.state != bound {
			t.Errorf("%s: %s; heard %v", name, b.s.state, b.s.trace.Heard)
		}
	}
}

// cutEnd takes the End option off, and the padding after it.
func cutEnd(payload []byte) []byte {
	for i := len(payload) - 1; ; i-- {
		if payload[i] == 255 {
			return slices.Clone(payload[:i])
		}
	}
}

// filler is n bytes of options that nobody knows.
func filler(n int) []byte {
	var b []byte
	for n > 257 {
		b, n = append(append(b, 224, 255), make([]byte, 255)...), n-257
	}
	b = append(append(b, 225, byte(n-3)), make([]byte, n-3)...)
	return append(b, 255)
}

func TestOptionsInTheWrongFields(t *testing.T) { // RFC 2132, option 52, and RFC 3396
	t.Parallel()
	search := []byte("\x07example\x03com\x00\x03lan\x00")
	b := newBench(t).requesting()
	p := answer(b.sent, ack, set(52, []byte{3}), set(119, search[:4]))
	copy(p.Payload[fileAt:], append(append([]byte{119, 6}, search[4:10]...), 6, 4, 10, 9, 0, 53, 255))
	copy(p.Payload[snameAt:], append(append([]byte{0, 119, byte(len(search) - 10)}, search[10:]...), 28, 4, 10, 9, 0, 255))
	b.step(p)
	b.want(bound)
	l := b.out.Bound
	expect.NoDiff(t, cmp.Diff([]string{"example.com", "lan"}, l.Search), "search list")
	if diff := cmp.Diff([]netip.Addr{addr("10.9.0.53"), addr("10.9.0.255")}, append(l.DNS, l.Broadcast), cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Errorf("DNS and broadcast address (-want +got):\n%s", diff)
	}
}

func TestOptionsInTheWrongFieldsThatAreDamaged(t *testing.T) {
	t.Parallel()
	for overload, at := range map[byte]int{1: fileAt, 2: snameAt} {
		b := newBench(t).requesting()
		p := answer(b.sent, ack, set(52, []byte{overload}))
		copy(p.Payload[at:], []byte{6, 255})
		b.step(p)
		b.want(bound)
		expect.Equal(t, strings.Join(b.out.Bound.Ignored, "; "), "option 6: cut short at the end of its field", "ignored")

		b = newBench(t).requesting()
		b.hear(ack, set(52, []byte{overload, 1})) // which names no field
		b.want(bound)
	}
}

// Servers that are configured to send what they send by themselves do so twice. Parts of one option (RFC 3396) are
// another thing.
func TestOptionsThatComeTwiceOrInPartsOrCutShort(t *testing.T) {
	t.Parallel()
	hour := seconds(3600)
	for _, tt := range []struct {
		name    string
		more    []byte // options behind the usual ones
		without []uint8
		ignored string
	}{
		{name: "type", more: []byte{53, 1, 5}},
		{name: "server identifier", more: append([]byte{54, 4}, raw4(serverIP)...)},
		{name: "lease time", more: append([]byte{51, 4}, hour...)},
		{name: "mask", more: append([]byte{1, 4}, raw4("255.255.255.0")...)},
		{name: "T1", more: append(append([]byte{58, 4}, seconds(1800)...), append([]byte{58, 4}, seconds(1800)...)...)},
		{name: "MTU", more: []byte{26, 2, 5, 120, 26, 2, 5, 120}},
		{name: "broadcast address", more: []byte{28, 4, 10, 9, 0, 255, 28, 4, 10, 9, 0, 255}},
		{name: "an option that is only asked for", more: []byte{108, 4, 0, 0, 1, 44, 108, 4, 0, 0, 1, 44}},
		{name: "a lease time, and then half of one", more: []byte{51, 2, 0, 0},
			ignored: "option 51: sent twice, as 00:00:0e:10 and 00:00: the first is taken"},
		{name: "most of a lease time, and then a whole one", more: append([]byte{51, 3, 0, 0, 14, 51, 4}, hour...),
			without: []uint8{51}, ignored: "option 51: sent in a wrong size before 00:00:0e:10"},
		{name: "another lease time", more: append([]byte{51, 4}, seconds(60)...),
			ignored: "option 51: sent twice, as 00:00:0e:10 and 00:00:00:3c: the first is taken"},
		{name: "a mask in parts", more: []byte{1, 2, 255, 255, 1, 2, 255, 0}, without: []uint8{1}},
		{name: "a server identifier of three bytes", more: []byte{54, 3, 10, 9, 0}, without: []uint8{54},
			ignored: `option 54: "0a:09:00" is no server's address`},
		{name: "an overload of no field", more: []byte{52, 1, 4}, ignored: `option 52: "04" is none of 1, 2 and 3`},
		{name: "an overload of two bytes", more: []byte{52, 2, 1, 1}, ignored: `option 52: "01:01" is none of 1, 2 and 3`},
		{name: "an option cut short", more: []byte{12, 9, 'p'}, ignored: "option 12: cut short at the end of its field"},
		{name: "an option without its length", more: []byte{12}, ignored: "option 12: cut short at the end of its field"},
	} {
		b := newBench(t, func(c *Config) { c.Request = []uint8{108} }).requesting()
		var changes []change
		for _, code := range tt.without {
			changes = append(changes, without(code))
		}
		p := answer(b.sent, ack, changes...)
		p.Payload = append(cutEnd(p.Payload), tt.more...)
		b.step(p)
		if b.s.state != bound {
			t.Errorf("%s: %s; heard %v", tt.name, b.s.state, b.s.trace.Heard)
			continue
		}
		l := b.out.Bound
		got := l.Address.String() + " " + l.Expire.Sub(l.Obtained).String() + " " + l.Server.String()
		expect.Equal(t, got, clientIP+"/24 1h0m0s "+serverIP, "%s: lease", tt.name)
		expect.Equal(t, strings.Join(l.Ignored, "; "), tt.ignored, "%s: ignored", tt.name)
		expect.That(t, len(l.Options[108]) == 4 || l.Options == nil, "%s: options %v", tt.name, l.Options)
	}
}

func TestWhatIsNoAnswerIsIgnored(t *testing.T) {
	t.Parallel()
	b := newBench(t).bound()
	held := b.s.Lease()
	for _, kind := range []dhcpv4.MessageType{9 /* FORCERENEW */, offer, ack, nak, request, 18} {
		b.hear(kind)
		b.want(bound)
	}
	b.step(&Packet{Payload: []byte("not DHCP")})
	b.step(&Packet{})
	b.want(bound)
	if b.s.Lease() != held || b.out.Send != nil {
		t.Errorf("holds %+v, sent %v", b.s.Lease(), b.out.Send)
	}
}

func TestALeaseOfOneSecondDoesNotSpin(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.bound(set(51, seconds(1)))
	sent := 0
	for b.now.Sub(epoch()) < time.Minute {
		b.tick()
		if b.out.Send != nil {
			sent++
			b.want(renewing)
			b.hear(ack, set(51, seconds(1)))
		}
	}
	expect.That(t, sent >= 9 && sent <= 13, "%d renewals in a minute, want one each 5 s", sent)
}

func TestAnAnswerToARenewalComesFromTheLAN(t *testing.T) {
	t.Parallel()
	held := &Lease{Address: netip.MustParsePrefix("10.9.1.1/16"), Server: netip.MustParseAddr("192.0.2.53")}
	for _, tt := range []struct {
		name, from, to string
		held           *Lease
		want           bool
	}{
		{"the lease's server", "192.0.2.53:67", "10.9.1.1:68", held, true},
		{"another server of the LAN, or a relay", "10.9.0.2:67", "10.9.1.1:68", held, true},
		{"to all", "198.51.100.1:67", "255.255.255.255:68", held, true},
		{"to all, from another port", "10.9.0.1:1067", "255.255.255.255:68", held, true},
		{"a machine elsewhere", "198.51.100.1:67", "10.9.1.1:68", held, false},
		{"a machine elsewhere, to the network's broadcast address", "198.51.100.1:67", "10.9.255.255:68", held, false},
		{"another port, by way of a router that translates addresses", "10.9.0.1:1067", "10.9.1.1:68", held, false},
		{"the server's address and another port", "192.0.2.53:1067", "10.9.1.1:68", held, false},
		{"the pod itself", "10.9.1.1:67", "10.9.1.1:68", held, false},
		{"no lease yet", "198.51.100.1:67", "10.9.1.1:68", nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			p := &Packet{Src: netip.MustParseAddrPort(tt.from), Dst: netip.MustParseAddrPort(tt.to)}
			if got := isFromLAN(p, tt.held); got != tt.want {
				t.Errorf("from the LAN: %t", got)
			}
		})
	}
}
