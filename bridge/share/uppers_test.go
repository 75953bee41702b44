package share_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// A bond and a VLAN's interface are shared as hardware is, also while a cable of two is out.
func TestBondsAndVLANsAreShared(t *testing.T) {
	t.Parallel()
	const tag = "ip link add link $on name $on.10 type vlan id 10; ip addr flush dev $on; ip addr add $four dev $on.10; " +
		"ip addr add $six dev $on.10 nodad; ip link set $on.10 up"
	const bond = "ip link add up0 type bond mode active-backup miimon 50; ip addr flush dev eth0; " +
		"ip link set eth0 down; ip link set eth1 down; ip link set eth0 master up0; ip link set eth1 master up0; " +
		"ip link set eth0 up; ip link set eth1 up; ip link set up0 up; " +
		"ip addr add $four dev up0; ip addr add $six dev up0 nodad"
	for name, tt := range map[string]struct {
		host, nic string
		tagged    bool // the LAN is a VLAN
	}{
		"VLAN":           {strings.ReplaceAll(tag, "$on", "eth0"), "eth0.10", true},
		"bond":           {bond, "up0", false},
		"VLAN on a bond": {bond + "; " + strings.ReplaceAll(tag, "$on", "up0"), "up0.10", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newLab(t)
			n.share.NIC = tt.nic
			nstest.Veth(t, n.wire, "second", n.host, "eth1")
			nstest.Run(t, n.wire, "ip", "link", "set", "second", "master", "sw")
			up := func(ns *netns.NS, commands, four, six string) {
				t.Helper()
				commands = strings.NewReplacer("$four", four, "$six", six).Replace(commands)
				_, err := nstest.Try(ns, "sh", "-ec", commands)
				if err != nil && strings.Contains(err.Error(), "Unknown device type") {
					t.Skip("this kernel lacks the link's kind; test/vm/run.sh boots one that has it")
				}
				must.Succeed(t, err)
			}
			up(n.host, tt.host, "192.168.50.2/24", "fd50::2/64")
			if tt.tagged {
				up(n.laptop, strings.ReplaceAll(tag, "$on", "eth0"), "192.168.50.9/24", "fd50::9/64")
			}
			expect.Success(t, nstest.Ping(t, n.host, netip.MustParseAddr("192.168.50.9")), "before it is shared")

			expect.Of(n.conn.Ensure(t.Context(), n.share)).Is(t, true, "the first Ensure")
			n.connect(t)
			n.reach(t, "made")
			if strings.HasPrefix(tt.nic, "up0") {
				for _, cable := range []string{"p1", "second"} {
					nstest.Run(t, n.wire, "ip", "link", "set", cable, "down")
					n.reach(t, cable+" is out")
					nstest.Run(t, n.wire, "ip", "link", "set", cable, "up")
				}
			}
			left := must.Of(n.conn.Check(t.Context(), n.share)).Get(t)
			expect.That(t, len(left) == 0, "differences: %v", left)
			must.Succeed(t, n.conn.Remove(t.Context(), n.share))
			after := nstest.Run(t, n.host, "ip", "link", "show", "dev", tt.nic)
			expect.That(t, !strings.Contains(after, "PROMISC"), "after Remove: %s", after)
		})
	}
}
