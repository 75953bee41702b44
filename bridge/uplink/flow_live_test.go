package uplink_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// inTransit is how many datagrams of four flows the kernel may drop in the microseconds in
// which a link becomes a port, or ceases to be one.
const inTransit = 1

func TestNoDatagramIsLostInATakeover(t *testing.T) {
	l := newLAN(t)
	tr := startTraffic(t, l, both()...)
	rec, j := take(t, l, toBridge())
	// Segments that are sent again are no fault where the machine is slow: TCP guesses.
	if lost, _ := tr.result(); lost > inTransit {
		t.Errorf("the takeover lost %d datagrams", lost)
	}
	tr = startTraffic(t, l, both()...)
	if err := l.conn.Restore(t.Context(), rec, j); err != nil {
		t.Fatal(err)
	}
	if lost, _ := tr.result(); lost > inTransit {
		t.Errorf("to give the NIC back lost %d datagrams of four flows", lost)
	}
}

func TestNoDatagramIsLostWithAStrictFilterAndManyRoutes(t *testing.T) {
	l := newLAN(t, hosts()["200 routes"]...)
	nstest.Sysctl(t, l.host, "net/ipv4/conf/all/rp_filter", "1")
	nstest.Sysctl(t, l.host, "net/ipv4/conf/eth0/rp_filter", "1")
	tr := startTraffic(t, l, both()...)
	u := toBridge()
	u.KeepAddress = true
	take(t, l, u)
	if lost, _ := tr.result(); lost > inTransit {
		t.Errorf("the takeover lost %d datagrams", lost)
	}
}

// flannel's tunnel sends by the NIC alone.
func TestTunnelGoesOn(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	for i, ns := range []*netns.NS{l.host, l.router} {
		// As flannel has it: where to send is in the forwarding table.
		local, remote, n := "10.0.0.5", "10.0.0.1", "1"
		if i == 1 {
			local, remote, n = remote, local, "2"
		}
		run(t, ns, "link add flannel.1 type vxlan id 1 local "+local+" dev eth0 dstport 8472 nolearning",
			"link set flannel.1 mtu 1400 up", "addr add 10.42.0."+n+"/24 dev flannel.1")
		nstest.Run(t, ns, "bridge", "fdb", "append", "00:00:00:00:00:00", "dev", "flannel.1", "dst", remote, "self", "permanent")
	}
	shown := func() string {
		return strings.ReplaceAll(nstest.Run(t, l.host, "ip", "-d", "-o", "link", "show", "flannel.1"), "dev br0", "dev eth0")
	}
	through := func(when string) {
		t.Helper()
		if err := nstest.Ping(t, l.host, nstest.Addr("10.42.0.2")); err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
	through("before")
	before := shown()
	rec, j := take(t, l, toBridge())
	through("taken over")
	l.mustBeTaken(t, "taken over", rec)
	if diff := cmp.Diff(tso(before), tso(shown())); diff != "" {
		t.Errorf("the tunnel (-want +got):\n%s", diff)
	}
	run(t, l.host, "link set flannel.1 type vxlan dev eth0")
	if changed, err := l.conn.Mend(t.Context(), rec, j); !changed || err != nil {
		t.Errorf("mend: %t, %v", changed, err)
	}
	through("mended")
	if err := l.conn.Restore(t.Context(), rec, j); err != nil {
		t.Fatal(err)
	}
	through("given back")
	if diff := cmp.Diff(tso(before), tso(shown())); diff != "" {
		t.Errorf("the tunnel after it was given back (-want +got):\n%s", diff)
	}
}

// tso leaves out what a tunnel takes over of the link that it rests on.
func tso(s string) string { return regexp.MustCompile(`tso_max_\S+ [0-9]+`).ReplaceAllString(s, "") }
