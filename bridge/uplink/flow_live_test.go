package uplink_test

import (
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
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
