package route_test

import (
	"errors"
	"io/fs"
	"net"
	"sort"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/route"
)

func mac(last byte) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 0, last} }

func (h host) shownNeighbours(tb testing.TB) []string {
	tb.Helper()
	var lines []string
	for line := range strings.Lines(nstest.Run(tb, h.ns, "ip", "neighbour", "show", "nud", "all")) {
		// Multicast and broadcast entries come and go by themselves.
		if line = strings.Join(strings.Fields(line), " "); !strings.HasSuffix(line, "NOARP") || strings.Contains(line, "02:00:00") {
			lines = append(lines, line)
		}
	}
	sort.Strings(lines)
	return lines
}

func TestNeighbourIsWhatItWasAskedToBe(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	a := nstest.Addr
	for _, tt := range []struct {
		name      string
		neighbour route.Neighbour
		shown     string
		state     route.State
	}{
		{"permanent unless told otherwise", route.Neighbour{Addr: a("10.1.0.9"), MAC: mac(9), Link: h.eth0},
			"10.1.0.9 dev eth0 lladdr 02:00:00:00:00:09 PERMANENT", route.Permanent},
		{"stale", route.Neighbour{Addr: a("10.1.0.9"), MAC: mac(8), Link: h.eth0, State: route.Stale},
			"10.1.0.9 dev eth0 lladdr 02:00:00:00:00:08 STALE", route.Stale},
		{"without ARP", route.Neighbour{Addr: a("10.1.0.9"), MAC: mac(9), Link: h.eth0, State: route.NoARP},
			"10.1.0.9 dev eth0 lladdr 02:00:00:00:00:09 NOARP", route.NoARP},
		{"learnt by a program", route.Neighbour{Addr: a("10.1.0.9"), MAC: mac(9), Link: h.eth0, State: route.Stale,
			Flags: route.ExternalLearned, Protocol: route.ProtocolTombolo},
			"10.1.0.9 dev eth0 lladdr 02:00:00:00:00:09 extern_learn STALE proto 116", route.Stale},
		{"IPv6", route.Neighbour{Addr: a("fd01::9"), MAC: mac(9), Link: h.eth0},
			"fd01::9 dev eth0 lladdr 02:00:00:00:00:09 PERMANENT", route.Permanent},
		{"IPv6 router", route.Neighbour{Addr: a("fe80::9"), MAC: mac(9), Link: h.eth1, State: route.Stale, Flags: route.Router},
			"fe80::9 dev eth1 lladdr 02:00:00:00:00:09 router STALE", route.Stale},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := h.c.AddNeighbour(tt.neighbour); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]string{tt.shown}, h.shownNeighbours(t)); diff != "" {
				t.Errorf("ip neighbour (-want +got):\n%s", diff)
			}
			if err := h.c.AddNeighbour(tt.neighbour); !errors.Is(err, fs.ErrExist) {
				t.Errorf("adding it again: %v, want %v", err, fs.ErrExist)
			}
			want := tt.neighbour
			want.State = tt.state
			got, err := h.c.Neighbour(want.Link, want.Addr)
			if diff := cmp.Diff(want, got, cmpopts.EquateComparable(want.Addr)); diff != "" || err != nil {
				t.Errorf("got, %v (-want +got):\n%s", err, diff)
			}
			list, err := h.c.Neighbours(route.NeighbourFilter{Link: want.Link, Family: family(want)})
			if diff := cmp.Diff([]route.Neighbour{want}, withoutMulticast(list), cmpopts.EquateComparable(want.Addr)); diff != "" || err != nil {
				t.Errorf("listed, %v (-want +got):\n%s", err, diff)
			}
			replaced := tt.neighbour
			replaced.MAC = mac(77)
			if err := h.c.ReplaceNeighbour(replaced); err != nil {
				t.Fatal(err)
			}
			if got, err := h.c.Neighbour(want.Link, want.Addr); err != nil || got.MAC.String() != replaced.MAC.String() {
				t.Errorf("replaced: MAC %s, %v, want %s", got.MAC, err, replaced.MAC)
			}
			if err := h.c.DelNeighbour(want); err != nil {
				t.Fatal(err)
			}
			if left := h.shownNeighbours(t); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
			if err := h.c.DelNeighbour(want); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("deleting it again: %v, want %v", err, fs.ErrNotExist)
			}
			if err := h.c.RemoveNeighbour(want); err != nil {
				t.Errorf("RemoveNeighbour of what is not there: %v", err)
			}
			if _, err := h.c.Neighbour(want.Link, want.Addr); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("Neighbour: %v, want %v", err, fs.ErrNotExist)
			}
		})
	}
}

func family(n route.Neighbour) uint8 {
	if n.Addr.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// withoutMulticast leaves out the entries that the kernel makes for the multicast
// that it sends itself.
func withoutMulticast(list []route.Neighbour) []route.Neighbour {
	var left []route.Neighbour
	for _, n := range list {
		if !n.Addr.IsMulticast() {
			left = append(left, n)
		}
	}
	return left
}

func TestNeighboursAreFilteredByTheKernel(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	a := nstest.Addr
	for _, n := range []route.Neighbour{
		{Addr: a("10.1.0.9"), MAC: mac(1), Link: h.eth0},
		{Addr: a("10.2.0.9"), MAC: mac(2), Link: h.eth1},
		{Addr: a("fd01::9"), MAC: mac(3), Link: h.eth0},
		{Addr: a("fd02::9"), MAC: mac(4), Link: h.eth1},
	} {
		if err := h.c.AddNeighbour(n); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name   string
		filter route.NeighbourFilter
		want   []string
	}{
		{"all", route.NeighbourFilter{}, []string{"10.1.0.9", "10.2.0.9", "fd01::9", "fd02::9"}},
		{"a link", route.NeighbourFilter{Link: h.eth1}, []string{"10.2.0.9", "fd02::9"}},
		{"a family", route.NeighbourFilter{Family: unix.AF_INET6}, []string{"fd01::9", "fd02::9"}},
		{"both", route.NeighbourFilter{Family: unix.AF_INET, Link: h.eth0}, []string{"10.1.0.9"}},
		{"no such link", route.NeighbourFilter{Link: 4711}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			list, err := h.c.Neighbours(tt.filter)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, n := range withoutMulticast(list) {
				got = append(got, n.Addr.String())
			}
			if diff := cmp.Diff(tt.want, got, cmpopts.SortSlices(strings.Compare)); diff != "" {
				t.Errorf("listed (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRefusedNeighbourSaysWhy(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	for _, tt := range []struct {
		name      string
		neighbour route.Neighbour
		want      string
		is        error
	}{
		{"no such link", route.Neighbour{Addr: nstest.Addr("10.1.0.9"), MAC: mac(9), Link: 4711},
			"add neighbour 10.1.0.9 on link 4711: no such device", fs.ErrNotExist},
		{"no address", route.Neighbour{MAC: mac(9), Link: h.eth0},
			"add neighbour invalid IP on link " + itoa(h.eth0) + ": address is not valid", tombolo.ErrInvalid},
		{"an index beyond those of links", route.Neighbour{Addr: nstest.Addr("10.1.0.9"), MAC: mac(9), Link: h.eth0 + 1<<32},
			"add neighbour 10.1.0.9 on link " + itoa(h.eth0+1<<32) + ": no such device", fs.ErrNotExist},
		{"a MAC of seven bytes", route.Neighbour{Addr: nstest.Addr("10.1.0.9"), MAC: append(mac(9), 1), Link: h.eth0},
			"", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := h.c.AddNeighbour(tt.neighbour)
			if tt.want == "" {
				// The kernel disregards what is beyond the length of the link's addresses.
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil || err.Error() != tt.want {
				t.Errorf("got  %v\nwant %s", err, tt.want)
			}
			if tt.is != nil && !errors.Is(err, tt.is) {
				t.Errorf("%v does not match %v", err, tt.is)
			}
		})
	}
}
