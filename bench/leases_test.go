package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestRenewalsAreCountedFromTheFirstRoundOn(t *testing.T) {
	t.Parallel()
	n := leasing(t, tombolo, "leases=8")
	ns := nstest.New(t)
	var err error
	if n.lan.keeper, err = shell(t, ns, "echo READY; exec sleep 1000"); err != nil {
		t.Fatal(err)
	}
	defer n.lan.keeper.stop()
	log := discover + ack(1) + ack(2)
	write(t, n.lan.log, log)
	r := &runner{}
	c := &renewals{node: n}
	if err := c.begin(); err != nil {
		t.Fatal(err)
	}
	// Two of eight leases are a round, and the first renewal is none of it.
	for i, step := range []struct {
		more                 string
		count, total, rounds int
	}{
		{"", 0, 0, 0},
		{ack(1), 0, 1, 0},
		{ack(2), 1, 2, 0},
		{strings.TrimSuffix(ack(3), "\n"), 1, 2, 0}, // a line that is being written
		{"\n", 0, 3, 1},
		{ack(4) + ack(5) + ack(6), 0, 6, 2},
	} {
		log += step.more
		write(t, n.lan.log, log)
		if err := r.watch(n.scenario, c); err != nil {
			t.Fatal(err)
		}
		if c.count != step.count || c.total != step.total || c.rounds != step.rounds {
			t.Errorf("step %d: %d, %d in all, %d rounds; want %+v", i, c.count, c.total, c.rounds, step)
		}
	}
	if s := r.report.find("leases=8", "renewal cpu", tombolo); s == nil || len(s.values) != 2 {
		t.Errorf("figures of the rounds: %+v", s)
	}
	for _, metric := range []string{"memory", "threads", "descriptors"} {
		if s := r.report.find("leases=8", metric, tombolo); s == nil || s.values[0] <= 0 {
			t.Errorf("%s: %+v", metric, s)
		}
	}
	if c.asked != 0 {
		t.Errorf("%d DISCOVERs, of before the first round", c.asked)
	}
}

// TestIntroducedNeighboursAreKnownForGood has a veth between a pod and its router, as
// if there were no bridge.
func TestIntroducedNeighboursAreKnownForGood(t *testing.T) {
	t.Parallel()
	inside, router := nstest.New(t), nstest.New(t)
	nstest.Veth(t, inside, podIfname, router, routerIfname)
	n := leasing(t, tombolo, "leases=8")
	n.lan.router = namedNS{NS: router}
	var err error
	if n.lan.mac, err = hardwareAddress(n.lan.router, routerIfname); err != nil {
		t.Fatal(err)
	}
	p := &pod{path: nstest.Path(t, inside), result: []byte(`{"ips":[{"address":"10.88.1.7/16"}]}`)}
	if err := n.introduce(p); err != nil {
		t.Fatal(err)
	}
	mac, err := hardwareAddress(namedNS{NS: inside}, podIfname)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		ns   *netns.NS
		want string
	}{
		{inside, "10.88.0.1 dev eth0 lladdr " + n.lan.mac.String() + " PERMANENT"},
		{router, "10.88.1.7 dev eth0 lladdr " + mac.String() + " PERMANENT"},
	} {
		if got := nstest.Run(t, test.ns, "ip", "-4", "neigh"); strings.TrimSpace(got) != test.want {
			t.Errorf("neighbours %q, want %q", got, test.want)
		}
	}
	p.path = filepath.Join(t.TempDir(), "missing")
	if err := n.introduce(p); err == nil {
		t.Error("a pod that is not there was introduced")
	}
}

func TestLostLeasesAreFound(t *testing.T) {
	t.Parallel()
	n := leasing(t, reference, "leases=8")
	n.resident = []*pod{{result: []byte(`{"ips":[{"address":"10.88.1.7/16"}]}`)}}
	c := &renewals{node: n}
	if err := c.prove(); err == nil || !strings.Contains(err.Error(), "no lease of 10.88.1.7") {
		t.Errorf("the server has none, and the error is %v", err)
	}
	c.tally([]byte(ack(7) + discover))
	if err := c.prove(); err == nil || !strings.Contains(err.Error(), "1 DISCOVERs") {
		t.Errorf("a pod asked for a new one, and the error is %v", err)
	}
}
