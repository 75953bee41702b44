package route_test

import (
	"errors"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/route"
	"golang.org/x/sys/unix"
)

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
