package uplink_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// lifetimes gives the seconds for which an address is valid and preferred; ok is false
// if it is not there.
func lifetimes(tb testing.TB, ns *netns.NS, link, address string) (valid, preferred int, ok bool) {
	tb.Helper()
	var shown []struct {
		Info []struct {
			Local     string
			Valid     int `json:"valid_life_time"`
			Preferred int `json:"preferred_life_time"`
		} `json:"addr_info"`
	}
	must.Succeed(tb, json.Unmarshal([]byte(nstest.Run(tb, ns, "ip", "-j", "addr", "show", "dev", link)), &shown))
	for _, l := range shown {
		for _, a := range l.Info {
			if a.Local == address {
				return a.Valid, a.Preferred, true
			}
		}
	}
	return 0, 0, false
}

// An address must not outlive its lease, nor end before.
func TestWhatIsPutBackLastsAsLongAsItWouldHave(t *testing.T) {
	t.Parallel()
	const passed, patient = 1000, 100 // seconds
	l := newLAN(t, append(plainHost(),
		"addr add 10.10.0.5/24 dev eth0 valid_lft 3600 preferred_lft 1800", "addr add fd00:3::5/64 dev eth0 nodad valid_lft 3600 preferred_lft 1800",
		"addr add 10.11.0.5/24 dev eth0 valid_lft 990 preferred_lft 990", "route add 172.16.0.0/12 via 10.11.0.1", "route add 172.0.0.0/12 via 10.0.0.1 src 10.11.0.5",
		"-6 route add fd55::/32 via fd00::1 expires 3600", "-6 route add fd56::/32 via fd00::1 expires 990")...)
	rec, j := take(t, l, toBridge())
	rec.Before.Time = rec.Before.Time.Add(-passed * time.Second)
	run(t, l.host, "link del br0")
	must.Succeed(t, l.conn.Restore(t.Context(), rec, j))
	near := func(what string, got, want int) {
		t.Helper()
		expect.That(t, got <= want && got >= want-patient, "%s: %d s, want %d s", what, got, want)
	}
	for _, a := range []string{"10.10.0.5", "fd00:3::5"} {
		valid, preferred, ok := lifetimes(t, l.host, "eth0", a)
		if !ok {
			t.Errorf("%s is not there", a)
			continue
		}
		near(a+" is valid for", valid, 3600-passed)
		near(a+" is preferred for", preferred, 1800-passed)
	}
	_, _, ok := lifetimes(t, l.host, "eth0", "10.11.0.5")
	expect.That(t, !ok, "an address is there again whose time is over")
	var routes []struct {
		Dst     string
		Expires int
	}
	err := json.Unmarshal([]byte(nstest.Run(t, l.host, "ip", "-6", "-j", "route", "show", "dev", "eth0")), &routes)
	must.That(t, err == nil, "%v", err)
	left := map[string]int{}
	for _, r := range routes {
		left[r.Dst] = r.Expires
	}
	near("fd55::/32 lasts", left["fd55::/32"], 3600-passed)
	_, ok = left["fd56::/32"]
	expect.That(t, !ok, "a route is there again whose time is over")
	if shown := nstest.Run(t, l.host, "ip", "route"); strings.Contains(shown, "10.11.0") || !strings.Contains(shown, "default via 10.0.0.1") {
		t.Errorf("routes are there that rest on the address, or others are not:\n%s", shown)
	}
	expect.Success(t, nstest.Ping(t, l.host, nstest.Addr("192.0.2.1")))
}

// A machine that has not been heard for long may have gone: the bridge is to ask before it relies on
// it. One that has been heard just now need not be asked.
func TestWhatIsKnownOfNeighboursComesAlongAsItIs(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	for address, state := range map[string]string{"10.0.0.77": "stale", "10.0.0.78": "reachable", "10.0.0.79": "noarp", "fd00::77": "stale"} {
		run(t, l.host, "neigh add "+address+" lladdr 02:00:00:00:00:77 dev eth0 nud "+state)
	}
	// What is not known, nobody needs.
	run(t, l.host, "neigh add 10.0.0.80 dev eth0 nud failed")
	rec, j := take(t, l, toBridge())
	shown := func(link string) map[string]string {
		list := map[string]string{}
		for line := range strings.Lines(nstest.Run(t, l.host, "ip", "neigh", "show", "nud", "all", "dev", link)) {
			f := strings.Fields(line)
			list[f[0]] = strings.ToLower(f[len(f)-1])
		}
		return list
	}
	mustHave := func(when string, have map[string]string) {
		t.Helper()
		for address, want := range map[string]string{"10.0.0.77": "stale", "fd00::77": "stale", "10.0.0.79": "noarp", "10.0.0.80": ""} {
			expect.Equal(t, have[address], want, "%s, %s", when, address)
		}
		// The kernel no longer takes it for reachable after half a minute or so.
		got := have["10.0.0.78"]
		expect.That(t, got == "reachable" || got == "stale", "%s, 10.0.0.78 is %q, want reachable", when, got)
	}
	mustHave("on the bridge", shown("br0"))
	must.Succeed(t, l.conn.Restore(t.Context(), rec, j))
	have := shown("eth0")
	if have["10.0.0.80"] == "failed" {
		delete(have, "10.0.0.80") // the NIC's own of before
	}
	mustHave("given back", have)
}
