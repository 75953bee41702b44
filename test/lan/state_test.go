package lan

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// object is one of ip's, as JSON.
type object = map[string]any

// show gives what ip shows.
func (l *lan) show(args string) []object {
	l.Helper()
	var list []object
	if text := l.hostRun("ip", strings.Fields("-json "+args)...); strings.TrimSpace(text) != "" {
		unmarshal(l, text, &list)
	}
	return list
}

// state is everything of the host's that a takeover touches and a restore is to put
// back, one line each: the NIC, and every address, route, rule and permanent
// neighbour, and the settings of the NIC.
func (l *lan) state() []string {
	l.Helper()
	var list []string
	for _, link := range l.show("-details link show dev " + nic) {
		list = append(list, line("link", keep(link, "address", "mtu", "flags", "master", "promiscuity", "inet6_addr_gen_mode")))
	}
	list = append(list, l.layer3(nil)...)
	// Some cannot be read, for good.
	settings := l.hostRun("sh", "-c", "cd /proc/sys/net && grep -sr . ipv4/conf/"+nic+" ipv6/conf/"+nic+" ipv4/neigh/"+nic+" ipv6/neigh/"+nic+"; true")
	for _, s := range strings.Fields(settings) {
		list = append(list, "sysctl "+s)
	}
	slices.Sort(list)
	return list
}

// layer3 are the addresses, routes, rules and permanent neighbours, sorted.
// A filter may change them, and drops what it answers false to.
func (l *lan) layer3(filter func(kind string, o object) bool) []string {
	l.Helper()
	var list []string
	add := func(kind string, o object) {
		if tidy(o); filter == nil || filter(kind, o) {
			list = append(list, line(kind, o))
		}
	}
	for _, link := range l.show("address show") {
		for _, a := range link["addr_info"].([]any) {
			a := a.(object)
			a["dev"] = link["ifname"]
			add("address", a)
		}
	}
	for _, family := range []string{"-4", "-6"} {
		for kind, args := range map[string]string{
			"route": " -details route show table all", "rule": " rule show", "neighbour": " neighbour show nud permanent",
		} {
			for _, o := range l.show(family + args) {
				add(kind+family, o)
			}
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// tidy replaces what runs with the clock, and drops what differs for a good reason.
func tidy(o object) {
	for _, key := range []string{"valid_life_time", "preferred_life_time", "expires"} {
		// 2³²-1 is for ever.
		if v, ok := o[key].(float64); ok && v != 1<<32-1 {
			o[key] = "some time"
		}
	}
	// The kernel's own comes again with the router's next advertisement. Until then
	// there is one in its place that stands back behind it.
	if o["protocol"] == "ra" && o["gateway"] != nil {
		delete(o, "metric")
	}
}

func keep(o object, keys ...string) object {
	kept := object{}
	for _, k := range keys {
		if v, ok := o[k]; ok {
			kept[k] = v
		}
	}
	return kept
}

func line(kind string, o object) string {
	text, err := json.Marshal(o) // with sorted keys
	if err != nil {
		panic(err) // it came as JSON
	}
	return kind + " " + string(text)
}

// moved is what layer 3 has of a link, with another name for the link, and without
// what differs between the NIC and the bridge by design: the protocol of connected
// routes, and what the kernel has for itself in table local.
func (l *lan) moved(link string) []string {
	l.Helper()
	const name = "uplink"
	return l.layer3(func(kind string, o object) bool {
		if o["table"] == "local" || o["type"] == "multicast" {
			return false
		}
		// Those that the kernel made for an address have no other sign of it than that
		// they are there.
		delete(o, "noprefixroute")
		delete(o, "nodad")
		if label, ok := o["label"].(string); ok {
			o["label"] = name + strings.TrimPrefix(label, link)
		}
		_, group := o["group"]
		return rename(o, link, name) || group || strings.HasPrefix(kind, "rule")
	})
}

// rename gives a link another name wherever ip's JSON has it, and says if it has.
func rename(v any, link, name string) bool {
	found := false
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			found = rename(e, link, name) || found
		}
	case object:
		for key, e := range v {
			if named := key == "dev" || key == "iif" || key == "oif"; named && e == link {
				v[key], found = name, true
			}
			found = rename(e, link, name) || found
		}
	}
	return found
}

// wantSame fails the test with what was and is not, and what is and was not.
func wantSame(t testing.TB, what string, before, after []string) {
	t.Helper()
	diff := cmp.Diff(before, after)
	expect.That(t, diff == "", "%s (-before +after):\n%s", what, diff)
}

// wantBare fails the test if a link has addresses of its own.
func (l *lan) wantBare(link string) {
	l.Helper()
	expect.Equal(l, l.hostRun("ip", "-o", "address", "show", "dev", link), "", "%s still has addresses", link)
}

// wantNoLink fails the test if a link is there.
func (l *lan) wantNoLink(link string) {
	l.Helper()
	out, err := nstest.Try(l.host.ns, "ip", "link", "show", "dev", link)
	expect.That(l, err != nil, "%s is there:\n%s", link, out)
}

// A state that says nothing would be the same after anything.
func TestStateShowsWhatChanges(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	before, moved := l.state(), l.moved(nic)
	wantSame(t, "nothing happened", before, l.state())
	for _, change := range []string{
		"address add 192.168.50.77/24 dev eth0", "address add fd50::77/64 dev eth0", "address add 192.168.50.78/24 dev eth0 label eth0:x",
		"route add 203.0.113.0/24 via " + routerIP4, "route add 203.0.113.0/24 dev eth0 table 7", "-6 route add fd77::/64 dev eth0 metric 5",
		"rule add iif eth0 table 7", "-6 rule add oif eth0 table 7",
		"neighbour add 192.168.50.3 lladdr 02:00:00:00:00:03 nud permanent dev eth0",
	} {
		ip(t, l.host.ns, change)
		now, nowMoved := l.state(), l.moved(nic)
		expect.That(t, !slices.Equal(before, now) && !slices.Equal(moved, nowMoved), "ip %s: not in the state", change)
		before, moved = now, nowMoved
	}
	for _, setting := range []string{"ipv4/conf/eth0/rp_filter", "ipv6/conf/eth0/accept_ra"} {
		nstest.Sysctl(t, l.host.ns, "net/"+setting, "2")
		if now := l.state(); slices.Equal(before, now) {
			t.Errorf("%s: not in the state", setting)
		} else {
			before = now
		}
	}
	text := fmt.Sprint(before)
	expect.That(t, !strings.Contains(text, "null"), "nulls in the state: %s", text)
}
