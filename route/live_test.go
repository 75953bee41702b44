package route_test

import (
	"errors"
	"io/fs"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// host is a namespace with two links, each of which has an address of either
// family: 10.1.0.2/24 and fd01::2/64 on eth0, the same with a 2 on eth1.
type host struct {
	ns         *netns.NS
	nl         *nl.Conn
	c          *route.Conn // on nl
	eth0, eth1 int
}

func newHost(tb testing.TB) host {
	tb.Helper()
	ns := nstest.New(tb)
	conn := must.Of(nl.Dial(unix.NETLINK_ROUTE, ns)).Get(tb)
	tb.Cleanup(func() { conn.Close() })
	h := host{ns: ns, nl: conn, c: route.On(conn)}
	h.eth0, _ = nstest.Veth(tb, ns, "eth0", ns, "peer0")
	h.eth1, _ = nstest.Veth(tb, ns, "eth1", ns, "peer1")
	for _, n := range []string{"1", "2"} {
		dev := map[string]string{"1": "eth0", "2": "eth1"}[n]
		nstest.Run(tb, ns, "ip", "address", "add", "10."+n+".0.2/24", "dev", dev)
		nstest.Run(tb, ns, "ip", "address", "add", "fd0"+n+"::2/64", "dev", dev, "nodad")
	}
	h.waitForKernel(tb)
	return h
}

// waitForKernel waits for the routes that the kernel adds in its own time: those of IPv6 addresses, even without
// duplicate address detection, and of multicast on each link that is up.
func (h host) waitForKernel(tb testing.TB) {
	tb.Helper()
	must.Until(tb, "the kernel's own routes", func() bool {
		multicast, local := 0, 0
		for line := range strings.Lines(nstest.Run(tb, h.ns, "ip", "-6", "-details", "route", "show", "table", "local")) {
			if strings.HasPrefix(line, "multicast ff00::/8") {
				multicast++
			}
			if strings.HasPrefix(line, "local fd0") {
				local++
			}
		}
		return multicast == 4 && local == 2
	})
}

// shown gives the lines that ip-route(8) prints for routes to a destination, in
// every table.
func (h host) shown(tb testing.TB, dst string) []string {
	tb.Helper()
	family := "-4"
	if strings.Contains(dst, ":") {
		family = "-6"
	}
	if strings.HasSuffix(dst, "/0") {
		dst = "default"
	}
	var lines []string
	out := nstest.Run(tb, h.ns, "ip", family, "-details", "route", "show", "table", "all")
	for line := range strings.Lines(out) {
		line = strings.ReplaceAll(strings.Join(strings.Fields(line), " "), " table main", "")
		line = ticking.ReplaceAllString(line, "expires …")
		if f := strings.Fields(line); len(f) > 1 && f[1] == dst && !strings.Contains(line, "proto kernel") {
			lines = append(lines, line)
		} else if len(lines) > 0 && len(f) > 0 && f[0] == "nexthop" {
			lines[len(lines)-1] += " " + line
		}
	}
	return lines
}

// ticking is the part of a line that time changes.
var ticking = regexp.MustCompile(`expires [0-9]+sec`)

func ptr[T any](v T) *T { return &v }

// routes is every kind of route that the package knows, with what ip-route(8) is
// to print for it.
func routes(h host) []struct {
	name  string
	route route.Route
	shown string
} {
	p, a := nstest.Prefix, nstest.Addr
	return []struct {
		name  string
		route route.Route
		shown string
	}{
		{"to a link", route.Route{Dst: p("192.0.2.0/24"), Link: h.eth0},
			"unicast 192.0.2.0/24 dev eth0 proto 116 scope link"},
		{"through a gateway", route.Route{Dst: p("192.0.2.0/24"), Gateway: a("10.1.0.1")},
			"unicast 192.0.2.0/24 via 10.1.0.1 dev eth0 proto 116 scope global"},
		{"with host bits", route.Route{Dst: p("192.0.2.77/24"), Gateway: a("10.1.0.1")},
			"unicast 192.0.2.0/24 via 10.1.0.1 dev eth0 proto 116 scope global"},
		{"default by its gateway", route.Route{Gateway: a("10.1.0.1")},
			"unicast default via 10.1.0.1 dev eth0 proto 116 scope global"},
		{"default spelt out", route.Route{Dst: p("0.0.0.0/0"), Gateway: a("10.1.0.1")},
			"unicast default via 10.1.0.1 dev eth0 proto 116 scope global"},
		{"default to a link", route.Route{Family: unix.AF_INET, Link: h.eth0},
			"unicast default dev eth0 proto 116 scope link"},
		{"every field of a CNI 1.1 route", route.Route{Dst: p("192.0.2.0/24"), Gateway: a("10.1.0.1"), MTU: 1400,
			AdvMSS: 1360, Priority: 7, Table: 1000, Scope: ptr(uint8(unix.RT_SCOPE_SITE))},
			"unicast 192.0.2.0/24 via 10.1.0.1 dev eth0 table 1000 proto 116 scope site metric 7 mtu 1400 advmss 1360"},
		{"in a table of one byte", route.Route{Dst: p("192.0.2.0/24"), Link: h.eth0, Table: 255},
			"unicast 192.0.2.0/24 dev eth0 table local proto 116 scope link"},
		{"with a source", route.Route{Dst: p("192.0.2.0/24"), Gateway: a("10.1.0.1"), Source: a("10.2.0.2")},
			"unicast 192.0.2.0/24 via 10.1.0.1 dev eth0 proto 116 scope global src 10.2.0.2"},
		{"with a protocol and a type of service", route.Route{Dst: p("192.0.2.0/24"), Link: h.eth0, Protocol: unix.RTPROT_STATIC, TOS: 8},
			"unicast 192.0.2.0/24 tos 0x08 dev eth0 proto static scope link"},
		{"on-link", route.Route{Dst: p("192.0.2.0/24"), Gateway: a("198.51.100.1"), Link: h.eth0, OnLink: true},
			"unicast 192.0.2.0/24 via 198.51.100.1 dev eth0 proto 116 scope global onlink"},
		{"IPv4 through an IPv6 gateway", route.Route{Dst: p("192.0.2.0/24"), Gateway: a("fd01::1"), Link: h.eth0},
			"unicast 192.0.2.0/24 via inet6 fd01::1 dev eth0 proto 116 scope global"},
		{"IPv4 default through an IPv6 gateway", route.Route{Family: unix.AF_INET, Gateway: a("fd01::1"), Link: h.eth0},
			"unicast default via inet6 fd01::1 dev eth0 proto 116 scope global"},
		{"other metrics", route.Route{Dst: p("192.0.2.0/24"), Link: h.eth0, MTU: 1300,
			Other: metrics(unix.RTAX_LOCK, 1<<unix.RTAX_MTU, unix.RTAX_INITCWND, 20)},
			"unicast 192.0.2.0/24 dev eth0 proto 116 scope link mtu lock 1300 initcwnd 20"},
		{"several next hops", route.Route{Dst: p("192.0.2.0/24"), Nexthops: []route.Nexthop{
			{Gateway: a("10.1.0.1"), Weight: 3}, {Gateway: a("fd02::1"), Link: h.eth1}, {Gateway: a("198.51.100.1"), Link: h.eth1, OnLink: true}}},
			"unicast 192.0.2.0/24 proto 116 scope global nexthop via 10.1.0.1 dev eth0 weight 3 " +
				"nexthop via inet6 fd02::1 dev eth1 weight 1 nexthop via 198.51.100.1 dev eth1 weight 1 onlink"},
		{"several next hops beside a gateway", route.Route{Dst: p("192.0.2.0/24"), Gateway: a("10.1.0.3"), Link: h.eth0,
			Nexthops: []route.Nexthop{{Gateway: a("10.1.0.1")}, {Gateway: a("10.2.0.1")}}},
			"unicast 192.0.2.0/24 proto 116 scope global nexthop via 10.1.0.1 dev eth0 weight 1 " +
				"nexthop via 10.2.0.1 dev eth1 weight 1"},
		{"IPv4 with fields of IPv6", route.Route{Dst: p("192.0.2.0/24"), Link: h.eth0, Pref: 1, Expires: ptr(time.Hour)},
			"unicast 192.0.2.0/24 dev eth0 proto 116 scope link"},
		{"blackhole", route.Route{Dst: p("192.0.2.0/24"), Type: unix.RTN_BLACKHOLE},
			"blackhole 192.0.2.0/24 proto 116 scope global"},
		{"unreachable", route.Route{Dst: p("192.0.2.0/24"), Type: unix.RTN_UNREACHABLE},
			"unreachable 192.0.2.0/24 proto 116 scope global"},
		{"prohibit", route.Route{Dst: p("192.0.2.0/24"), Type: unix.RTN_PROHIBIT},
			"prohibit 192.0.2.0/24 proto 116 scope global"},
		{"throw", route.Route{Dst: p("192.0.2.0/24"), Type: unix.RTN_THROW},
			"throw 192.0.2.0/24 proto 116 scope global"},
		{"local", route.Route{Dst: p("192.0.2.0/24"), Type: unix.RTN_LOCAL, Link: h.eth0, Table: unix.RT_TABLE_LOCAL},
			"local 192.0.2.0/24 dev eth0 table local proto 116 scope host"},
		{"a nexthop object", route.Route{Dst: p("192.0.2.0/24"), NexthopID: 9},
			"unicast 192.0.2.0/24 nhid 9 via 10.1.0.1 dev eth0 proto 116 scope global"},

		{"IPv6 to a link", route.Route{Dst: p("2001:db8::/32"), Link: h.eth0},
			"unicast 2001:db8::/32 dev eth0 proto 116 scope global metric 1024 pref medium"},
		{"IPv6 through a gateway", route.Route{Dst: p("2001:db8::5/32"), Gateway: a("fd01::1")},
			"unicast 2001:db8::/32 via fd01::1 dev eth0 proto 116 scope global metric 1024 pref medium"},
		{"IPv6 default", route.Route{Gateway: a("fd01::1")},
			"unicast default via fd01::1 dev eth0 proto 116 scope global metric 1024 pref medium"},
		{"IPv6 default to a link", route.Route{Family: unix.AF_INET6, Link: h.eth0},
			"unicast default dev eth0 proto 116 scope global metric 1024 pref medium"},
		{"IPv6, every field of a CNI 1.1 route", route.Route{Dst: p("2001:db8::/32"), Gateway: a("fe80::1"), Link: h.eth0, MTU: 1400,
			AdvMSS: 1340, Priority: 7, Table: 1000},
			"unicast 2001:db8::/32 via fe80::1 dev eth0 table 1000 proto 116 scope global metric 7 mtu 1400 advmss 1340 pref medium"},
		{"IPv6 with a source and a preference", route.Route{Dst: p("2001:db8::/32"), Gateway: a("fd01::1"), Source: a("fd02::2"), Pref: 1},
			"unicast 2001:db8::/32 via fd01::1 dev eth0 proto 116 scope global src fd02::2 metric 1024 pref high"},
		{"IPv6 for a time", route.Route{Dst: p("2001:db8::/32"), Gateway: a("fd01::1"), Expires: ptr(time.Hour)},
			"unicast 2001:db8::/32 via fd01::1 dev eth0 proto 116 scope global metric 1024 expires … pref medium"},
		{"IPv6, several next hops", route.Route{Dst: p("2001:db8::/32"), Nexthops: []route.Nexthop{
			{Gateway: a("fd01::1"), Link: h.eth0, Weight: 2}, {Gateway: a("fd02::1"), Link: h.eth1}}},
			"unicast 2001:db8::/32 proto 116 scope global metric 1024 pref medium " +
				"nexthop via fd01::1 dev eth0 weight 2 nexthop via fd02::1 dev eth1 weight 1"},
		{"IPv6 blackhole", route.Route{Dst: p("2001:db8::/32"), Type: unix.RTN_BLACKHOLE},
			"blackhole 2001:db8::/32 dev lo proto 116 scope global metric 1024 pref medium"},
	}
}

// TestRouteIsWhatItWasAskedToBe takes each kind of route through its life, with
// ip-route(8) as the referee of what is there.
func TestRouteIsWhatItWasAskedToBe(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	nstest.Run(t, h.ns, "ip", "nexthop", "add", "id", "9", "via", "10.1.0.1", "dev", "eth0")
	for _, tt := range routes(h) {
		t.Run(tt.name, func(t *testing.T) {
			must.Succeed(t, h.c.Add(t.Context(), tt.route))
			dst := tt.route.Dst.Masked().String()
			if !tt.route.Dst.IsValid() {
				dst = "0.0.0.0/0"
				if strings.HasPrefix(tt.name, "IPv6") {
					dst = "::/0"
				}
			}
			expect.NoDiff(t, cmp.Diff([]string{tt.shown}, h.shown(t, dst)), "ip route")
			matching := 0
			list, err := h.c.List(t.Context(), route.Filter{})
			for _, have := range list {
				if tt.route.Matches(have) {
					matching++
				}
			}
			expect.That(t, err == nil && matching == 1,
				"%d routes of the list match, want 1 (%v): %+v", matching, err, list)
			expect.Is(t, h.c.Add(t.Context(), tt.route), fs.ErrExist, "adding it again")
			expect.Of(h.c.Ensure(t.Context(), tt.route)).Is(t, false, "Ensure")
			for range 2 { // what is not there is success
				must.Succeed(t, h.c.Remove(t.Context(), tt.route))
				got := h.shown(t, dst)
				expect.That(t, len(got) == 0, "left after Remove: %s", got)
			}
		})
	}
}

func TestEnsureCorrectsARoute(t *testing.T) {
	t.Parallel()
	p, a := nstest.Prefix, nstest.Addr
	h := newHost(t)
	base4 := route.Route{Dst: p("192.0.2.0/24"), Gateway: a("10.1.0.1")}
	base6 := route.Route{Dst: p("2001:db8::/32"), Gateway: a("fd01::1")}
	with := func(r route.Route, change func(*route.Route)) route.Route {
		change(&r)
		return r
	}
	for _, tt := range []struct {
		name  string
		there route.Route
		want  route.Route
	}{
		{"gateway", base4, with(base4, func(r *route.Route) { r.Gateway = a("10.1.0.3") })},
		{"link", base4, with(base4, func(r *route.Route) { r.Gateway = a("10.2.0.1"); r.Link = h.eth1 })},
		{"gateway away", base4, route.Route{Dst: base4.Dst, Link: h.eth0}},
		{"MTU", base4, with(base4, func(r *route.Route) { r.MTU = 1400 })},
		{"AdvMSS away", with(base4, func(r *route.Route) { r.AdvMSS = 1200 }), base4},
		{"source", base4, with(base4, func(r *route.Route) { r.Source = a("10.2.0.2") })},
		{"protocol", with(base4, func(r *route.Route) { r.Protocol = unix.RTPROT_BOOT }), base4},
		{"type", base4, route.Route{Dst: base4.Dst, Type: unix.RTN_UNREACHABLE}},
		{"scope", base4, with(base4, func(r *route.Route) { r.Scope = ptr(uint8(unix.RT_SCOPE_SITE)) })},
		{"IPv6 gateway", base6, with(base6, func(r *route.Route) { r.Gateway = a("fd01::3") })},
		{"IPv6 link", base6, with(base6, func(r *route.Route) { r.Gateway = a("fd02::1"); r.Link = h.eth1 })},
		{"IPv6 MTU", base6, with(base6, func(r *route.Route) { r.MTU = 1400 })},
		{"IPv6 source", with(base6, func(r *route.Route) { r.Source = a("fd02::2") }), base6},
		{"IPv6 preference", base6, with(base6, func(r *route.Route) { r.Pref = 3 })},
		{"IPv6 expires no more", with(base6, func(r *route.Route) { r.Expires = ptr(time.Hour) }), base6},
		{"IPv6 gateway away", base6, route.Route{Dst: base6.Dst, Link: h.eth0}},
		{"IPv6 type", base6, route.Route{Dst: base6.Dst, Type: unix.RTN_UNREACHABLE}},
		{"IPv6 next hops for a gateway", base6, route.Route{Dst: base6.Dst, Nexthops: []route.Nexthop{
			{Gateway: a("fd01::1"), Link: h.eth0}, {Gateway: a("fd02::1"), Link: h.eth1}}}},
		{"IPv6 gateway for next hops", route.Route{Dst: base6.Dst, Nexthops: []route.Nexthop{
			{Gateway: a("fd01::1"), Link: h.eth0}, {Gateway: a("fd02::1"), Link: h.eth1}}}, base6},
		{"next hops for a gateway", base4, route.Route{Dst: base4.Dst, Nexthops: []route.Nexthop{
			{Gateway: a("10.1.0.1")}, {Gateway: a("10.2.0.1")}}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, r := range []route.Route{tt.there, tt.want} {
				changed, err := h.c.Ensure(t.Context(), r)
				must.That(t, changed && err == nil, "Ensure %s: changed %t, %v, want a change", r, changed, err)
				changed, err = h.c.Ensure(t.Context(), r)
				must.That(t, !changed && err == nil, "Ensure %s again: changed %t, %v, want none", r, changed, err)
			}
			got := h.shown(t, tt.want.Dst.String())
			expect.That(t, len(got) == 1, "there are %d routes, want 1: %q", len(got), got)
			expect.Success(t, h.c.Remove(t.Context(), tt.want))
		})
	}
}

func TestListIsFilteredByTheKernel(t *testing.T) {
	t.Parallel()
	p, a := nstest.Prefix, nstest.Addr
	h := newHost(t)
	for _, r := range []route.Route{
		{Dst: p("192.0.2.0/24"), Link: h.eth0},
		{Dst: p("192.0.2.0/24"), Link: h.eth1, Table: 1000},
		{Dst: p("198.51.100.0/24"), Gateway: a("10.2.0.1"), Table: 77, Protocol: unix.RTPROT_STATIC},
		{Dst: p("203.0.113.0/24"), Type: unix.RTN_BLACKHOLE},
		{Dst: p("203.0.113.0/24"), Priority: 3, Nexthops: []route.Nexthop{{Gateway: a("10.1.0.1")}, {Gateway: a("10.2.0.1")}}},
		{Dst: p("2001:db8::/32"), Gateway: a("fd02::1")},
		{Dst: p("2001:db8::/32"), Link: h.eth0, Table: 1000},
	} {
		must.Succeed(t, h.c.Add(t.Context(), r))
	}
	for _, tt := range []struct {
		name   string
		filter route.Filter
		want   []string
	}{
		{"ours", route.Filter{Protocol: route.ProtocolTombolo, Family: unix.AF_INET}, []string{
			"192.0.2.0/24 on link eth0", "blackhole 203.0.113.0/24",
			"203.0.113.0/24 nexthop via 10.1.0.1 on link eth0 nexthop via 10.2.0.1 on link eth1",
			"192.0.2.0/24 on link eth1 in table 1000"}},
		{"a table of both families", route.Filter{Table: 1000}, []string{
			"192.0.2.0/24 on link eth1 in table 1000", "2001:db8::/32 on link eth0 in table 1000"}},
		{"a small table", route.Filter{Table: 77}, []string{"198.51.100.0/24 via 10.2.0.1 on link eth1 in table 77"}},
		{"a table and a family", route.Filter{Table: 1000, Family: unix.AF_INET6}, []string{"2001:db8::/32 on link eth0 in table 1000"}},
		{"a table that is not there", route.Filter{Table: 4711, Family: unix.AF_INET}, nil},
		{"no table of any family", route.Filter{Table: 4711}, nil},
		{"a link", route.Filter{Link: h.eth1, Protocol: route.ProtocolTombolo}, []string{
			"203.0.113.0/24 nexthop via 10.1.0.1 on link eth0 nexthop via 10.2.0.1 on link eth1",
			"192.0.2.0/24 on link eth1 in table 1000", "2001:db8::/32 via fd02::1 on link eth1"}},
		{"a type", route.Filter{Type: unix.RTN_BLACKHOLE}, []string{"blackhole 203.0.113.0/24"}},
		{"local addresses", route.Filter{Family: unix.AF_INET, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Link: h.eth0},
			[]string{"local 10.1.0.2/32 on link eth0 in table 255"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			list := must.Of(h.c.List(t.Context(), tt.filter)).Get(t)
			var got []string
			for _, r := range list {
				got = append(got, h.withNames(r.String()))
			}
			expect.NoDiff(t, cmp.Diff(tt.want, got, cmpopts.SortSlices(strings.Compare)), "listed")
		})
	}
	t.Run("a link that is not there", func(t *testing.T) {
		expect.Is(t, expect.Err(h.c.List(t.Context(), route.Filter{Link: 4711})), fs.ErrNotExist, "List")
	})
}

func (h host) withNames(s string) string {
	f := strings.Fields(s)
	for i, w := range f {
		if i > 0 && f[i-1] == "link" {
			switch w {
			case strconv.Itoa(h.eth0):
				f[i] = "eth0"
			case strconv.Itoa(h.eth1):
				f[i] = "eth1"
			}
		}
	}
	return strings.Join(f, " ")
}

func TestGetFindsTheWay(t *testing.T) {
	t.Parallel()
	p, a := nstest.Prefix, nstest.Addr
	h := newHost(t)
	for _, r := range []route.Route{
		{Dst: p("192.0.2.0/24"), Gateway: a("10.1.0.1"), MTU: 1234},
		{Dst: p("198.51.100.0/24"), Gateway: a("10.2.0.1"), Table: 1000},
		{Dst: p("203.0.113.0/24"), Type: unix.RTN_PROHIBIT},
		{Dst: p("2001:db8::/32"), Gateway: a("fd01::1")},
	} {
		must.Succeed(t, h.c.Add(t.Context(), r))
	}
	nstest.Run(t, h.ns, "ip", "rule", "add", "to", "198.51.100.0/24", "table", "1000")
	for _, tt := range []struct {
		name, dst string
		want      route.Route
		err       error
	}{
		{name: "an address of the host", dst: "10.1.0.2",
			want: route.Route{Dst: p("10.1.0.2/32"), Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Source: a("10.1.0.2")}},
		{name: "an IPv6 address of the host", dst: "fd01::2",
			want: route.Route{Dst: p("fd01::2/128"), Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Source: a("fd01::2"), Protocol: unix.RTPROT_KERNEL}},
		{name: "a neighbour", dst: "10.1.0.77",
			want: route.Route{Dst: p("10.1.0.77/32"), Type: unix.RTN_UNICAST, Table: unix.RT_TABLE_MAIN, Link: h.eth0, Source: a("10.1.0.2")}},
		{name: "through a gateway", dst: "192.0.2.9",
			want: route.Route{Dst: p("192.0.2.9/32"), Type: unix.RTN_UNICAST, Table: unix.RT_TABLE_MAIN, Gateway: a("10.1.0.1"), Link: h.eth0, Source: a("10.1.0.2"), MTU: 1234}},
		{name: "by a rule", dst: "198.51.100.9",
			want: route.Route{Dst: p("198.51.100.9/32"), Type: unix.RTN_UNICAST, Table: 1000, Gateway: a("10.2.0.1"), Link: h.eth1, Source: a("10.2.0.2")}},
		{name: "IPv6 through a gateway", dst: "2001:db8::9",
			want: route.Route{Dst: p("2001:db8::9/128"), Type: unix.RTN_UNICAST, Table: unix.RT_TABLE_MAIN, Gateway: a("fd01::1"), Link: h.eth0, Source: a("fd01::2"),
				Protocol: route.ProtocolTombolo, Priority: 1024}},
		{name: "nowhere", dst: "8.8.8.8", err: unix.ENETUNREACH},
		{name: "nowhere, IPv6", dst: "2002::1", err: unix.ENETUNREACH},
		{name: "prohibited", dst: "203.0.113.1", err: unix.EACCES},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := h.c.Get(t.Context(), a(tt.dst))
			must.That(t, errors.Is(err, tt.err), "Get: %v, want %v", err, tt.err)
			if err != nil {
				var opErr *tombolo.OpError
				expect.That(t, errors.As(err, &opErr) && opErr.Object == tt.dst,
					"Get: %v, want an OpError about %s", err, tt.dst)
				return
			}
			if got.Type == unix.RTN_LOCAL {
				got.Link = 0 // the loopback interface or the address's, depending on family and kernel
			}
			opts := []cmp.Option{cmpopts.EquateComparable(tt.want.Dst, tt.want.Gateway),
				cmpopts.IgnoreFields(route.Route{}, "Family", "Scope", "Flags")}
			expect.NoDiff(t, cmp.Diff(tt.want, got, opts...), "route")
		})
	}
}

func TestRefusedRouteSaysWhy(t *testing.T) {
	t.Parallel()
	p, a := nstest.Prefix, nstest.Addr
	h := newHost(t)
	for _, tt := range []struct {
		name  string
		route route.Route
		want  string
	}{
		{"gateway out of reach", route.Route{Dst: p("10.0.0.0/8"), Gateway: a("172.16.0.1")},
			"add route 10.0.0.0/8 via 172.16.0.1: network is unreachable (kernel: Nexthop has invalid gateway)"},
		{"source not ours", route.Route{Dst: p("10.0.0.0/8"), Gateway: a("10.1.0.1"), Source: a("10.9.9.9")},
			"add route 10.0.0.0/8 via 10.1.0.1: invalid argument (kernel: Invalid prefsrc address)"},
		{"no such link", route.Route{Dst: p("10.0.0.0/8"), Link: 4711},
			"add route 10.0.0.0/8 on link 4711: no such device"},
		{"an index beyond those of links", route.Route{Dst: p("10.0.0.0/8"), Link: h.eth0 + 1<<32},
			"add route 10.0.0.0/8 on link " + strconv.Itoa(h.eth0+1<<32) + ": no such device"},
		{"the same of a next hop", route.Route{Dst: p("10.0.0.0/8"), Nexthops: []route.Nexthop{{Link: h.eth0 + 1<<32}}},
			"add route 10.0.0.0/8 nexthop on link " + strconv.Itoa(h.eth0+1<<32) + ": no such device"},
		{"no such nexthop object", route.Route{Dst: p("10.0.0.0/8"), NexthopID: 4711},
			"add route 10.0.0.0/8 nexthop object 4711: invalid argument (kernel: Nexthop id does not exist)"},
		{"no family", route.Route{Link: h.eth0},
			"add route default on link " + strconv.Itoa(h.eth0) + ": a default route without a gateway needs its family"},
		{"weight", route.Route{Dst: p("10.0.0.0/8"), Nexthops: []route.Nexthop{{Gateway: a("10.1.0.1"), Weight: 257}}},
			"add route 10.0.0.0/8 nexthop via 10.1.0.1: weight 257 of a next hop is not within 1 and 256"},
		{"families mixed", route.Route{Dst: p("10.0.0.0/8"), From: p("fd00::/8"), Link: h.eth0},
			"add route 10.0.0.0/8 from fd00::/8 on link " + strconv.Itoa(h.eth0) + ": source prefix is not of the destination's family"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := h.c.Add(t.Context(), tt.route)
			expect.That(t, err != nil && err.Error() == tt.want, "got  %v\nwant %s", err, tt.want)
			changed, err := h.c.Ensure(t.Context(), tt.route)
			expect.That(t, !changed && err != nil, "Ensure: changed %t, %v, want an error", changed, err)
		})
	}
}

func TestDelMatchesWhatIsSet(t *testing.T) {
	t.Parallel()
	a := nstest.Addr
	h := newHost(t)
	dst, dst6 := nstest.Prefix("192.0.2.0/24"), nstest.Prefix("2001:db8::/32")
	for _, tt := range []struct {
		name string
		del  route.Route
		left []int // of the priorities 5, 6, 7
	}{
		{"by destination, the first", route.Route{Dst: dst}, []int{6, 7}},
		{"by priority", route.Route{Dst: dst, Priority: 6}, []int{5, 7}},
		{"by gateway", route.Route{Dst: dst, Gateway: a("10.2.0.1")}, []int{5, 6}},
		{"by link", route.Route{Dst: dst, Link: h.eth1}, []int{5, 6}},
		{"by protocol", route.Route{Dst: dst, Protocol: unix.RTPROT_STATIC}, []int{5, 7}},
		{"by type", route.Route{Dst: dst, Type: unix.RTN_BLACKHOLE}, []int{5, 6, 7}},
		{"by another table", route.Route{Dst: dst, Table: 1000}, []int{5, 6, 7}},
		{"by an IPv6 destination, the first", route.Route{Dst: dst6}, []int{6, 7}},
		{"by an IPv6 priority", route.Route{Dst: dst6, Priority: 6}, []int{5, 7}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, r := range []route.Route{
				{Dst: dst6, Priority: 5, Gateway: a("fd01::1")},
				{Dst: dst6, Priority: 6, Gateway: a("fd01::3")},
				{Dst: dst6, Priority: 7, Gateway: a("fd02::1")},
				{Dst: dst, Priority: 5, Gateway: a("10.1.0.1")},
				{Dst: dst, Priority: 6, Gateway: a("10.1.0.3"), Protocol: unix.RTPROT_STATIC},
				{Dst: dst, Priority: 7, Gateway: a("10.2.0.1")},
			} {
				must.Succeed(t, h.c.Replace(t.Context(), r))
			}
			must.Succeed(t, h.c.Remove(t.Context(), tt.del))
			list := must.Of(h.c.List(t.Context(), route.Filter{Table: unix.RT_TABLE_MAIN})).Get(t)
			var left []int
			for _, r := range list {
				if r.Dst == tt.del.Dst {
					left = append(left, int(r.Priority))
				}
			}
			slices.Sort(left)
			expect.NoDiff(t, cmp.Diff(tt.left, left), "priorities left")
		})
	}
}

// While others come and go, a route that is there all the time is in each list once, or the list is an error.
func TestListsAreWholeOrAnErrorWhileRoutesChange(t *testing.T) {
	t.Parallel()
	for name, at := range map[string]func(side byte, i int) netip.Prefix{
		"IPv4": func(side byte, i int) netip.Prefix {
			return netip.PrefixFrom(netip.AddrFrom4([4]byte{20, side, byte(i >> 8), byte(i)}), 32)
		},
		"IPv6": func(side byte, i int) netip.Prefix {
			return netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, side, 14: byte(i >> 8), 15: byte(i)}), 128)
		},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			h := newHost(t)
			ctx := t.Context()
			const n = 700 // in several parts
			for i := range n {
				must.Succeed(t, h.c.Add(ctx, route.Route{Dst: at(2, i), Link: h.eth0}))
			}
			w := must.Of(route.Dial(h.ns)).Get(t)
			defer w.Close()
			ended, stop := make(chan error), make(chan struct{})
			go func() {
				for i := 0; ; i++ {
					select {
					case <-stop:
						ended <- nil
						return
					default:
					}
					other := route.Route{Dst: at(1, i%50), Link: h.eth0} // ahead of the others
					if err := errors.Join(w.Add(ctx, other), w.Remove(ctx, other)); err != nil {
						ended <- err
						return
					}
				}
			}()
			whole := 0
			for range 60 {
				list, err := h.c.List(ctx, route.Filter{Link: h.eth0, Family: nl.FamilyOf(at(1, 0).Addr())})
				if errors.Is(err, tombolo.ErrInterrupted) {
					continue
				}
				must.Succeed(t, err)
				whole++
				seen := map[netip.Prefix]int{}
				for _, r := range list {
					seen[r.Dst]++
				}
				for i := range n {
					must.That(t, seen[at(2, i)] == 1, "%s is listed %d times", at(2, i), seen[at(2, i)])
				}
			}
			for i := range n / 5 {
				changed, err := h.c.Ensure(ctx, route.Route{Dst: at(2, i), Link: h.eth0})
				expect.That(t, !changed && err == nil, "Ensure of %s: %t, %v", at(2, i), changed, err)
			}
			close(stop)
			must.Succeed(t, <-ended)
			t.Logf("%d of 60 lists are whole", whole)
		})
	}
}

// What List returned, changed in one field and given to Ensure, changes that field in the kernel and no other, and a
// second Ensure changes nothing. Each row starts from a route that has as many fields as its family takes.
func TestOneFieldOfAListedRouteIsChanged(t *testing.T) {
	t.Parallel()
	p, a := nstest.Prefix, nstest.Addr
	hour := time.Hour
	type change struct {
		name string
		do   func(r *route.Route, h host)
	}
	both := []change{
		{"no MTU", func(r *route.Route, _ host) { r.MTU = 0 }},
		{"MTU", func(r *route.Route, _ host) { r.MTU = 1310 }},
		{"AdvMSS", func(r *route.Route, _ host) { r.AdvMSS = 1210 }},
		{"no AdvMSS", func(r *route.Route, _ host) { r.AdvMSS = 0 }},
		{"neither", func(r *route.Route, _ host) { r.AdvMSS, r.MTU = 0, 0 }},
		{"another metric", func(r *route.Route, _ host) { r.Other = metrics(unix.RTAX_INITCWND, 30) }},
		{"one metric more", func(r *route.Route, _ host) { r.Other = metrics(unix.RTAX_INITCWND, 20, unix.RTAX_INITRWND, 40) }},
		{"Protocol", func(r *route.Route, _ host) { r.Protocol = 77 }},
		{"no Source", func(r *route.Route, _ host) { r.Source = netip.Addr{} }},
		{"OnLink", func(r *route.Route, _ host) { r.OnLink = true }},
		{"blackhole", func(r *route.Route, _ host) {
			r.Type, r.Gateway, r.Link, r.Source = unix.RTN_BLACKHOLE, netip.Addr{}, 0, netip.Addr{}
		}},
		{"on the link", func(r *route.Route, _ host) { r.Gateway, r.Scope = netip.Addr{}, nil }},
	}
	for _, f := range []struct {
		name    string
		from    route.Route
		changes []change
	}{
		{"IPv4", route.Route{Dst: p("192.0.2.0/24"), Gateway: a("10.1.0.1"), Source: a("10.1.0.2")}, []change{
			{"Gateway", func(r *route.Route, _ host) { r.Gateway = a("10.1.0.3") }},
			{"Gateway of IPv6", func(r *route.Route, _ host) { r.Gateway = a("fd01::1") }},
			{"Link", func(r *route.Route, h host) { r.Gateway, r.Link = a("10.2.0.1"), h.eth1 }},
			{"Source", func(r *route.Route, _ host) { r.Source = a("10.2.0.2") }},
			{"Scope", func(r *route.Route, _ host) { r.Scope = new(uint8(150)) }},
			{"Nexthops", func(r *route.Route, h host) {
				r.Gateway, r.Link = netip.Addr{}, 0
				r.Nexthops = []route.Nexthop{{Gateway: a("10.1.0.1"), Link: h.eth0, Weight: 2}, {Gateway: a("10.2.0.1"), Link: h.eth1, Weight: 1}}
			}},
		}},
		{"IPv6", route.Route{Dst: p("2001:db8::/64"), Gateway: a("fd01::1"), Source: a("fd01::2")}, []change{
			{"Gateway", func(r *route.Route, _ host) { r.Gateway = a("fd01::3") }},
			{"Link", func(r *route.Route, h host) { r.Gateway, r.Link = a("fd02::1"), h.eth1 }},
			{"Source", func(r *route.Route, _ host) { r.Source = a("fd02::2") }},
			{"Pref", func(r *route.Route, _ host) { r.Pref = 1 }},
			{"Expires", func(r *route.Route, _ host) { r.Expires = &hour }},
			{"Nexthops", func(r *route.Route, h host) {
				r.Gateway, r.Link = netip.Addr{}, 0
				r.Nexthops = []route.Nexthop{{Gateway: a("fd01::1"), Link: h.eth0, Weight: 2}, {Gateway: a("fd02::1"), Link: h.eth1, Weight: 1}}
			}},
		}},
	} {
		nstest.RunParallel(t, f.name, func(t *testing.T) {
			h := newHost(t)
			ctx := t.Context()
			only := func() route.Route {
				t.Helper()
				list := must.Of(h.c.List(ctx, route.Filter{Table: 100, Family: nl.FamilyOf(f.from.Dst.Addr())})).Get(t)
				must.That(t, len(list) == 1, "the table has %v", list)
				list[0].Flags = 0
				for i := range list[0].Nexthops {
					list[0].Nexthops[i].Flags = 0
				}
				return list[0]
			}
			for _, c := range slices.Concat(both, f.changes) {
				f.from.Link, f.from.Table, f.from.Priority, f.from.MTU, f.from.AdvMSS = h.eth0, 100, 7, 1300, 1200
				f.from.Other = metrics(unix.RTAX_INITCWND, 20)
				must.Succeed(t, h.c.Add(ctx, f.from), c.name)
				want := only()
				changed, err := h.c.Ensure(ctx, want)
				expect.That(t, !changed && err == nil, "%s: Ensure of a listed route: %t, %v", c.name, changed, err)

				c.do(&want, h)
				for i, changes := range []bool{true, false} {
					changed, err := h.c.Ensure(ctx, want)
					changed = changed && (changes || want.Expires == nil) // a second may have passed
					expect.That(t, changed == changes && err == nil, "%s: Ensure %d: %t, %v", c.name, i, changed, err)
				}
				have := only()
				if want.Scope == nil || want.Type == unix.RTN_BLACKHOLE {
					want.Scope, have.Scope, have.Link = nil, nil, want.Link
				}
				if have.Expires != nil && want.Expires != nil && (*want.Expires-*have.Expires).Abs() < time.Minute {
					have.Expires = want.Expires
				}
				for i := range want.Other { // as the kernel has it
					want.Other[i].Type &^= netlink.Nested
				}
				expect.Equal(t, cmp.Diff(want, have, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})), "", "%s (-want +have)", c.name)
				must.Succeed(t, h.c.Remove(ctx, have), c.name)
			}
		})
	}
}
