package addr_test

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// host is a namespace with a link, eth0, that is up and has no addresses.
type host struct {
	ns   *netns.NS
	c    *addr.Conn
	eth0 int
}

func newHost(tb testing.TB) host {
	tb.Helper()
	h := host{ns: nstest.New(tb)}
	h.c = must.Of(addr.Dial(h.ns)).Get(tb)
	tb.Cleanup(func() { h.c.Close() })
	h.eth0, _ = nstest.Veth(tb, h.ns, "eth0", h.ns, "peer0")
	return h
}

// ticking is what time changes.
var ticking = regexp.MustCompile(`[0-9]+sec`)

// shown gives what ip-address(8) prints of each address of eth0, in one line.
func (h host) shown(tb testing.TB) []string {
	tb.Helper()
	var lines []string
	for line := range strings.Lines(nstest.Run(tb, h.ns, "ip", "-details", "address", "show", "dev", "eth0")) {
		line = ticking.ReplaceAllString(strings.Join(strings.Fields(line), " "), "…sec")
		switch {
		case strings.HasPrefix(line, "inet"):
			lines = append(lines, line)
		case strings.HasPrefix(line, "valid_lft"):
			lines[len(lines)-1] += " " + line
		}
	}
	return lines
}

// routes gives the routes that came with addresses.
func (h host) routes(tb testing.TB) string {
	tb.Helper()
	return nstest.Run(tb, h.ns, "ip", "-4", "route", "show") + nstest.Run(tb, h.ns, "ip", "-6", "route", "show")
}

// TestAddressIsWhatItWasAskedToBe takes each kind of address through its life,
// with ip-address(8) as the referee of what is there.
func TestAddressIsWhatItWasAskedToBe(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	p, a := nstest.Prefix, nstest.Addr
	for _, tt := range []struct {
		name   string
		a      addr.Address
		shown  string
		routed bool
	}{
		{"IPv4", addr.Address{Prefix: p("10.1.0.1/24")},
			"inet 10.1.0.1/24 scope global eth0 valid_lft forever preferred_lft forever", true},
		{"IPv4 of a host", addr.Address{Prefix: p("10.1.0.1/32")},
			"inet 10.1.0.1/32 scope global eth0 valid_lft forever preferred_lft forever", false},
		{"IPv4 with flags for IPv6", addr.Address{Prefix: p("10.1.0.1/24"), Flags: unix.IFA_F_NODAD | unix.IFA_F_OPTIMISTIC},
			"inet 10.1.0.1/24 scope global eth0 valid_lft forever preferred_lft forever", true},
		{"broadcast, label and scope", addr.Address{Prefix: p("10.1.0.1/24"), Broadcast: a("10.1.0.255"), Label: "eth0:1", Scope: unix.RT_SCOPE_LINK},
			"inet 10.1.0.1/24 brd 10.1.0.255 scope link eth0:1 valid_lft forever preferred_lft forever", true},
		{"peer", addr.Address{Prefix: p("10.1.0.1/32"), Peer: a("10.2.0.1")},
			"inet 10.1.0.1 peer 10.2.0.1/32 scope global eth0 valid_lft forever preferred_lft forever", true},
		{"without its route", addr.Address{Prefix: p("10.1.0.1/24"), Flags: unix.IFA_F_NOPREFIXROUTE},
			"inet 10.1.0.1/24 scope global noprefixroute eth0 valid_lft forever preferred_lft forever", false},
		{"metric", addr.Address{Prefix: p("10.1.0.1/24"), Metric: 77},
			"inet 10.1.0.1/24 metric 77 scope global eth0 valid_lft forever preferred_lft forever", true},
		{"for a time", addr.Address{Prefix: p("10.1.0.1/24"), Valid: ptr(2 * time.Hour), Preferred: ptr(time.Hour)},
			"inet 10.1.0.1/24 scope global dynamic eth0 valid_lft …sec preferred_lft …sec", true},
		{"for a time, preferred all the while", addr.Address{Prefix: p("10.1.0.1/24"), Valid: ptr(time.Hour)},
			"inet 10.1.0.1/24 scope global dynamic eth0 valid_lft …sec preferred_lft …sec", true},
		{"deprecated", addr.Address{Prefix: p("10.1.0.1/24"), Preferred: ptr(time.Duration(0))},
			"inet 10.1.0.1/24 scope global deprecated eth0 valid_lft forever preferred_lft forever", true},
		{"protocol", addr.Address{Prefix: p("10.1.0.1/24"), Protocol: 't'},
			"inet 10.1.0.1/24 scope global eth0 valid_lft forever preferred_lft forever", true},
		{"IPv6", addr.Address{Prefix: p("fd01::1/64"), Flags: unix.IFA_F_NODAD},
			"inet6 fd01::1/64 scope global nodad valid_lft forever preferred_lft forever", true},
		{"IPv6 link-local", addr.Address{Prefix: p("fe80::1/64"), Flags: unix.IFA_F_NODAD},
			"inet6 fe80::1/64 scope link nodad valid_lft forever preferred_lft forever", true},
		{"IPv6 with fields for IPv4", addr.Address{Prefix: p("fd01::1/64"), Flags: unix.IFA_F_NODAD, Label: "eth0:1", Broadcast: a("10.0.0.1"), Scope: unix.RT_SCOPE_HOST},
			"inet6 fd01::1/64 scope global nodad valid_lft forever preferred_lft forever", true},
		{"IPv6 peer", addr.Address{Prefix: p("fd01::1/128"), Peer: a("fd02::1"), Flags: unix.IFA_F_NODAD},
			"inet6 fd01::1 peer fd02::1/128 scope global nodad valid_lft forever preferred_lft forever", true},
		{"IPv6 without its route", addr.Address{Prefix: p("fd01::1/64"), Flags: unix.IFA_F_NODAD | unix.IFA_F_NOPREFIXROUTE},
			"inet6 fd01::1/64 scope global nodad noprefixroute valid_lft forever preferred_lft forever", false},
		{"IPv6 metric", addr.Address{Prefix: p("fd01::1/64"), Flags: unix.IFA_F_NODAD, Metric: 77},
			"inet6 fd01::1/64 metric 77 scope global nodad valid_lft forever preferred_lft forever", true},
		{"IPv6 for a time", addr.Address{Prefix: p("fd01::1/64"), Flags: unix.IFA_F_NODAD, Valid: ptr(2 * time.Hour), Preferred: ptr(time.Hour)},
			"inet6 fd01::1/64 scope global nodad dynamic valid_lft …sec preferred_lft …sec", true},
		{"IPv6 home address", addr.Address{Prefix: p("fd01::1/64"), Flags: unix.IFA_F_NODAD | unix.IFA_F_HOMEADDRESS},
			"inet6 fd01::1/64 scope global nodad home valid_lft forever preferred_lft forever", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.a.Link = h.eth0
			defer h.c.Remove(t.Context(), tt.a)
			changed, err := h.c.Ensure(t.Context(), tt.a)
			must.That(t, changed && err == nil, "Ensure: changed %t, %v, want a change", changed, err)
			expect.NoDiff(t, cmp.Diff([]string{tt.shown}, h.shown(t)), "ip address")
			if got := h.routes(t); strings.Contains(got, "dev eth0") != tt.routed {
				t.Errorf("routed %t, want %t:\n%s", !tt.routed, tt.routed, got)
			}
			h.mustList(t, tt.a)
			if changed, err := h.c.Ensure(t.Context(), tt.a); (changed && tt.a.Valid == nil) || err != nil {
				t.Errorf("Ensure again: changed %t, %v, want no change", changed, err)
			}
			expect.Is(t, h.c.Add(t.Context(), tt.a), fs.ErrExist, "adding it again")
			expect.Success(t, h.c.Replace(t.Context(), tt.a), "replacing it by itself")
			for range 2 { // what is not there is success
				must.Succeed(t, h.c.Remove(t.Context(), tt.a))
				got := h.shown(t)
				expect.That(t, len(got) == 0, "left after Remove: %q", got)
			}
		})
	}
}

// mustList compares the only address of eth0 with what was asked for.
func (h host) mustList(t *testing.T, want addr.Address) {
	t.Helper()
	list, err := h.c.List(t.Context(), addr.Filter{Link: h.eth0})
	must.That(t, err == nil && len(list) == 1, "listed %v, %v, want one", list, err)
	got := list[0]
	if !want.Prefix.Addr().Is4() {
		want.Label, want.Broadcast, want.Scope = "", netip.Addr{}, got.Scope
		if got.Metric == 256 && want.Metric == 0 {
			got.Metric = 0 // the default of IPv6, which newer kernels spell out
		}
	} else {
		want.Flags &= unix.IFA_F_NOPREFIXROUTE
		if want.Label == "" {
			want.Label = "eth0"
		}
	}
	if want.Valid == nil {
		want.Flags |= unix.IFA_F_PERMANENT
	} else if want.Preferred == nil {
		want.Preferred = want.Valid
	}
	if want.Preferred != nil && *want.Preferred == 0 {
		want.Flags |= unix.IFA_F_DEPRECATED
	}
	about := cmp.Comparer(func(a, b time.Duration) bool { return (a - b).Abs() <= 10*time.Minute })
	expect.NoDiff(t, cmp.Diff(want, got, about, cmpopts.EquateComparable(want.Prefix, want.Peer)), "listed")
}

func TestEnsureCorrectsAnAddress(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	p, a := nstest.Prefix, nstest.Addr
	base4 := addr.Address{Prefix: p("10.1.0.1/24"), Link: h.eth0}
	base6 := addr.Address{Prefix: p("fd01::1/64"), Link: h.eth0, Flags: unix.IFA_F_NODAD}
	with := func(a addr.Address, change func(*addr.Address)) addr.Address {
		change(&a)
		return a
	}
	for _, tt := range []struct {
		name        string
		there, want addr.Address
		shown       string
	}{
		{"flags", base4, with(base4, func(a *addr.Address) { a.Flags = unix.IFA_F_NOPREFIXROUTE }),
			"inet 10.1.0.1/24 scope global noprefixroute eth0 valid_lft forever preferred_lft forever"},
		{"flags away", with(base4, func(a *addr.Address) { a.Flags = unix.IFA_F_NOPREFIXROUTE }), base4,
			"inet 10.1.0.1/24 scope global eth0 valid_lft forever preferred_lft forever"},
		{"lifetime", base4, with(base4, func(a *addr.Address) { a.Valid = ptr(time.Hour) }),
			"inet 10.1.0.1/24 scope global dynamic eth0 valid_lft …sec preferred_lft …sec"},
		{"lifetime away", with(base4, func(a *addr.Address) { a.Valid = ptr(time.Hour) }), base4,
			"inet 10.1.0.1/24 scope global eth0 valid_lft forever preferred_lft forever"},
		{"preferred lifetime", base4, with(base4, func(a *addr.Address) { a.Preferred = ptr(time.Duration(0)) }),
			"inet 10.1.0.1/24 scope global deprecated eth0 valid_lft forever preferred_lft forever"},
		{"preferred lifetime without a valid one", with(base4, func(a *addr.Address) { a.Preferred = ptr(time.Duration(0)) }),
			with(base4, func(a *addr.Address) { a.Preferred = ptr(time.Hour) }),
			"inet 10.1.0.1/24 scope global eth0 valid_lft forever preferred_lft forever"},
		{"broadcast", base4, with(base4, func(a *addr.Address) { a.Broadcast = nstest.Addr("10.1.0.255") }),
			"inet 10.1.0.1/24 brd 10.1.0.255 scope global eth0 valid_lft forever preferred_lft forever"},
		{"label", base4, with(base4, func(a *addr.Address) { a.Label = "eth0:x" }),
			"inet 10.1.0.1/24 scope global eth0:x valid_lft forever preferred_lft forever"},
		{"scope", base4, with(base4, func(a *addr.Address) { a.Scope = unix.RT_SCOPE_LINK }),
			"inet 10.1.0.1/24 scope link eth0 valid_lft forever preferred_lft forever"},
		{"peer in the same network", with(base4, func(b *addr.Address) { b.Peer = a("10.1.0.9") }), with(base4, func(b *addr.Address) { b.Peer = a("10.1.0.8") }),
			"inet 10.1.0.1 peer 10.1.0.8/24 scope global eth0 valid_lft forever preferred_lft forever"},
		{"metric", base4, with(base4, func(a *addr.Address) { a.Metric = 5 }),
			"inet 10.1.0.1/24 metric 5 scope global eth0 valid_lft forever preferred_lft forever"},
		{"metric away", with(base4, func(a *addr.Address) { a.Metric = 5 }), base4,
			"inet 10.1.0.1/24 scope global eth0 valid_lft forever preferred_lft forever"},
		{"IPv6 prefix length", base6, with(base6, func(a *addr.Address) { a.Prefix = p("fd01::1/48") }),
			"inet6 fd01::1/48 scope global nodad valid_lft forever preferred_lft forever"},
		{"IPv6 flags", base6, with(base6, func(a *addr.Address) { a.Flags |= unix.IFA_F_NOPREFIXROUTE }),
			"inet6 fd01::1/64 scope global nodad noprefixroute valid_lft forever preferred_lft forever"},
		{"IPv6 flags away", with(base6, func(a *addr.Address) { a.Flags |= unix.IFA_F_HOMEADDRESS }), base6,
			"inet6 fd01::1/64 scope global nodad valid_lft forever preferred_lft forever"},
		{"IPv6 lifetime", base6, with(base6, func(a *addr.Address) { a.Valid = ptr(time.Hour) }),
			"inet6 fd01::1/64 scope global nodad dynamic valid_lft …sec preferred_lft …sec"},
		{"IPv6 metric", base6, with(base6, func(a *addr.Address) { a.Metric = 5 }),
			"inet6 fd01::1/64 metric 5 scope global nodad valid_lft forever preferred_lft forever"},
		{"IPv6 peer", base6, with(base6, func(b *addr.Address) { b.Peer = a("fd02::1") }),
			"inet6 fd01::1 peer fd02::1/64 scope global nodad valid_lft forever preferred_lft forever"},
		{"IPv6 address that was tentative", with(base6, func(a *addr.Address) { a.Flags = 0 }), base6,
			"inet6 fd01::1/64 scope global nodad valid_lft forever preferred_lft forever"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			defer h.c.Remove(t.Context(), tt.want)
			defer h.c.Remove(t.Context(), tt.there)
			must.Succeed(t, h.c.Add(t.Context(), tt.there))
			changed, err := h.c.Ensure(t.Context(), tt.want)
			must.That(t, changed && err == nil, "Ensure: changed %t, %v, want a change", changed, err)
			expect.NoDiff(t, cmp.Diff([]string{tt.shown}, h.shown(t)), "ip address")
			if tt.want.Valid != nil {
				return // time goes by
			}
			expect.Of(h.c.Ensure(t.Context(), tt.want)).Is(t, false, "Ensure again")
		})
	}
}

func TestEnsureLeavesWhatIsNotAskedFor(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	there := addr.Address{Prefix: nstest.Prefix("10.1.0.1/24"), Link: h.eth0, Label: "eth0:1",
		Broadcast: nstest.Addr("10.1.0.255"), Protocol: 9}
	must.Succeed(t, h.c.Add(t.Context(), there))
	expect.Of(h.c.Ensure(t.Context(), addr.Address{Prefix: there.Prefix, Link: there.Link})).Is(t, false, "Ensure")
	h.mustList(t, there)
}

// TestDuplicateIsTakenAgain has another host defend the address.
func TestDuplicateIsTakenAgain(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	other := nstest.New(t)
	eth1, _ := nstest.Veth(t, h.ns, "eth1", other, "eth0")
	nstest.Run(t, other, "ip", "address", "add", "fd01::1/64", "dev", "eth0", "nodad")
	nstest.WaitForAddresses(t, other)
	nstest.Sysctl(t, h.ns, "net/ipv6/conf/eth1/accept_dad", "1")
	watch, err := nl.Subscribe(unix.NETLINK_ROUTE, h.ns, unix.RTNLGRP_IPV6_IFADDR)
	must.Succeed(t, err)
	defer watch.Close()
	want := addr.Address{Prefix: nstest.Prefix("fd01::1/64"), Link: eth1}
	must.Succeed(t, h.c.Add(t.Context(), want))
	flags := func() uint32 {
		list, err := h.c.List(t.Context(), addr.Filter{Link: eth1, Family: unix.AF_INET6})
		must.That(t, err == nil && len(list) == 1, "listed %v, %v", list, err)
		return list[0].Flags
	}
	for flags()&unix.IFA_F_DADFAILED == 0 {
		must.Succeed(t, expect.Err(watch.Next(t.Context())))
	}
	want.Flags = unix.IFA_F_NODAD
	expect.Of(h.c.Ensure(t.Context(), want)).Is(t, true, "Ensure")
	got := flags()
	expect.That(t, got&(unix.IFA_F_DADFAILED|unix.IFA_F_TENTATIVE) == 0, "flags %#x, want a usable address", got)
}

func TestListIsFilteredByTheKernel(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	eth1, _ := nstest.Veth(t, h.ns, "eth1", h.ns, "peer1")
	for _, a := range []addr.Address{
		{Prefix: nstest.Prefix("10.1.0.1/24"), Link: h.eth0},
		{Prefix: nstest.Prefix("10.1.0.2/24"), Link: h.eth0},
		{Prefix: nstest.Prefix("fd01::1/64"), Link: h.eth0, Flags: unix.IFA_F_NODAD},
		{Prefix: nstest.Prefix("10.2.0.1/24"), Link: eth1},
		{Prefix: nstest.Prefix("fd02::1/64"), Link: eth1, Flags: unix.IFA_F_NODAD},
	} {
		must.Succeed(t, h.c.Add(t.Context(), a))
	}
	for _, tt := range []struct {
		name   string
		filter addr.Filter
		want   []string
		err    error
	}{
		{"all", addr.Filter{}, []string{"10.1.0.1/24", "10.1.0.2/24", "10.2.0.1/24", "fd01::1/64", "fd02::1/64"}, nil},
		{"a link", addr.Filter{Link: h.eth0}, []string{"10.1.0.1/24", "10.1.0.2/24", "fd01::1/64"}, nil},
		{"a family", addr.Filter{Family: unix.AF_INET6}, []string{"fd01::1/64", "fd02::1/64"}, nil},
		{"both", addr.Filter{Link: eth1, Family: unix.AF_INET}, []string{"10.2.0.1/24"}, nil},
		{"a link without any", addr.Filter{Link: 1}, nil, nil},
		{"a link that is not there", addr.Filter{Link: 4711}, nil, fs.ErrNotExist},
	} {
		t.Run(tt.name, func(t *testing.T) {
			list, err := h.c.List(t.Context(), tt.filter)
			var got []string
			for _, a := range list {
				got = append(got, a.Prefix.String())
			}
			expect.Is(t, err, tt.err, "List")
			expect.NoDiff(t, cmp.Diff(tt.want, got), "listed")
		})
	}
}

func TestAnAddressWithAPeerIsFoundWithAndWithoutIt(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	nstest.Run(t, h.ns, "ip", "address", "add", "10.1.0.1", "peer", "10.9.9.9/32", "dev", "eth0")
	for peer, want := range map[string]bool{"": true, "10.9.9.9": true, "10.9.9.8": false} {
		a := addr.Address{Prefix: nstest.Prefix("10.1.0.1/32"), Link: h.eth0}
		if peer != "" {
			a.Peer = nstest.Addr(peer)
		}
		expect.Of(h.c.Has(t.Context(), a)).Is(t, want, "Has with peer %q", peer)
	}
}

// Ensure by Prefix and Link alone must not make the address global, as which others' packets would have it as source.
func TestTheLoopbackAddressKeepsItsScope(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	nstest.Run(t, h.ns, "ip", "link", "set", "lo", "up")
	before := nstest.Run(t, h.ns, "ip", "-o", "-4", "address", "show", "dev", "lo")
	a := addr.Address{Prefix: nstest.Prefix("127.0.0.1/8"), Link: 1}
	expect.Of(h.c.Ensure(t.Context(), a)).Is(t, false, "Ensure of what the kernel made")
	must.Succeed(t, h.c.Remove(t.Context(), a))
	expect.Of(h.c.Ensure(t.Context(), a)).Is(t, true, "Ensure after it was removed")
	expect.Equal(t, nstest.Run(t, h.ns, "ip", "-o", "-4", "address", "show", "dev", "lo"), before, "addresses of lo")
}

func TestNothingIsAskedOfAnotherLinkThanTheOneThatIsNamed(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	must.Succeed(t, h.c.Add(t.Context(), addr.Address{Prefix: nstest.Prefix("10.1.0.1/24"), Link: h.eth0}))
	list, err := h.c.List(t.Context(), addr.Filter{Link: h.eth0 + 1<<32})
	expect.That(t, len(list) == 0, "a link that there cannot be has %v, %v", list, err)
	expect.Is(t, expect.Err(h.c.Has(t.Context(), addr.Address{Link: h.eth0})), tombolo.ErrInvalid, "Has of no address")
}

func TestRefusedAddressSaysWhy(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	p := nstest.Prefix
	for _, tt := range []struct {
		name string
		a    addr.Address
		want string
		is   error
	}{
		{"no such link", addr.Address{Prefix: p("10.1.0.1/24"), Link: 4711},
			"add address 10.1.0.1/24 on link 4711: no such device (kernel: ipv4: Device not found)", fs.ErrNotExist},
		{"no such link, IPv6", addr.Address{Prefix: p("fd01::1/64"), Link: 4711},
			"add address fd01::1/64 on link 4711: no such device (kernel: ipv6: Unable to find the interface)", fs.ErrNotExist},
		{"no link", addr.Address{Prefix: p("10.1.0.1/24")},
			"add address 10.1.0.1/24 on link 0: no such device (kernel: ipv4: Device not found)", fs.ErrNotExist},
		{"an index beyond those of links", addr.Address{Prefix: p("10.1.0.1/24"), Link: h.eth0 + 1<<32},
			fmt.Sprintf("add address 10.1.0.1/24 on link %d: no such device (kernel: ipv4: Device not found)", h.eth0+1<<32), fs.ErrNotExist},
		{"no address", addr.Address{Link: h.eth0},
			fmt.Sprintf("add address invalid Prefix on link %d: address and prefix length do not fit together", h.eth0), tombolo.ErrInvalid},
		{"prefix length of another family", addr.Address{Prefix: netip.PrefixFrom(nstest.Addr("10.1.0.1"), 33), Link: h.eth0},
			fmt.Sprintf("add address invalid Prefix on link %d: address and prefix length do not fit together", h.eth0), nil},
		{"no time to live", addr.Address{Prefix: p("10.1.0.1/24"), Link: h.eth0, Valid: ptr(-time.Second)},
			fmt.Sprintf("add address 10.1.0.1/24 on link %d: invalid argument (kernel: ipv4: address lifetime invalid)", h.eth0), unix.EINVAL},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := h.c.Add(t.Context(), tt.a)
			expect.That(t, err != nil && err.Error() == tt.want, "got  %v\nwant %s", err, tt.want)
			var opErr *tombolo.OpError
			expect.That(t, errors.As(err, &opErr) && (tt.is == nil || errors.Is(err, tt.is)),
				"%v is not an OpError that matches %v", err, tt.is)
		})
	}
}

func TestCloseLeavesASharedConnectionOpen(t *testing.T) {
	t.Parallel()
	conn := must.Of(nl.Dial(unix.NETLINK_ROUTE, nstest.New(t))).Get(t)
	defer conn.Close()
	c := addr.On(conn)
	must.Succeed(t, c.Close())
	expect.Success(t, expect.Err(c.List(t.Context(), addr.Filter{})), "after Close")
}

func TestDialWithoutConfigIsTheCallersNamespace(t *testing.T) {
	t.Parallel()
	nstest.RequireRoot(t)
	c := must.Of(addr.Dial(nil)).Get(t)
	defer c.Close()
	expect.Success(t, expect.Err(c.List(t.Context(), addr.Filter{})))
}

// While others come and go on a link, an address that is there all the time is in each list once, or the list is an
// error. Has and Ensure find it at any rate.
func TestListsAreWholeOrAnErrorWhileAddressesChange(t *testing.T) {
	t.Parallel()
	const n = 700 // in several parts
	for name, at := range map[string]func(side byte, i int) netip.Prefix{
		"IPv4": func(side byte, i int) netip.Prefix {
			return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, side, byte(i >> 8), byte(i)}), 32)
		},
		"IPv6": func(side byte, i int) netip.Prefix {
			return netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, side, 14: byte(i >> 8), 15: byte(i)}), 128)
		},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			h := newHost(t)
			ctx := t.Context()
			// In front of the others: the kernel puts a smaller scope first, and for IPv6 the newest.
			other := func(i int) addr.Address {
				return addr.Address{Prefix: at(2, i%50), Link: h.eth0, Flags: addr.NoDAD, Scope: unix.RT_SCOPE_HOST}
			}
			stays := func(i int) addr.Address { return addr.Address{Prefix: at(1, i), Link: h.eth0, Flags: addr.NoDAD} }
			for i := range n {
				must.Succeed(t, h.c.Add(ctx, stays(i)))
			}
			family := nl.FamilyOf(at(1, 0).Addr())
			list := func(f addr.Filter) {
				have, err := h.c.List(ctx, f)
				seen := map[netip.Prefix]int{}
				for _, a := range have {
					seen[a.Prefix]++
				}
				if errors.Is(err, tombolo.ErrInterrupted) {
					expect.That(t, len(seen) > n/2, "with the error came %d addresses", len(seen))
					return
				}
				must.Succeed(t, err)
				for i := range n {
					must.That(t, seen[at(1, i)] == 1, "%s is listed %d times", at(1, i), seen[at(1, i)])
				}
			}
			list(addr.Filter{Link: h.eth0})

			w := must.Of(addr.Dial(h.ns)).Get(t)
			defer w.Close()
			ended := make(chan error)
			stop := make(chan struct{})
			go func() {
				for i := 0; ; i++ {
					select {
					case <-stop:
						ended <- nil
						return
					default:
					}
					if err := errors.Join(w.Add(ctx, other(i)), w.Remove(ctx, other(i))); err != nil {
						ended <- err
						return
					}
				}
			}()
			for range 30 {
				list(addr.Filter{Link: h.eth0, Family: family})
				list(addr.Filter{Family: family})
			}
			for i := range n {
				has, err := h.c.Has(ctx, stays(i))
				expect.That(t, has && err == nil, "has %s: %t, %v", at(1, i), has, err)
				changed, err := h.c.Ensure(ctx, stays(i))
				expect.That(t, !changed && err == nil, "Ensure of %s: %t, %v", at(1, i), changed, err)
			}
			close(stop)
			must.Succeed(t, <-ended)
		})
	}
}

// What List returned, changed in one field and given to Ensure, changes that field in the kernel and no other, and a
// second Ensure changes nothing. Replace changes what its comment says.
func TestOneFieldOfAListedAddressIsChanged(t *testing.T) {
	t.Parallel()
	p, a := nstest.Prefix, nstest.Addr
	hour, minute := time.Hour, time.Minute
	type change struct {
		name     string
		replaces bool
		do       func(a *addr.Address)
	}
	both := []change{
		{"Valid", true, func(a *addr.Address) { a.Valid, a.Preferred = &hour, &hour }},
		{"Valid and Preferred", true, func(a *addr.Address) { a.Valid, a.Preferred = &hour, &minute }},
		{"for ever", true, func(a *addr.Address) { a.Valid, a.Preferred = nil, nil }},
		{"deprecated", true, func(a *addr.Address) { a.Valid, a.Preferred = nil, new(time.Duration) }},
		{"Protocol", true, func(a *addr.Address) { a.Protocol = 9 }},
		{"Metric", true, func(a *addr.Address) { a.Metric = 99 }},
		{"no prefix route", false, func(a *addr.Address) { a.Flags |= unix.IFA_F_NOPREFIXROUTE }},
		{"prefix route", false, func(a *addr.Address) { a.Flags &^= unix.IFA_F_NOPREFIXROUTE }},
	}
	for _, f := range []struct {
		name    string
		from    []addr.Address
		changes []change
	}{
		{"IPv4", []addr.Address{
			{Prefix: p("10.0.0.1/24")},
			{Prefix: p("10.0.0.1/24"), Peer: a("10.0.0.9"), Broadcast: a("10.0.0.255"), Label: "eth0:x", Scope: unix.RT_SCOPE_LINK,
				Flags: unix.IFA_F_NOPREFIXROUTE, Valid: &hour, Preferred: &minute, Protocol: 7, Metric: 50},
		}, []change{
			{"no Metric", true, func(a *addr.Address) { a.Metric = 0 }},
			{"Peer", false, func(p *addr.Address) { p.Peer = a("10.0.0.10") }},
			{"no Peer", false, func(a *addr.Address) { a.Peer = netip.Addr{} }},
			{"Broadcast", false, func(p *addr.Address) { p.Broadcast = a("10.0.0.128") }},
			{"Label", false, func(a *addr.Address) { a.Label = "eth0:y" }},
			{"Scope", false, func(a *addr.Address) { a.Scope = unix.RT_SCOPE_HOST }},
		}},
		{"IPv6", []addr.Address{
			{Prefix: p("fd00::1/64"), Flags: addr.NoDAD},
			{Prefix: p("fd00::1/64"), Peer: a("fd00::9"), Flags: addr.NoDAD | unix.IFA_F_NOPREFIXROUTE | unix.IFA_F_HOMEADDRESS,
				Valid: &hour, Preferred: &minute, Protocol: 7, Metric: 50},
		}, []change{
			{"prefix length", false, func(a *addr.Address) { a.Prefix = p("fd00::1/80") }},
			{"Peer", true, func(p *addr.Address) { p.Peer = a("fd00::10") }},
			{"no Metric", false, func(a *addr.Address) { a.Metric = 0 }},
			{"no Peer", false, func(a *addr.Address) { a.Peer = netip.Addr{} }},
			{"home address", true, func(a *addr.Address) { a.Flags ^= unix.IFA_F_HOMEADDRESS }},
		}},
	} {
		nstest.RunParallel(t, f.name, func(t *testing.T) {
			h := newHost(t)
			ctx := t.Context()
			only := func() addr.Address {
				t.Helper()
				list := must.Of(h.c.List(ctx, addr.Filter{Link: h.eth0, Family: nl.FamilyOf(f.from[0].Prefix.Addr())})).Get(t)
				must.That(t, len(list) == 1, "the link has %v", list)
				return list[0]
			}
			shown := func(a addr.Address) addr.Address { // without what follows from other fields
				a.Flags &^= unix.IFA_F_PERMANENT | unix.IFA_F_DEPRECATED | unix.IFA_F_NODAD
				for _, d := range []**time.Duration{&a.Valid, &a.Preferred} {
					if *d != nil {
						*d = new((**d + time.Minute - time.Second).Truncate(time.Minute))
					}
				}
				return a
			}
			for i, from := range f.from {
				for _, c := range slices.Concat(both, f.changes) {
					name := fmt.Sprint(i, " ", c.name)
					from.Link = h.eth0
					for _, write := range []func(a addr.Address) error{
						func(a addr.Address) error {
							_, err := h.c.Ensure(ctx, a)
							return err
						},
						func(a addr.Address) error { return h.c.Replace(ctx, a) },
					} {
						must.Succeed(t, h.c.Add(ctx, from), name)
						want := only()
						c.do(&want)
						must.Succeed(t, write(want), name)
						have := only()
						expect.Equal(t, cmp.Diff(shown(want), shown(have), cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})), "", "%s (-want +have)", name)
						changed, err := h.c.Ensure(ctx, want)
						expect.That(t, err == nil && (!changed || want.Valid != nil), "%s: another Ensure: %t, %v", name, changed, err)
						must.Succeed(t, h.c.Remove(ctx, only()), name)
						if !c.replaces {
							break
						}
					}
				}
			}
		})
	}
}
