package main

import (
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// outsideNode is a node with a machine outside, and no pods.
func outsideNode(t *testing.T, s scenario) *node {
	t.Helper()
	out := nstest.New(t)
	n := &node{contender: tombolo, ns: namedNS{NS: nstest.New(t)}, outside: &namedNS{NS: out}, scenario: s}
	if err := n.connect(nstest.Path(t, out)); err != nil {
		t.Fatal(err)
	}
	nstest.Settle(t, n.ns.NS, out)
	return n
}

func TestOutsideReachesTheNode(t *testing.T) {
	t.Parallel()
	n := outsideNode(t, scenario{full: true})
	for _, a := range nodeAddresses {
		if err := ping(n.outside.NS, a.Addr(), pingLimit); err != nil {
			t.Error(err)
		}
	}
	for _, program := range []string{"iptables", "ip6tables"} {
		if out := nstest.Run(t, n.ns.NS, program, "-S", "FORWARD"); out != "-P FORWARD DROP\n" {
			t.Errorf("%s -S FORWARD: %s", program, out)
		}
	}
}

// TestHostPortThatAnswersIsProven takes the node for its own pod: what it listens at
// is then at the same port.
func TestHostPortThatAnswersIsProven(t *testing.T) {
	t.Parallel()
	n := outsideNode(t, scenario{})
	if err := proveHostPort(n.ns.NS, n.ns.NS, podPort); err != nil {
		t.Error(err)
	}
	err := proveHostPort(n.ns.NS, n.ns.NS, firstPort)
	if err == nil || !strings.Contains(err.Error(), "host port 192.0.2.1:20000") || !strings.Contains(err.Error(), "refused") {
		t.Errorf("a port that leads nowhere: %v", err)
	}
}

func TestShapersOfTheRateAreCounted(t *testing.T) {
	t.Parallel()
	n := outsideNode(t, scenario{})
	for want, rate := range []string{"", "50mbit", "100mbit"} {
		if rate != "" {
			nstest.Run(t, n.ns.NS, "tc", strings.Fields("qdisc replace dev up0 root tbf burst 100k latency 10ms rate "+rate)...)
		}
		got, err := n.shapers()
		if err != nil {
			t.Fatal(err)
		}
		if got != want/2 {
			t.Errorf("with a rate of %q: %d, want %d", rate, got, want/2)
		}
	}
}

func TestToolThatFailsSaysWhy(t *testing.T) {
	t.Parallel()
	ns := namedNS{NS: nstest.New(t)}
	if _, err := tool(ns, "ip link show dev nosuch"); err == nil || !strings.Contains(err.Error(), "nosuch") {
		t.Errorf("got %v", err)
	}
	if _, err := tool(ns, "no-such-program"); err == nil {
		t.Error("a program that is not there ran")
	}
}
