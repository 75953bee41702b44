package lease

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/dhcp6"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) {
	os.Setenv(lockorder.Off, "1")
	nstest.Main(m)
}

func open(tb testing.TB) *Store {
	tb.Helper()
	return must.Of(Open(filepath.Join(tb.TempDir(), "leases"))).Get(tb)
}

// at is a moment long ago, in UTC as records have it.
func at(d time.Duration) time.Time { return time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC).Add(d) }

func to(dst, via string) dhcpc.Route {
	r := dhcpc.Route{Dst: netip.MustParsePrefix(dst)}
	if via != "" {
		r.Gateway = netip.MustParseAddr(via)
	}
	return r
}

func sampleLease() *dhcpc.Lease {
	return &dhcpc.Lease{
		Address: netip.MustParsePrefix("192.0.2.9/24"), Routes: []dhcpc.Route{to("0.0.0.0/0", "192.0.2.1")},
		DNS: []netip.Addr{netip.MustParseAddr("192.0.2.53")}, Domain: "example.org", Search: []string{"a.example", "b.example"},
		MTU: 1400, Server: netip.MustParseAddr("192.0.2.1"), ServerMAC: dhcpc.Hex{2, 0, 0, 0, 0, 1},
		Obtained: at(0), Renew: at(30 * time.Minute), Rebind: at(52 * time.Minute), Expire: at(time.Hour),
		MAC: dhcpc.Hex{2, 0, 0, 0, 0, 9}, ClientID: dhcpc.Hex{0, 'p', 'o', 'd'}, Options: map[uint8]dhcpc.Hex{42: {192, 0, 2, 5}},
	}
}

// sample is a record with every field set.
func sample() *Record {
	l := sampleLease()
	return &Record{
		State: Bound, Token: "00000000000000aa", Network: "lan", ContainerID: "abc123", IfName: "eth0", Pod: "default/web-0",
		NetNS: "/run/netns/cni-1", NetNSCookie: 1<<63 + 7, Boot: "11111111-2222-3333-4444-555555555555", Booted: at(-time.Hour),
		HostIf: "veth12345678901", Bridge: "br0", GatewayLink: "br0.20",
		Client: Client{
			MAC: l.MAC, Timeout: time.Minute, Sticky: true,
			Config: dhcpc.Config{ClientID: l.ClientID, HostName: "web-0", VendorClass: "tombolo", Address: netip.MustParseAddr("192.0.2.77"), Request: dhcpc.Hex{43, 66}, RequestOnly: true,
				Provide:   []dhcpc.Option{{Code: 51, Value: dhcpc.Hex{0, 0, 0, 60}}},
				Broadcast: true, RapidCommit: true, DetectConflicts: true, LinkMTU: 1500},
		},
		Lease: l,
		Policy: Policy{NoDefault: true, Gateway: netip.MustParseAddr("192.0.2.2"),
			Routes: []dhcpc.Route{to("10.0.0.0/8", "192.0.2.3")}, Priority: 50, IPv6: true},
		Applied: Applied{Addresses: nstest.Prefixes("192.0.2.9/24"), Routes: []dhcpc.Route{to("10.0.0.0/8", "192.0.2.3")}, MTU: 1300},
		Removed: Applied{Addresses: nstest.Prefixes("2001:db8::9/128"), Routes: []dhcpc.Route{to("172.16.0.0/12", "192.0.2.3")}, MTU: 1300},
		Formed:  nstest.Prefixes("2001:db8:1::9/64"),
		Six: &Six{DUID: dhcpc.Hex{0, 4, 1}, IAID: 1, Address: netip.MustParseAddr("2001:db8::9"), Release: dhcpc.Hex{8}, Checking: true, Error: "no answer", Note: "not renewed yet",
			Lease:     &dhcp6.Lease6{Address: netip.MustParseAddr("2001:db8::9"), Server: dhcpc.Hex{0, 3, 1}, DUID: dhcpc.Hex{0, 4, 1}, IAID: 1, Obtained: at(0)},
			Stateless: true, Information: &NameService{DNS: []netip.Addr{netip.MustParseAddr("2001:db8::53")}, Search: []string{"c.example"}, Until: at(time.Hour)}},
		Error: "no answer", Note: "not renewed yet",
	}
}

func lock(tb testing.TB, d *Store, r *Record) *LockedRecord {
	tb.Helper()
	h := must.Of(d.Lock(tb.Context(), r.Hash())).Get(tb)
	tb.Cleanup(func() { h.Close() })
	return h
}

// create writes a record and gives its lock up.
func create(tb testing.TB, d *Store, r *Record) {
	tb.Helper()
	h := lock(tb, d, r)
	must.Succeed(tb, h.Create(r))
	must.Succeed(tb, h.Close())
}

func names(tb testing.TB, d *Store) []string {
	tb.Helper()
	entries := must.Of(os.ReadDir(d.Path())).Get(tb)
	var list []string
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

func same(tb testing.TB, want, got any) {
	tb.Helper()
	compare := cmp.Options{
		cmp.AllowUnexported(Record{}, Six{}, dhcpc.Config{}),
		cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == ".Version" }, cmp.Ignore()),
		// A record that was read has its times from two clocks, which are read one after the other.
		cmp.Comparer(func(a, b time.Time) bool { return a.Sub(b).Abs() < time.Second }),
		cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
		cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	}
	expect.Equal(tb, cmp.Diff(want, got, compare), "", "want (-), got (+)")
}
