package route_test

import (
	"errors"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/golden"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/route"
)

func (h host) shownNexthops(tb testing.TB) []string {
	tb.Helper()
	var lines []string
	for line := range strings.Lines(nstest.Run(tb, h.ns, "ip", "nexthop", "show")) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	return lines
}

// nexthopObjects is every kind of them, with what ip-nexthop(8) prints.
func nexthopObjects(h host) []struct {
	name   string
	object route.NexthopObject
	shown  string
} {
	a := nstest.Addr
	return []struct {
		name   string
		object route.NexthopObject
		shown  string
	}{
		{"through a gateway", route.NexthopObject{ID: 7, Gateway: a("10.1.0.1"), Link: h.eth0}, "id 7 via 10.1.0.1 dev eth0 scope link proto 116"},
		{"of IPv6", route.NexthopObject{ID: 7, Gateway: a("fd01::1"), Link: h.eth0}, "id 7 via fd01::1 dev eth0 scope link proto 116"},
		{"to a link", route.NexthopObject{ID: 7, Family: unix.AF_INET, Link: h.eth0}, "id 7 dev eth0 scope host proto 116"},
		{"on the link", route.NexthopObject{ID: 7, Gateway: a("198.51.100.1"), Link: h.eth0, OnLink: true, Protocol: route.ProtocolStatic}, "id 7 via 198.51.100.1 dev eth0 scope link proto static onlink"},
		{"a blackhole", route.NexthopObject{ID: 7, Family: unix.AF_INET6, Blackhole: true}, "id 7 blackhole proto 116"},
		{"for a forwarding table", route.NexthopObject{ID: 7, Gateway: a("198.51.100.1"), FDB: true}, "id 7 via 198.51.100.1 scope link proto 116 fdb"},
		{"a group", route.NexthopObject{ID: 7, Group: []route.NexthopMember{{ID: 1, Weight: 1}, {ID: 2, Weight: 256}}}, "id 7 group 1/2,256 proto 116"},
	}
}

func TestNexthopObjectIsWhatItWasAskedToBe(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	nstest.Run(t, h.ns, "ip", "link", "set", "lo", "up") // where blackholes are
	nstest.Run(t, h.ns, "ip", "nexthop", "add", "id", "1", "via", "10.1.0.1", "dev", "eth0")
	nstest.Run(t, h.ns, "ip", "nexthop", "add", "id", "2", "via", "10.2.0.1", "dev", "eth1")
	for _, tt := range nexthopObjects(h) {
		t.Run(tt.name, func(t *testing.T) {
			if err := h.c.AddNexthopObject(tt.object); err != nil {
				t.Fatal(err)
			}
			if shown := h.shownNexthops(t); !slices.ContainsFunc(shown, func(s string) bool { return strings.HasPrefix(s, tt.shown) }) {
				t.Errorf("ip nexthop shows %q, want %q", shown, tt.shown)
			}
			list, err := h.c.NexthopObjects(route.NexthopFilter{})
			if err != nil {
				t.Fatal(err)
			}
			i := slices.IndexFunc(list, func(n route.NexthopObject) bool { return n.ID == 7 })
			if i < 0 {
				t.Fatalf("not in %v", list)
			}
			want := tt.object
			if want.Protocol == 0 {
				want.Protocol = route.ProtocolTombolo
			}
			if want.Family == 0 && want.Gateway.IsValid() {
				want.Family = unix.AF_INET
				if want.Gateway.Is6() {
					want.Family = unix.AF_INET6
				}
			}
			if diff := cmp.Diff(want, list[i], cmpopts.EquateComparable(nstest.Addr("::")), cmpopts.IgnoreFields(route.NexthopObject{}, "Flags")); diff != "" {
				t.Errorf("listed (-want +got):\n%s", diff)
			}
			if err := h.c.AddNexthopObject(tt.object); !errors.Is(err, fs.ErrExist) {
				t.Errorf("added again: %v, want %v", err, fs.ErrExist)
			}
			if err := h.c.DelNexthopObject(7); err != nil {
				t.Error(err)
			}
			if err := h.c.DelNexthopObject(7); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("deleted again: %v, want %v", err, fs.ErrNotExist)
			}
			if err := h.c.RemoveNexthopObject(7); err != nil {
				t.Errorf("removed again: %v", err)
			}
		})
	}
}

func TestResilientGroupIsListed(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	for _, args := range []string{"id 1 via 10.1.0.1 dev eth0", "id 2 group 1,3 type resilient buckets 4", "id 3 via 10.1.0.1 dev eth0 encap ip id 7 dst 10.9.9.9"} {
		if _, err := nstest.Try(h.ns, "ip", strings.Fields("nexthop add "+args)...); err != nil && !strings.Contains(args, "encap") {
			t.Fatal(err) // the kernel may have no such encapsulation
		}
	}
	list, err := h.c.NexthopObjects(route.NexthopFilter{})
	if err != nil || len(list) < 2 || !list[1].Resilient || !slices.Equal(list[1].Group, []route.NexthopMember{{ID: 1, Weight: 3}}) {
		t.Errorf("%v, %v", list, err)
	}
	if len(list) > 2 && len(list[2].Other) != 2 {
		t.Errorf("%v does not say how it encapsulates", list[2])
	}
}

func TestReplacedNexthopObjectTakesItsRoutesAlong(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	n := route.NexthopObject{ID: 7, Gateway: nstest.Addr("10.1.0.1"), Link: h.eth0}
	if err := h.c.ReplaceNexthopObject(n); err != nil {
		t.Fatal(err)
	}
	if err := h.c.Add(route.Route{Dst: nstest.Prefix("192.0.2.0/24"), NexthopID: 7}); err != nil {
		t.Fatal(err)
	}
	n.Gateway, n.Link = nstest.Addr("10.2.0.1"), h.eth1
	if err := h.c.ReplaceNexthopObject(n); err != nil {
		t.Fatal(err)
	}
	if r, err := h.c.Get(nstest.Addr("192.0.2.1")); err != nil || r.Link != h.eth1 {
		t.Errorf("the route goes by link %d, %v, want %d", r.Link, err, h.eth1)
	}
	list, err := h.c.NexthopObjects(route.NexthopFilter{Link: h.eth0})
	if err != nil || len(list) != 0 {
		t.Errorf("objects on the first link: %v, %v", list, err)
	}
	if list, err = h.c.NexthopObjects(route.NexthopFilter{Link: h.eth1}); err != nil || len(list) != 1 {
		t.Errorf("objects on the second link: %v, %v", list, err)
	}
}

func TestNexthopObjectsThatMakeNoSenseAreRefused(t *testing.T) {
	t.Parallel()
	c := route.On(nl.New(nltest.NewFake(nltest.AckAll)))
	for want, n := range map[string]route.NexthopObject{
		"needs a number":   {Gateway: nstest.Addr("10.0.0.1")},
		"needs its family": {ID: 1, Link: 3},
		"weight 65536":     {ID: 1, Group: []route.NexthopMember{{ID: 2, Weight: 65536}}},
		"what buckets":     {ID: 1, Group: []route.NexthopMember{{ID: 2}}, Resilient: true},
	} {
		if err := c.AddNexthopObject(n); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", n, err, want)
		}
	}
}

func TestKernelWithoutNexthopObjectsHasNone(t *testing.T) {
	t.Parallel()
	fake := nltest.NewFake(func(requests []netlink.Message) [][]byte {
		return [][]byte{nltest.Error(requests[0], unix.EOPNOTSUPP, "")}
	})
	list, err := route.On(nl.New(fake)).NexthopObjects(route.NexthopFilter{})
	if err != nil || len(list) != 0 {
		t.Errorf("%v, %v", list, err)
	}
}

func TestRouteThatIsMoreThanIsReadSaysSo(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	nstest.Run(t, h.ns, "ip", "route", "add", "192.0.2.0/24", "via", "10.1.0.1", "realms", "3/7")
	nstest.Run(t, h.ns, "ip", "route", "add", "198.51.100.0/24", "nexthop", "via", "10.1.0.1", "realms", "3/7", "nexthop", "via", "10.2.0.1")
	nstest.Run(t, h.ns, "ip", "route", "add", "203.0.113.0/24", "via", "10.1.0.1")
	list, err := h.c.List(route.Filter{Family: unix.AF_INET, Table: route.TableMain, Protocol: route.Protocol(unix.RTPROT_BOOT)})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range list {
		var want, got []uint16
		if r.Dst != nstest.Prefix("203.0.113.0/24") {
			want = []uint16{unix.RTA_FLOW}
		}
		others := r.Other
		for _, hop := range r.Nexthops {
			others = append(others, hop.Other...)
		}
		for _, a := range others {
			got = append(got, a.Type)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: others %v, want %v", r, got, want)
		}
	}
	if len(list) != 3 {
		t.Errorf("%d routes: %v", len(list), list)
	}
}

func TestNexthopObjectIsNamedInErrors(t *testing.T) {
	t.Parallel()
	for want, n := range map[string]route.NexthopObject{
		"7: via 10.0.0.1 on link 3": {ID: 7, Gateway: nstest.Addr("10.0.0.1"), Link: 3},
		"7: blackhole":              {ID: 7, Blackhole: true},
		"7: group 1 2":              {ID: 7, Group: []route.NexthopMember{{ID: 1}, {ID: 2}}},
	} {
		if got := n.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// copies are what nobody has put his name to, as old programs leave it.
func TestCopyKeepsThatNobodyMadeIt(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	conn, err := nl.Dial(unix.NETLINK_ROUTE, &nl.Config{NetNS: h.ns})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var b nl.Batch
	add(&b, "copy")(route.Route{Dst: nstest.Prefix("192.0.2.0/24"), Gateway: nstest.Addr("10.1.0.1")}.CopyMessage(false))
	add(&b, "copy")(route.Route{Dst: nstest.Prefix("192.0.2.0/24"), Gateway: nstest.Addr("10.2.0.1")}.CopyMessage(true))
	add(&b, "copy")(route.Route{Dst: nstest.Prefix("192.0.2.0/24"), Gateway: nstest.Addr("10.1.0.9")}.CopyMessage(false))
	add(&b, "copy")(route.Rule{Family: unix.AF_INET, Priority: 50, IIF: "eth0", Table: 7}.CopyMessage())
	add(&b, "copy")(route.NexthopObject{ID: 7, Gateway: nstest.Addr("10.1.0.1"), Link: h.eth0}.CopyMessage())
	if err := conn.Execute(&b); err != nil {
		t.Fatal(err)
	}
	want := []string{"unicast 192.0.2.0/24 via 10.1.0.9 dev eth0 proto unspec scope global", "unicast 192.0.2.0/24 via 10.2.0.1 dev eth1 proto unspec scope global"}
	if diff := cmp.Diff(want, h.shown(t, "192.0.2.0/24")); diff != "" {
		t.Errorf("routes (-want +got):\n%s", diff)
	}
	if shown := nstest.Run(t, h.ns, "ip", "rule", "show", "pref", "50"); strings.Contains(shown, "proto") || !strings.Contains(shown, "iif eth0 lookup 7") {
		t.Errorf("rule: %s", shown)
	}
	if shown := h.shownNexthops(t); !slices.Equal(shown, []string{"id 7 via 10.1.0.1 dev eth0 scope link"}) {
		t.Errorf("nexthop objects: %q", shown)
	}
	b.Reset()
	add(&b, "copy")(route.Route{Dst: nstest.Prefix("192.0.2.0/24"), Gateway: nstest.Addr("10.2.0.1")}.CopyMessage(true))
	if err := conn.Execute(&b); !errors.Is(err, fs.ErrExist) {
		t.Errorf("the very same: %v, want %v", err, fs.ErrExist)
	}
}

func TestNeighboursThatAreAnsweredForAreListedApart(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	want := []route.Neighbour{{Addr: nstest.Addr("10.1.0.9"), Link: h.eth0, Flags: route.Proxy}, {Addr: nstest.Addr("fd01::9"), Link: h.eth0, Flags: route.Proxy}}
	for _, n := range append(want, route.Neighbour{Addr: nstest.Addr("10.2.0.9"), Link: h.eth1, Flags: route.Proxy},
		route.Neighbour{Addr: nstest.Addr("10.1.0.8"), MAC: mac(8), Link: h.eth0}) {
		if err := h.c.AddNeighbour(n); err != nil {
			t.Fatal(err)
		}
	}
	list, err := h.c.Neighbours(route.NeighbourFilter{Link: h.eth0, Proxy: true})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, list, cmpopts.EquateComparable(nstest.Addr("::")), cmpopts.IgnoreFields(route.Neighbour{}, "State")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if list, err = h.c.Neighbours(route.NeighbourFilter{Link: h.eth0}); err != nil || slices.ContainsFunc(list, func(n route.Neighbour) bool { return n.Flags&route.Proxy != 0 }) {
		t.Errorf("the others: %v, %v", list, err)
	}
}

func TestRecordNexthopSeeds(t *testing.T) {
	if !golden.Updates() {
		t.Skip("records only with -update")
	}
	h := newHost(t)
	nstest.Run(t, h.ns, "ip", "link", "set", "lo", "up")
	tr, err := nl.Open(unix.NETLINK_ROUTE, &nl.Config{NetNS: h.ns})
	if err != nil {
		t.Fatal(err)
	}
	rec := nltest.Record(tr)
	conn := nl.New(rec)
	defer conn.Close()
	c := route.On(conn)
	for i, tt := range nexthopObjects(h) {
		tt.object.ID = uint32(i) + 1
		if err := c.AddNexthopObject(tt.object); err != nil {
			t.Fatal(err)
		}
	}
	rec.Received()
	if _, err := c.NexthopObjects(route.NexthopFilter{}); err != nil {
		t.Fatal(err)
	}
	for _, d := range rec.Received() {
		for i, m := range nltest.Split(d) {
			if m.Header.Type == unix.RTM_NEWNEXTHOP {
				nstest.SaveCorpus(t, "FuzzNexthopObject", "kernel-"+strings.ReplaceAll(nexthopObjects(h)[i].name, " ", "-"), m.Data)
			}
		}
	}
}
