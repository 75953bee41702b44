package bridge

import (
	"net"
	"net/netip"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
)

// What goes to the kernel for a pod, message by message (nltest.Text). A diff of it is a
// change of what the kernel is asked for, or of nothing but the order of attributes.
func TestRequestsForAPod(t *testing.T) {
	t.Parallel()
	plain := Port{Name: "veth0", Peer: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, PeerMAC: net.HardwareAddr{2, 0, 0, 0, 0, 2}, MTU: 1400,
		Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.2/24")}}
	full := plain
	full.Alias, full.Group, full.Hairpin, full.Isolated, full.ForwardGroups, full.NoLearning, full.NoFlood, full.NoMulticastFlood = "whose", 29, true, true, true, true, true, true
	full.Announce, full.StaticFDB = true, true
	full.Neighbours = []Neighbour{{netip.MustParseAddr("169.254.1.1"), net.HardwareAddr{2, 0, 0, 0, 0, 3}}, {netip.MustParseAddr("fe80::3"), net.HardwareAddr{2, 0, 0, 0, 0, 3}}}
	small := plain
	small.MTU, small.noIPv6 = 576, true
	var text string
	for _, p := range []*Port{&plain, &full, &small} {
		var b nl.Batch
		p.create(&b, 7, 9)
		p.configure(&b, true)
		p.configure(&b, false)
		p.podLinkUp(&b, 3)
		p.announce(&b, 3)
		p.addNeighbours(&b, 3)
		m, err := p.fdbMessage(unix.RTM_NEWNEIGH, netlink.Create|netlink.Excl, 4, unix.NUD_NOARP, ntfSticky)
		b.Add("add FDB entry", nil, m, err)
		link.Request{Name: "veth0", MTU: new(1300)}.Set(&b, "set MTU of link", "veth0")
		link.Request{Name: "veth0", MTU: new(0)}.Set(&b, "set MTU of link", "veth0")
		link.Get(&b, "veth0", 0, nil)
		link.Request{Name: "veth0"}.Delete(&b, "veth0")
		delTogether(&b, []*Link{{Index: 4}, {Index: 5}})
		link.Request{Index: 4}.Delete(&b, "veth0")
		must.Succeed(t, b.Err(0))
		text += nltest.Text(16, b.Bytes()) + "\n"
	}
	golden.Compare(t, "requests.txt", text)
}
