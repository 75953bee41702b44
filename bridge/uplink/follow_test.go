package uplink_test

import (
	"encoding/json"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// renumbering is what becomes of the host's address and router on a link.
type renumbering struct {
	name string
	// change is what an administrator, or the keeper of a lease, does, with DEV in place
	// of the link; undone is what a network manager gives the NIC that knows of it.
	change, undone []string
	addresses      []string // of that family, afterwards
	routers        []string // of the default routes
	family         string
}

func renumberings() []renumbering {
	return []renumbering{
		{
			name: "another address of the network, and another router", family: "-4",
			change:    []string{"addr del 10.0.0.5/24 dev DEV", "addr add 10.0.0.6/24 brd + dev DEV", "route add default via 10.0.0.2 dev DEV"},
			undone:    []string{"addr add 10.0.0.6/24 brd + dev DEV", "route add default via 10.0.0.2 dev DEV metric 100"},
			addresses: []string{"10.0.0.6/24"}, routers: []string{"10.0.0.2"},
		},
		{
			name: "another network", family: "-4",
			change:    []string{"addr add 10.7.0.5/16 brd + dev DEV", "route replace default via 10.7.0.1 dev DEV", "addr del 10.0.0.5/24 dev DEV"},
			undone:    []string{"addr add 10.7.0.5/16 brd + dev DEV", "route add default via 10.7.0.1 dev DEV metric 100"},
			addresses: []string{"10.7.0.5/16"}, routers: []string{"10.7.0.1"},
		},
		{
			name: "one address less", family: "-4",
			change:    []string{"addr add 10.0.0.6/24 dev DEV", "addr del 10.0.0.5/24 dev DEV"},
			undone:    []string{"addr add 10.0.0.6/24 dev DEV", "route add default via 10.0.0.1 dev DEV"},
			addresses: []string{"10.0.0.6/24"}, routers: []string{"10.0.0.1"},
		},
		{
			name: "another router at another metric", family: "-4",
			change:    []string{"route add default via 10.0.0.2 dev DEV metric 50", "route del default via 10.0.0.1 dev DEV"},
			undone:    []string{"addr add 10.0.0.5/24 brd + dev DEV", "route add default via 10.0.0.2 dev DEV metric 50"},
			addresses: []string{"10.0.0.5/24"}, routers: []string{"10.0.0.2"},
		},
		{
			name: "another address of IPv6", family: "-6",
			change:    []string{"addr add fd00::6/64 dev DEV nodad", "addr del fd00::5/64 dev DEV", "-6 route replace default via fd00::2 dev DEV"},
			undone:    []string{"addr add fd00::6/64 dev DEV nodad", "-6 route add default via fd00::2 dev DEV metric 100"},
			addresses: []string{"fd00::6/64"}, routers: []string{"fd00::2"},
		},
	}
}

// do runs the commands for a link.
func (r *renumbering) do(tb testing.TB, l *lan, commands []string, link string) {
	tb.Helper()
	for _, c := range commands {
		run(tb, l.host, strings.ReplaceAll(c, "DEV", link))
	}
	settle(tb, l.host)
}

// wants fails the test unless one link has just what there is to be.
func (r *renumbering) wants(tb testing.TB, l *lan, link, when string) {
	tb.Helper()
	var addresses, routers []string
	out := nstest.Run(tb, l.host, "ip", r.family, "-o", "addr", "show", "scope", "global")
	for _, m := range regexp.MustCompile(`(?m)^\d+: (\S+) +inet6? (\S+)`).FindAllStringSubmatch(out, -1) {
		if m[1] != link {
			tb.Errorf("%s: %s has %s, want it on %s", when, m[1], m[2], link)
		}
		addresses = append(addresses, m[2])
	}
	out = nstest.Run(tb, l.host, "ip", r.family, "route", "show", "default")
	for _, m := range regexp.MustCompile(`(?m)^default via (\S+) dev (\S+)`).FindAllStringSubmatch(out, -1) {
		if m[2] != link {
			tb.Errorf("%s: the default route is by %s, want it by %s", when, m[2], link)
		}
		routers = append(routers, m[1])
	}
	expect.NoDiff(tb, cmp.Diff(r.addresses, addresses), "%s: addresses", when)
	expect.NoDiff(tb, cmp.Diff(r.routers, routers), "%s: routers", when)
}

// newRenumbered takes the NIC over, and then changes what the host has on the bridge: the
// record is of the day of the takeover.
func (r *renumbering) newRenumbered(t *testing.T) (*lan, *uplink.Record, *memory) {
	t.Helper()
	l := newLAN(t)
	run(t, l.router, "addr add 10.7.0.1/16 dev eth0")
	// Without it the kernel takes the other addresses of the network along.
	nstest.Sysctl(t, l.host, "net/ipv4/conf/all/promote_secondaries", "1")
	rec, j := take(t, l, toBridge())
	r.do(t, l, r.change, "br0")
	r.wants(t, l, "br0", "changed")
	return l, rec, j
}

// present brings a record up to date as the keeper does.
func present(tb testing.TB, l *lan, rec *uplink.Record, j *memory) *uplink.Record {
	tb.Helper()
	_, now, err := l.conn.Check(tb.Context(), rec)
	if err == nil {
		err = now.Save(j)
	}
	must.Succeed(tb, err)
	b, err := j.load()
	if err == nil {
		rec, err = uplink.ParseRecord(b)
	}
	must.Succeed(tb, err)
	return rec
}

func TestWhatWasChangedOnTheBridgeIsLeft(t *testing.T) {
	t.Parallel()
	for _, r := range renumberings() {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			l, rec, j := r.newRenumbered(t)
			l.mustBeTaken(t, "changed", rec)
			expect.Of(l.conn.Mend(t.Context(), rec, j)).Is(t, false, "mend what was changed on purpose")
			r.wants(t, l, "br0", "not mended")
			must.Succeed(t, l.conn.Restore(t.Context(), rec, j))
			r.wants(t, l, "eth0", "given back")
		})
	}
}

// What a network manager does after the host was renumbered. With flushed the bridge has
// nothing left of it, and the record alone knows.
func TestAMendRevivesNoOldAddressAndNoOldRouter(t *testing.T) {
	t.Parallel()
	for _, r := range renumberings() {
		for _, tt := range []struct {
			name   string
			undo   []string
			onNIC  bool // and it gives the NIC what it knows
			record bool // it takes a record that is up to date
		}{
			{name: "no port", undo: []string{"link set eth0 nomaster"}},
			{name: "the bridge is deleted, and the NIC has all", undo: []string{"link del br0"}, onNIC: true},
			{name: "the bridge is deleted", undo: []string{"link del br0"}, record: true},
			{name: "no port, and nothing on the bridge", undo: []string{"link set eth0 nomaster", "addr flush dev br0"}, record: true},
		} {
			t.Run(r.name+", "+tt.name, func(t *testing.T) {
				t.Parallel()
				l, rec, j := r.newRenumbered(t)
				if tt.record {
					rec = present(t, l, rec, j)
				}
				run(t, l.host, tt.undo...)
				if tt.onNIC {
					r.do(t, l, r.undone, "eth0")
				}
				changed, err := l.conn.Mend(t.Context(), rec, j)
				must.That(t, changed && err == nil, "mend: %t, %v", changed, err)
				r.wants(t, l, "br0", "mended")
				l.mustBeTaken(t, "mended", rec)
				must.Succeed(t, l.conn.Restore(t.Context(), rec, j))
				r.wants(t, l, "eth0", "given back")
			})
		}
	}
}

// The bridge is gone with all that was on it, and the operator wants the NIC back.
func TestARestoreWithoutABridgeGivesWhatWasThereLast(t *testing.T) {
	t.Parallel()
	r := renumberings()[1]
	l, rec, j := r.newRenumbered(t)
	rec = present(t, l, rec, j)
	run(t, l.host, "link del br0")
	must.Succeed(t, l.conn.Restore(t.Context(), rec, j))
	r.wants(t, l, "eth0", "given back")
}

// An address that the NIC keeps for agents is no reason to give it to the bridge again.
func TestAnAddressThatTheNICKeptGoesWithTheBridges(t *testing.T) {
	t.Parallel()
	for _, followed := range []bool{false, true} {
		l := newLAN(t)
		u := toBridge()
		u.KeepAddress = true
		rec, j := take(t, l, u)
		run(t, l.host, "addr del 10.0.0.5/24 dev br0", "addr add 10.0.0.6/24 dev br0", "route add default via 10.0.0.1 dev br0")
		if followed {
			rec = present(t, l, rec, j)
		}
		expect.Of(l.conn.Mend(t.Context(), rec, j)).Is(t, true, "followed %t: mend", followed)
		l.mustBeTaken(t, "mended", rec)
		if out := nstest.Run(t, l.host, "ip", "-4", "addr"); strings.Contains(out, "10.0.0.5/24") || !strings.Contains(out, "10.0.0.6/24") {
			t.Errorf("followed %t: after it was mended:\n%s", followed, out)
		}
	}
}

// What was lost with nothing in its place comes back, though others are there.
func TestWhatWasNotReplacedComesBack(t *testing.T) {
	t.Parallel()
	l := newLAN(t, append(plainHost(), "addr add 10.0.0.77/24 dev eth0", "route add 172.16.0.0/12 via 10.0.0.2")...)
	rec, j := take(t, l, toBridge())
	rec = present(t, l, rec, j)
	taken := state(t, l.host)
	// As a network manager leaves it that knows of one address.
	run(t, l.host, "link del br0", "addr add 10.0.0.5/24 brd + dev eth0", "route add default via 10.0.0.1")
	changed, err := l.conn.Mend(t.Context(), rec, j)
	must.That(t, changed && err == nil, "mend: %t, %v", changed, err)
	l.mustReach(t, "mended")
	expect.NoDiff(t, cmp.Diff(comparableState(taken), comparableState(state(t, l.host))), "after it was mended")
}

func TestARecordIsBroughtUpToDate(t *testing.T) {
	t.Parallel()
	l := newLAN(t, append(plainHost(), "route add 172.16.0.0/12 via 10.0.0.1", "rule add iif eth0 table 9 pref 9")...)
	rec, j := take(t, l, toBridge())
	rec = present(t, l, rec, j)
	for _, tt := range []struct{ do, want string }{
		{"addr add 10.0.0.6/24 dev br0", `"10.0.0.6/24"`},
		{"addr add 10.0.0.7/24 dev br0 valid_lft 3600 preferred_lft 3600", `"10.0.0.7/24"`},
		{"route add 10.99.0.0/16 via 10.0.0.2", `"10.99.0.0/16"`},
		{"-6 route add fd99::/64 dev br0", `"fd99::/64"`},
		{"rule add oif br0 table 7 pref 7", `"OIF":"eth0"`},
	} {
		run(t, l.host, tt.do)
		next := present(t, l, rec, j)
		b := must.Of(json.Marshal(next.Before)).Get(t)
		expect.That(t, strings.Contains(string(b), tt.want), "%s: the record has no %s:\n%s", tt.do, tt.want, b)
		rec = next
	}
	want := []netip.Prefix{nstest.Prefix("10.0.0.5/24"), nstest.Prefix("10.0.0.6/24"), nstest.Prefix("10.0.0.7/24"), nstest.Prefix("fd00::5/64")}
	got := rec.HostAddresses()
	expect.That(t, slices.Equal(got, want), "the host's addresses: %v, want %v", got, want)
	taken := state(t, l.host)
	run(t, l.host, "link del br0")
	changed, err := l.conn.Mend(t.Context(), rec, j)
	must.That(t, changed && err == nil, "mend: %t, %v", changed, err)
	expect.NoDiff(t, cmp.Diff(comparableState(taken), comparableState(state(t, l.host))), "after it was mended")
}

// A record of something that is undone in part is left: it is what the mend goes by.
func TestARecordIsLeftWhileATakeoverIsUndone(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	rec, _ := take(t, l, toBridge())
	run(t, l.host, "addr add 10.0.0.6/24 dev br0", "link set eth0 nomaster")
	_, now, err := l.conn.Check(t.Context(), rec)
	expect.That(t, err == nil && now == rec, "the NIC is no port, and the record follows: %v", err)
	rec.State = uplink.Restoring
	_, _, err = l.conn.Check(t.Context(), rec)
	expect.That(t, err != nil, "a record of what is being given back follows")
}
