package cni

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// snapshot is all that a node has and that a verb may change, in lines: links with their
// addresses, routes, rules and neighbours, what keeps a link within limits, the
// firewall's rules and elements, the parameters of the kernel, and the files of the state
// directory.
type snapshot []string

// shown has the commands that a snapshot is made of. What they say of time and of
// traffic is not in it.
const shown = `
ip -br link; ip -o address; ip -4 route show table all; ip -6 route show table all; ip rule; ip -6 rule
ip neighbour show nud permanent; bridge fdb show | grep -w -e permanent -e static; tc qdisc show; bridge -d link | sed 's/state [a-z]*//'
nft --stateless list ruleset | tr ',{}' '\n\n\n'
cd /proc/sys/net && grep -sr . ipv4/conf ipv6/conf ipv4/ip_forward bridge 2>/dev/null | grep -v -e stable_secret
true`

func (n *node) snapshot() snapshot {
	n.Helper()
	var s snapshot
	for line := range strings.Lines(n.run("sh", "-c", shown)) {
		if line = strings.Join(strings.Fields(line), " "); line != "" {
			s = append(s, line)
		}
	}
	for _, name := range n.files(n.state) {
		switch base := filepath.Base(name); {
		case base == "lock", strings.HasPrefix(base, "last_reserved_ip."), strings.HasPrefix(name, "networks/"):
			// A note for the next, a place to go on from, and which pod a gateway is there
			// for: these differ, and nothing is wrong.
			s = append(s, "file "+name)
		default:
			content, err := os.ReadFile(filepath.Join(n.state, name))
			if err != nil {
				n.Fatal(err)
			}
			s = append(s, "file "+name+" "+string(content))
		}
	}
	slices.Sort(s)
	return s
}

// diff says what another snapshot has otherwise.
func (s snapshot) diff(other snapshot) string {
	var list []string
	for _, side := range []struct {
		sign      string
		has, lack snapshot
	}{{"- ", s, other}, {"+ ", other, s}} {
		lacks := map[string]int{}
		for _, line := range side.lack {
			lacks[line]++
		}
		for _, line := range side.has {
			if lacks[line]--; lacks[line] < 0 {
				list = append(list, side.sign+line)
			}
		}
	}
	return strings.Join(list, "\n")
}

// wantSnapshot fails the test unless the node is as it was.
func (n *node) wantSnapshot(when string, before snapshot) {
	n.Helper()
	if diff := before.diff(n.snapshot()); diff != "" {
		n.Errorf("%s: the node (- before, + after):\n%s", when, diff)
	}
}

// A snapshot that shows nothing would be the same after anything.
func TestSnapshotShowsWhatChanges(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.outside()
	w := n.podnet(conf{"macspoofchk": true})
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
		if before.diff(now) == "" {
			t.Errorf("%s: not in the snapshot", change)
		}
		before = now
	}
}
