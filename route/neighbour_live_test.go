package route_test

import (
	"io/fs"
	"net"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func mac(last byte) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 0, last} }

// withoutMulticast leaves out the entries that the kernel makes for the multicast
// that it sends itself.
func withoutMulticast(list []routing.NeighbourEntry) []routing.NeighbourEntry {
	var left []routing.NeighbourEntry
	for _, n := range list {
		if !n.Addr.IsMulticast() {
			left = append(left, n)
		}
	}
	return left
}

func TestNeighboursAreThoseOfAllLinks(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	for _, n := range []string{"10.1.0.9 dev eth0", "10.2.0.9 dev eth1", "fd01::9 dev eth0", "fd02::9 dev eth1"} {
		nstest.Run(t, h.ns, "ip", append([]string{"neighbour", "add"}, strings.Fields(n+" lladdr "+mac(9).String())...)...)
	}
	got, err := routing.Find(h.nl, h.eth1, nstest.Addr("fd02::9"))
	want := routing.NeighbourEntry{Addr: nstest.Addr("fd02::9"), MAC: mac(9), Link: h.eth1, State: routing.Permanent}
	diff := cmp.Diff(want, got, cmpopts.EquateComparable(want.Addr))
	expect.That(t, diff == "" && err == nil, "got, %v (-want +got):\n%s", err, diff)
	expect.Is(t, expect.Err(routing.Find(h.nl, h.eth1, nstest.Addr("fd02::8"))), fs.ErrNotExist, "Neighbour")
	var listed []string
	for _, n := range withoutMulticast(must.Of(routing.Neighbours(h.nl)).Get(t)) {
		listed = append(listed, n.Addr.String())
	}
	expect.NoDiff(t, cmp.Diff([]string{"10.1.0.9", "10.2.0.9", "fd01::9", "fd02::9"}, listed, cmpopts.SortSlices(strings.Compare)), "listed")
}

func TestRulesOfANewNamespaceAreTheKernels(t *testing.T) {
	t.Parallel()
	c := must.Of(nl.Dial(unix.NETLINK_ROUTE, nstest.New(t))).Get(t)
	defer c.Close()
	list := must.Of(routing.Rules(c)).Get(t)
	kernel := func(family uint8, priority, table uint32) routing.Rule {
		return routing.Rule{Family: family, Priority: priority, Table: table, Action: unix.FR_ACT_TO_TBL, Protocol: uint8(unix.RTPROT_KERNEL)}
	}
	want := []routing.Rule{
		kernel(unix.AF_INET, 0, unix.RT_TABLE_LOCAL), kernel(unix.AF_INET, 32766, unix.RT_TABLE_MAIN), kernel(unix.AF_INET, 32767, 253),
		kernel(unix.AF_INET6, 0, unix.RT_TABLE_LOCAL), kernel(unix.AF_INET6, 32766, unix.RT_TABLE_MAIN),
	}
	expect.NoDiff(t, cmp.Diff(want, list, cmpopts.EquateComparable(want[0].From)), "rules")
}
