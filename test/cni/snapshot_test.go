package cni

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// snapshot is the node, with the files of its state directory.
func (n *node) snapshot() nstest.Snapshot {
	n.Helper()
	all := nstest.Snap(n, n.ns, n.state, func(name string) bool {
		// A note for the next, a place to go on from, and which pod a gateway is there for: these
		// differ, and nothing is wrong.
		base := filepath.Base(name)
		return base == "lock" || strings.HasPrefix(base, "last_reserved_ip.") || strings.HasPrefix(name, "networks/")
	})
	// Each call that fails is counted.
	return slices.DeleteFunc(all, func(line string) bool { return strings.HasPrefix(line, "file failures/") })
}

// wantSnapshot fails the test unless the node is as it was.
func (n *node) wantSnapshot(when string, before nstest.Snapshot) {
	n.Helper()
	diff := before.Diff(n.snapshot())
	expect.That(n, diff == "", "%s: the node (- before, + after):\n%s", when, diff)
}

// A snapshot that shows nothing would be the same after anything.
func TestSnapshotShowsWhatChanges(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.outside()
	w := n.podnet(conf{"guard": true})
	w.add(n.pod("a"))
	before := n.snapshot()
	n.wantSnapshot("nothing happened", before)
	for _, change := range []string{
		"ip link set cbr0 mtu 1400", "ip address add 10.9.9.9/32 dev cbr0", "ip route add 10.9.0.0/16 dev cbr0", "ip rule add from 10.9.9.9 table 7",
		"ip neighbour add 10.77.0.77 lladdr 02:00:00:00:00:01 dev cbr0 nud permanent", "tc qdisc add dev cbr0 root tbf rate 1mbit burst 10k latency 1s",
		"bridge link set dev " + w.port(&pod{id: "a"}) + " isolated on", "bridge fdb add 02:00:00:00:00:02 dev cbr0 self permanent",
		"nft add element inet tombolo masq4-podnet { 10.77.0.77 }", "nft add rule bridge tombolo guard accept",
		"sysctl -qw net.ipv4.conf.cbr0.route_localnet=1", "sysctl -qw net.ipv6.conf.cbr0.hop_limit=33",
		"touch " + n.state + "/attachments/podnet/.tmp-1", "touch " + n.state + "/ipam/podnet/10.77.0.77",
	} {
		n.run("sh", "-c", change)
		now := n.snapshot()
		expect.That(t, before.Diff(now) != "", "%s: not in the snapshot", change)
		before = now
	}
}
