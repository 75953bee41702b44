package addr_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// routed is a host that accepts what the router at the other end of its eth1
// advertises, and that hears of it.
type routed struct {
	host
	eth1   int
	router host
	heard  *addr.Watch
}

const (
	hostLinkAddr   = "fe80::a"
	routerLinkAddr = "fe80::1"
)

func newRouted(t *testing.T) *routed {
	t.Helper()
	r := &routed{host: newHost(t), router: newHost(t)}
	r.eth1, _ = nstest.Veth(t, r.ns, "eth1", r.router.ns, "eth1")
	for name, value := range map[string]string{"accept_ra": "2", "accept_dad": "0"} {
		nstest.Sysctl(t, r.ns, "net/ipv6/conf/eth1/"+name, value)
	}
	nstest.Run(t, r.router.ns, "ip", "address", "add", routerLinkAddr+"/64", "dev", "eth1", "nodad")
	nstest.Run(t, r.ns, "ip", "address", "add", hostLinkAddr+"/64", "dev", "eth1", "nodad")
	nstest.WaitForAddresses(t, r.router.ns, r.ns)
	r.heard = must.Of(addr.Listen(r.ns)).Get(t)
	t.Cleanup(func() { r.heard.Close() })
	return r
}

// solicit has the kernel ask for advertisements, and form addresses that end as told.
func (r *routed) solicit(t *testing.T, token string) {
	t.Helper()
	nstest.Run(t, r.ns, "ip", "token", "set", token, "dev", "eth1")
}

// advertised waits, and not for ever.
func (r *routed) advertised(t *testing.T) (*addr.Advertised, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	return r.heard.Advertised(ctx, r.c, r.eth1)
}

// advertise sends a router advertisement (RFC 4861, section 4.2) to all nodes.
func (r *routed) advertise(t *testing.T, flags byte, options ...[]byte) {
	t.Helper()
	packet := []byte{134, 0, 0, 0, 64, flags, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0} // the checksum is the kernel's work
	packet = append(packet, slices.Concat(options...)...)
	fd := -1
	must.Succeed(t, r.router.ns.Do(func() error {
		var err error
		fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
		return err
	}))
	defer unix.Close(fd)
	link := nstest.Index(t, r.router.ns, "eth1")
	must.Succeed(t, errors.Join(
		unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255),
		unix.Bind(fd, &unix.SockaddrInet6{Addr: nstest.Addr(routerLinkAddr).As16(), ZoneId: uint32(link)}),
		unix.Sendto(fd, packet, 0, &unix.SockaddrInet6{Addr: nstest.Addr("ff02::1").As16(), ZoneId: uint32(link)}),
	))
}

const (
	managed    = 0x80 // the M flag of an advertisement
	onLink     = 0x80 // flags of a prefix
	autonomous = 0x40
)

// prefix is the option of a prefix with its lifetimes in seconds (section 4.6.2).
func prefix(p string, flags byte, valid, preferred uint32) []byte {
	parsed := nstest.Prefix(p)
	b := []byte{3, 4, byte(parsed.Bits()), flags}
	b = binary.BigEndian.AppendUint32(b, valid)
	b = binary.BigEndian.AppendUint32(b, preferred)
	b = append(b, 0, 0, 0, 0)
	return append(b, parsed.Addr().AsSlice()...)
}

// resolvers is the option of RFC 8106, section 5.1.
func resolvers(lifetime uint32, servers ...string) []byte {
	b := binary.BigEndian.AppendUint32([]byte{25, byte(1 + 2*len(servers)), 0, 0}, lifetime)
	for _, s := range servers {
		b = append(b, nstest.Addr(s).AsSlice()...)
	}
	return b
}

// search is the option of RFC 8106, section 5.2.
func search(lifetime uint32, domains ...string) []byte {
	b := binary.BigEndian.AppendUint32([]byte{31, 0, 0, 0}, lifetime)
	for _, d := range domains {
		for _, label := range strings.Split(d, ".") {
			b = append(append(b, byte(len(label))), label...)
		}
		b = append(b, 0)
	}
	for len(b)%8 != 0 {
		b = append(b, 0)
	}
	b[1] = byte(len(b) / 8)
	return b
}

func TestAddressesAreFormedFromAnAdvertisement(t *testing.T) {
	t.Parallel()
	const both = onLink | autonomous
	for _, tt := range []struct {
		name    string
		options [][]byte
		want    []string
		servers []string
		search  []string
	}{
		{name: "one prefix", options: [][]byte{prefix("2001:db8:1::/64", both, 3600, 1800)}, want: []string{"2001:db8:1::a/64"}},
		{name: "a prefix that is not on link", options: [][]byte{prefix("2001:db8:1::/64", autonomous, 3600, 1800)}, want: []string{"2001:db8:1::a/64"}},
		{
			name:    "two prefixes, in their order",
			options: [][]byte{prefix("2001:db8:1::/64", both, 3600, 1800), prefix("fd00:1::/64", both, 3600, 1800)},
			want:    []string{"2001:db8:1::a/64", "fd00:1::a/64"},
		},
		{
			name:    "a prefix that is going out of use comes last",
			options: [][]byte{prefix("2001:db8:1::/64", both, 3600, 0), prefix("2001:db8:2::/64", both, 3600, 1800)},
			want:    []string{"2001:db8:2::a/64", "2001:db8:1::a/64"},
		},
		{
			name:    "one of two prefixes can be used",
			options: [][]byte{prefix("2001:db8:1::/64", onLink, 3600, 1800), prefix("2001:db8:2::/64", both, 3600, 1800)},
			want:    []string{"2001:db8:2::a/64"},
		},
		{
			name:    "resolvers and search domains",
			options: [][]byte{prefix("2001:db8:1::/64", both, 3600, 1800), resolvers(600, "2001:db8::53", "fe80::1"), search(600, "home.example", "example")},
			want:    []string{"2001:db8:1::a/64"}, servers: []string{"2001:db8::53", "fe80::1"}, search: []string{"home.example", "example"},
		},
		{
			name:    "resolvers without a lifetime, and the same again",
			options: [][]byte{prefix("2001:db8:1::/64", both, 3600, 1800), resolvers(600, "2001:db8::53", "2001:db8::54"), resolvers(0, "2001:db8::53"), resolvers(60, "2001:db8::54")},
			want:    []string{"2001:db8:1::a/64"}, servers: []string{"2001:db8::54"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := newRouted(t)
			r.solicit(t, "::a")
			r.advertise(t, 0, tt.options...)
			got := must.Of(r.advertised(t)).Get(t)
			var prefixes, servers []string
			for _, a := range got.Addresses {
				prefixes = append(prefixes, a.Prefix.String())
				if a.Valid == nil || *a.Valid > time.Hour || a.Link != r.eth1 || a.Protocol != 2 || a.Flags&unix.IFA_F_TENTATIVE != 0 {
					t.Errorf("%+v, valid for %v", a, a.Valid)
				}
			}
			for _, s := range got.Servers {
				servers = append(servers, s.String())
			}
			diff := cmp.Diff([][]string{tt.want, tt.servers, tt.search}, [][]string{prefixes, servers, got.Search})
			expect.That(t, diff == "", "addresses, servers and search domains (-want +got):\n%s", diff)
		})
	}
}

func TestAddressThatWasThereBeforeIsTaken(t *testing.T) {
	t.Parallel()
	r := newRouted(t)
	r.solicit(t, "::a")
	r.advertise(t, 0, prefix("2001:db8:1::/64", autonomous, 3600, 1800))
	must.Succeed(t, expect.Err(r.advertised(t)))
	late := must.Of(addr.Listen(r.ns)).Get(t)
	defer late.Close()
	got, err := late.Advertised(t.Context(), r.c, r.eth1)
	expect.That(t, err == nil && len(got.Addresses) == 1, "got %+v, %v", got, err)
}

func TestAddressOfAnotherOriginIsNotTaken(t *testing.T) {
	t.Parallel()
	r := newRouted(t)
	r.solicit(t, "::a")
	for _, a := range []addr.Address{
		{Prefix: nstest.Prefix("2001:db8:9::1/64"), Flags: unix.IFA_F_NODAD},
		{Prefix: nstest.Prefix("2001:db8:9::2/64"), Flags: unix.IFA_F_NODAD, Valid: ptr(time.Hour)},
	} {
		a.Link = r.eth1
		must.Succeed(t, r.c.Add(t.Context(), a))
	}
	r.advertise(t, 0, prefix("2001:db8:1::/64", autonomous, 3600, 1800))
	got, err := r.advertised(t)
	if err != nil || len(got.Addresses) != 1 || got.Addresses[0].Prefix != nstest.Prefix("2001:db8:1::a/64") {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestAddressIsWaitedForUntilItIsKnownToBeUnique(t *testing.T) {
	t.Parallel()
	r := newRouted(t)
	nstest.Sysctl(t, r.ns, "net/ipv6/conf/eth1/accept_dad", "1")
	r.solicit(t, "::a")
	nstest.Run(t, r.router.ns, "ip", "address", "add", "2001:db8:1::a/64", "dev", "eth1", "nodad")
	nstest.WaitForAddresses(t, r.router.ns)
	// One is a duplicate, the other is not.
	r.advertise(t, 0, prefix("2001:db8:1::/64", autonomous, 3600, 1800), prefix("2001:db8:2::/64", autonomous, 3600, 1800))
	got, err := r.advertised(t)
	if err != nil || len(got.Addresses) != 1 || got.Addresses[0].Prefix != nstest.Prefix("2001:db8:2::a/64") {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestUsableAddressAloneIsNotEnoughWhileAnotherIsBeingChecked(t *testing.T) {
	t.Parallel()
	r := newRouted(t)
	r.solicit(t, "::a")
	r.advertise(t, 0, prefix("2001:db8:1::/64", autonomous, 3600, 1800))
	must.Succeed(t, expect.Err(r.advertised(t)))
	nstest.Sysctl(t, r.ns, "net/ipv6/conf/eth1/accept_dad", "1")
	nstest.Sysctl(t, r.ns, "net/ipv6/conf/eth1/dad_transmits", "3")
	through := r.witness(t)
	r.advertise(t, 0, prefix("2001:db8:2::/64", autonomous, 3600, 1800), resolvers(600, "2001:db8::53"))
	through()
	got := must.Of(r.advertised(t)).Get(t)
	var prefixes []string
	for _, a := range got.Addresses {
		prefixes = append(prefixes, a.Prefix.String())
	}
	expect.NoDiff(t, cmp.Diff([]string{"2001:db8:1::a/64", "2001:db8:2::a/64"}, prefixes), "addresses")
}

func TestWaitForAnAdvertisementSaysWhatItHeard(t *testing.T) {
	t.Parallel()
	anyResolver := resolvers(600, "2001:db8::53")
	for _, tt := range []struct {
		name string
		send func(*testing.T, *routed)
		want error
		text string
	}{
		{"nothing", nil, addr.ErrNoRouter, "no router advertisement came"},
		{"a router without prefixes", func(t *testing.T, r *routed) { r.advertise(t, 0, anyResolver) },
			addr.ErrNoPrefix, "routers advertised no prefix to form an address from: "},
		{"a router that leaves it to DHCPv6", func(t *testing.T, r *routed) {
			r.advertise(t, managed, prefix("2001:db8:1::/64", onLink, 3600, 1800), anyResolver)
		}, addr.ErrNoPrefix, "no prefix to form an address from; they say that addresses are given by DHCPv6"},
		{"a prefix of another length", func(t *testing.T, r *routed) {
			r.advertise(t, 0, prefix("2001:db8::/56", onLink|autonomous, 3600, 1800), anyResolver)
		}, addr.ErrNoPrefix, "no prefix to form an address from"},
		{"a prefix that is over", func(t *testing.T, r *routed) {
			r.advertise(t, 0, prefix("2001:db8:1::/64", onLink|autonomous, 0, 0), anyResolver)
		}, addr.ErrNoPrefix, "no prefix to form an address from"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := newRouted(t)
			r.solicit(t, "::a")
			if tt.send != nil {
				through := r.witness(t)
				tt.send(t, r)
				through()
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			_, err := r.heard.Advertised(ctx, r.c, r.eth1)
			expect.That(t, errors.Is(err, tt.want) && errors.Is(err, context.Canceled),
				"error is %v, want one that matches %v and %v", err, tt.want, context.Canceled)
			expect.That(t, err != nil && strings.Contains(err.Error(), tt.text),
				"error %q does not say %q", err, tt.text)
		})
	}
}

// witness hears when the kernel is through with an advertisement that has resolvers,
// which it announces last.
func (r *routed) witness(t *testing.T) (through func()) {
	t.Helper()
	w := must.Of(nl.Subscribe(unix.NETLINK_ROUTE, r.ns, unix.RTNLGRP_ND_USEROPT)).Get(t)
	t.Cleanup(func() { w.Close() })
	return func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		must.Succeed(t, expect.Err(w.Next(ctx)), "the advertisement did not arrive")
	}
}

func TestDuplicateOfAnAdvertisedAddressIsAnError(t *testing.T) {
	t.Parallel()
	r := newRouted(t)
	nstest.Sysctl(t, r.ns, "net/ipv6/conf/eth1/accept_dad", "1")
	r.solicit(t, "::a")
	nstest.Run(t, r.router.ns, "ip", "address", "add", "2001:db8:1::a/64", "dev", "eth1", "nodad")
	nstest.WaitForAddresses(t, r.router.ns)
	r.advertise(t, 0, prefix("2001:db8:1::/64", autonomous, 3600, 1800))
	_, err := r.advertised(t)
	expect.That(t, errors.Is(err, addr.ErrDuplicate) && strings.Contains(fmt.Sprint(err), "2001:db8:1::a/64"),
		"error is %v, want %v of the address", err, addr.ErrDuplicate)
}

func TestAdvertisedAddressIsFoundThoughAnnouncementsAreLost(t *testing.T) {
	t.Parallel()
	r := newRouted(t)
	r.solicit(t, "::a")
	s := &settling{host: r.host}
	s.eth1 = r.eth1
	s.flood(t)
	r.advertise(t, 0, prefix("2001:db8:1::/64", autonomous, 3600, 1800))
	got, err := r.advertised(t)
	expect.That(t, err == nil && len(got.Addresses) == 1, "got %+v, %v", got, err)
}

func TestWaitForAnAdvertisementEndsWithTheLink(t *testing.T) {
	t.Parallel()
	r := newRouted(t)
	nstest.Run(t, r.ns, "ip", "link", "del", "eth1")
	expect.Is(t, expect.Err(r.advertised(t)), fs.ErrNotExist)
}

func TestAdvertisementOnAnotherLinkIsNotTaken(t *testing.T) {
	t.Parallel()
	r := newRouted(t)
	r.solicit(t, "::a")
	through := r.witness(t)
	r.advertise(t, 0, prefix("2001:db8:1::/64", autonomous, 3600, 1800), resolvers(600, "2001:db8::53"))
	through()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	expect.Is(t, expect.Err(r.heard.Advertised(ctx, r.c, r.eth0)), addr.ErrNoRouter)
}
