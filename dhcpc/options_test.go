package dhcpc

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// Every option that is used, and the names of the JSON form, which is kept on disks.
func TestLeaseInJSON(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.Request, c.LinkMTU = []uint8{43, 66}, 1500 })
	b.bound(
		set(6, raw4("10.9.0.53", "10.9.1.53")), set(15, []byte("example.com\x00")), set(26, []byte{1400 >> 8, 1400 & 255}),
		set(28, raw4("10.9.0.255")), set(43, []byte{1, 2, 0xff}), set(51, seconds(7200)),
		set(58, seconds(600)), set(59, seconds(6000)), set(119, []byte("\x03lan\x00\x03pod\xc0\x00")),
		set(121, []byte{8, 10, 10, 9, 0, 2, 32, 192, 0, 2, 1, 0, 0, 0, 0, 0, 192, 0, 2, 1}),
		set(33, raw4("10.1.0.0", serverIP)),
	)
	text := must.Of(json.MarshalIndent(b.out.Bound, "", "\t")).Get(t)
	golden.Compare(t, "lease.json", string(text)+"\n")
	var again Lease
	must.Succeed(t, json.Unmarshal(text, &again))
	diff := cmp.Diff(b.out.Bound, &again, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }))
	expect.That(t, diff == "", "written and read (-first +again):\n%s", diff)
}

func TestLeaseForEverInJSON(t *testing.T) {
	t.Parallel()
	b := newBench(t).bound(set(51, seconds(-1)), without(3))
	text := must.Of(json.Marshal(b.out.Bound)).Get(t)
	golden.Compare(t, "lease-forever.json", string(text)+"\n")
	var again Lease
	if err := json.Unmarshal(text, &again); err != nil || !again.Infinite() || again.Validate() != nil {
		t.Errorf("read %+v: %v, %v", again, err, again.Validate())
	}
}

func TestRoutes(t *testing.T) {
	t.Parallel()
	route := func(bits byte, dst string, via string) []byte {
		n := (bits + 7) / 8
		return append(append([]byte{bits}, raw4(dst)[:n]...), raw4(via)...)
	}
	cat := func(list ...[]byte) []byte {
		var all []byte
		for _, b := range list {
			all = append(all, b...)
		}
		return all
	}
	slash32 := set(1, raw4("255.255.255.255"))
	for _, tt := range []struct {
		name string
		ack  []change
		want string
	}{
		{"a router", nil, "0.0.0.0/0 via 10.9.0.1"},
		{"no router", []change{without(3)}, ""},
		{"two routers", []change{set(3, raw4("10.9.0.2", "10.9.0.1"))}, "0.0.0.0/0 via 10.9.0.2"},
		{"a /32 and a router off the link", []change{slash32, set(3, raw4("192.0.2.1"))}, "192.0.2.1/32 on link, 0.0.0.0/0 via 192.0.2.1"},
		{"a /32 and a router of the same network", []change{slash32}, "10.9.0.1/32 on link, 0.0.0.0/0 via 10.9.0.1"},
		{"a router off the link", []change{set(3, raw4("192.0.2.1"))}, "192.0.2.1/32 on link, 0.0.0.0/0 via 192.0.2.1"},
		{"the client as its own router", []change{set(3, raw4(clientIP))}, "0.0.0.0/0 on link"},
		{"static routes", []change{set(33, raw4("10.0.0.0", "10.9.0.2", "172.16.0.0", "10.9.0.3", "192.0.2.0", "10.9.0.4", "192.0.2.9", "10.9.0.5"))},
			"10.0.0.0/8 via 10.9.0.2, 172.16.0.0/16 via 10.9.0.3, 192.0.2.0/24 via 10.9.0.4, 192.0.2.9/32 via 10.9.0.5, 0.0.0.0/0 via 10.9.0.1"},
		{"a static default route, which is forbidden", []change{set(33, raw4("0.0.0.0", "10.9.0.2"))}, "0.0.0.0/0 via 10.9.0.1"},
		{"classless ones over static ones and router", []change{set(33, raw4("10.0.0.0", "10.9.0.2")), set(121, route(12, "172.16.0.0", "10.9.0.3"))}, "172.16.0.0/12 via 10.9.0.3"},
		{"classless ones over 249", []change{set(249, route(8, "10.0.0.0", "10.9.0.2")), set(121, route(12, "172.16.0.0", "10.9.0.3"))}, "172.16.0.0/12 via 10.9.0.3"},
		{"249", []change{set(249, route(8, "10.0.0.0", "10.9.0.2"))}, "10.0.0.0/8 via 10.9.0.2"},
		{"249 where 121 is no good", []change{set(249, route(8, "10.0.0.0", "10.9.0.2")), set(121, []byte{33})}, "10.0.0.0/8 via 10.9.0.2"},
		{"an empty 121", []change{set(121, []byte{})}, "0.0.0.0/0 via 10.9.0.1"},
		{"on-link ones first", []change{slash32, set(121, cat(route(0, "0.0.0.0", "192.0.2.1"), route(32, "192.0.2.1", "0.0.0.0")))}, "192.0.2.1/32 on link, 0.0.0.0/0 via 192.0.2.1"},
		{"host bits", []change{set(121, route(9, "10.255.0.0", "10.9.0.3"))}, "10.128.0.0/9 via 10.9.0.3"},
		{"one twice", []change{set(121, cat(route(8, "10.0.0.0", "10.9.0.3"), route(8, "10.0.0.0", "10.9.0.3")))}, "10.0.0.0/8 via 10.9.0.3"},
		{"more than 255 bytes", []change{set(121, cat(manyRoutes()...))}, manyRoutesText()},
		{"a router that is none", []change{set(121, route(8, "10.0.0.0", "224.0.0.1"))}, "0.0.0.0/0 via 10.9.0.1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t).bound(tt.ack...)
			expect.Equal(t, routeText(b.out.Bound.Routes), tt.want, "routes")
		})
	}
}

// manyRoutes is a list that needs several options (RFC 3396).
func manyRoutes() [][]byte {
	var list [][]byte
	for i := range byte(50) {
		list = append(list, []byte{16, 172, i, 10, 9, 0, 1})
	}
	return list
}

func manyRoutesText() string {
	var list []Route
	for i := range byte(50) {
		list = append(list, Route{Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{172, i, 0, 0}), 16), Gateway: addr(serverIP)})
	}
	return routeText(list)
}

func TestMTU(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		sent []byte
		link int
		want int
	}{
		{nil, 1500, 0},
		{[]byte{0x05, 0x78}, 1500, 1400},
		{[]byte{0x05, 0x78}, 0, 1400},
		{[]byte{0x23, 0x28}, 1500, 1500},
		{[]byte{0x23, 0x28}, 0, 9000},
		{[]byte{0, 0}, 1500, 576},
		{[]byte{1}, 1500, 0},
		{[]byte{0x02, 0x40}, 500, 500}, // a link's own MTU is no server's to change
	} {
		b := newBench(t, func(c *Config) { c.LinkMTU = tt.link })
		var ack []change
		if tt.sent != nil {
			ack = append(ack, set(26, tt.sent))
		}
		b.bound(ack...)
		expect.Equal(t, b.out.Bound.MTU, tt.want, "MTU %x on a link of %d", tt.sent, tt.link)
	}
}

func TestNamesThatAreNone(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"a b", "a\nnameserver 10.6.6.6", "a..b", "-\x00-", "a;b", strings.Repeat("a", 64), strings.Repeat("a.", 127) + "a", "é", "."} {
		b := newBench(t).bound(set(15, []byte(name)), set(119, append([]byte{byte(min(len(name), 63))}, name[:min(len(name), 63)]...)))
		if l := b.out.Bound; l.Domain != "" {
			t.Errorf("domain %q taken for one", l.Domain)
		} else if len(name) < 64 && len(l.Search) > 0 && name != "a..b" && name != "." {
			t.Errorf("search list %q taken for one", l.Search)
		}
	}
	b := newBench(t).bound(set(15, []byte("_x.Example-1.com.")))
	expect.Equal(t, b.out.Bound.Domain, "_x.Example-1.com", "domain")
	b = newBench(t).bound(set(119, []byte{0xc0, 0}), set(28, raw4("10.8.0.255")))
	if l := b.out.Bound; len(l.Search) > 0 || l.Broadcast.IsValid() || len(l.Ignored) == 0 {
		t.Errorf("search list %q, broadcast %s, ignored %q", l.Search, l.Broadcast, l.Ignored)
	}
}

func TestBroadcastAddress(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		sent []byte
		want string
	}{
		{raw4("10.9.0.255"), "10.9.0.255"},
		{raw4("255.255.255.255"), "255.255.255.255"},
		{raw4("10.9.0.0"), "10.9.0.0"}, // as very old networks have it
		{raw4("10.8.0.255"), "invalid IP"},
		{[]byte{10, 9}, "invalid IP"},
	} {
		b := newBench(t).bound(set(28, tt.sent))
		if l := b.out.Bound; l.Broadcast.String() != tt.want || (len(l.Ignored) > 0) != !l.Broadcast.IsValid() {
			t.Errorf("%x: %s, ignored %q", tt.sent, l.Broadcast, l.Ignored)
		}
	}
}

func TestWhatIsSentWithARequest(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) {
		c.VendorClass, c.Broadcast, c.LinkMTU = "tombolo", true, 900
		c.Request, c.RequestOnly = []uint8{43, 3, 3}, true
		c.Provide = []Option{{51, seconds(600)}, {77, []byte("user")}}
		c.Address = addr(otherIP)
	})
	b.tick()
	check := func() {
		t.Helper()
		b.option(60, []byte("tombolo"))
		b.option(55, []byte{43, 3})
		b.option(57, []byte{900 >> 8, 900 & 255})
		b.option(51, seconds(600))
		b.option(77, []byte("user"))
	}
	check()
	b.option(50, raw4(otherIP))
	expect.That(t, b.sent.IsBroadcast(), "the DISCOVER does not ask for a broadcast")
	b.hear(offer)
	check()
	b.option(50, raw4(clientIP))
	expect.That(t, b.sent.IsBroadcast(), "the REQUEST does not ask for a broadcast")
	b.hear(ack)
	b.tick()
	check()
}

// RFC 2131, table 5; some servers are strict about it.
func TestRelease(t *testing.T) {
	t.Parallel()
	l := testLease()
	p := must.Of(Release(l, 0x01020304)).Get(t)
	d := must.Of(dhcpv4.FromBytes(p.Payload)).Get(t)
	want := dhcpv4.Options{53: {7}, 54: raw4(serverIP), 61: ownID()}
	expect.NoDiff(t, cmp.Diff(want, d.Options), "options")
	if !d.ClientIPAddr.Equal(addr(clientIP).AsSlice()) || d.ClientHWAddr.String() != l.MAC.String() || d.TransactionID != [4]byte{1, 2, 3, 4} {
		t.Errorf("message %s", d.Summary())
	}
	expect.That(t, p.Src.String() == "10.9.0.7:68" && p.Dst.String() == "10.9.0.1:67" &&
		p.SrcMAC.String() == l.MAC.String() && p.DstMAC.String() == l.ServerMAC.String(),
		"from %s %s to %s %s", p.Src, p.SrcMAC, p.Dst, p.DstMAC)
}
