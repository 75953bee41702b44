package containerd

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// Where the pods of these tests are published.
const (
	anyPort = 18080 // of all the host's addresses
	onePort = 18081 // of uplink4 alone
)

func hostPort(address string, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(nstest.Addr(address), port)
}

func TestHostPortsLeadToThePod(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	n.setPodCIDRs("10.184.7.0/24,fd18:7::/64")
	p := n.runPod("a", publish("tcp", anyPort, ""), publish("udp", anyPort, ""), publish("tcp", onePort, uplink4))
	other := n.runPod("b")

	for _, to := range []netip.AddrPort{hostPort(uplink4, anyPort), hostPort(uplink6, anyPort), hostPort(uplink4, onePort)} {
		caller := nstest.Addr(outside4)
		if to.Addr().Is6() {
			caller = nstest.Addr(outside6)
		}
		expect.Equal(t, wantAnswer(t, out, "tcp", to), caller, "%s: the pod sees", to)
		wantAnswer(t, n.ns, "tcp", to)
		wantAnswer(t, other.ns, "tcp", to)
		wantAnswer(t, p.ns, "tcp", to)
	}
	wantAnswer(t, out, "udp", hostPort(uplink4, anyPort))
	wantAnswer(t, out, "udp", hostPort(uplink6, anyPort))
	wantAnswer(t, n.ns, "tcp", hostPort("127.0.0.1", anyPort))

	p.remove()
	for _, to := range []netip.AddrPort{hostPort(uplink4, anyPort), hostPort(uplink6, anyPort), hostPort(uplink4, onePort)} {
		expect.Is(t, expect.Err(nstest.Ask(t, out, "tcp", to)), unix.ECONNREFUSED, "%s of a pod that is gone", to)
	}
	other.remove()
	n.wantNothing()
}

func TestHostPortHasOneOwner(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	n.setPodCIDRs("10.185.7.0/24,fd18:7::/64")
	first := n.runPod("first", publish("tcp", anyPort, ""))
	before := n.traces()
	_, err := n.tryPod("second", publish("tcp", anyPort, uplink4))
	expect.That(t, err != nil && strings.Contains(err.Error(), "tests/first") && strings.Contains(err.Error(), "18080"),
		"a second pod with the host port: %v; want an error with port and owner", err)
	n.wantTraces(before)
	wantAnswer(t, out, "tcp", hostPort(uplink4, anyPort))

	first.remove()
	second := n.runPod("second", publish("tcp", anyPort, uplink4))
	wantAnswer(t, out, "tcp", hostPort(uplink4, anyPort))
	second.remove()
	n.wantNothing()
}

// queue is a qdisc as tc shows it; the rate is in bytes per second, the burst in bytes.
type queue struct {
	Kind    string `json:"kind"`
	Options struct {
		Rate  uint64 `json:"rate"`
		Burst uint64 `json:"burst"`
	} `json:"options"`
}

// limits maps the rates that the node's links are limited to, to the bursts.
func (n *node) limits() map[uint64]uint64 {
	n.Helper()
	var queues []queue
	must.Succeed(n, json.Unmarshal([]byte(n.run("tc", "-json", "qdisc", "show")), &queues))
	found := map[uint64]uint64{}
	for _, q := range queues {
		if q.Options.Rate > 0 {
			found[q.Options.Rate] = q.Options.Burst
		}
	}
	return found
}

func TestBandwidthAnnotationsLimitThePod(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.setPodCIDRs("10.186.7.0/24,fd18:7::/64")
	for name, c := range map[string]struct {
		annotations []option
		rates       []uint64 // in bytes per second
	}{
		"both":    {[]option{annotate("kubernetes.io/ingress-bandwidth", "8M"), annotate("kubernetes.io/egress-bandwidth", "4M")}, []uint64{1e6, 5e5}},
		"ingress": {[]option{annotate("kubernetes.io/ingress-bandwidth", "8M")}, []uint64{1e6}},
		"egress":  {[]option{annotate("kubernetes.io/egress-bandwidth", "4M")}, []uint64{5e5}},
	} {
		p := n.runPod(name, c.annotations...)
		limits := n.limits()
		expect.Equal(t, len(limits), len(c.rates), "%s: limits %v, want the rates %v", name, limits, c.rates)
		for _, rate := range c.rates {
			// containerd asks for a burst of 512 MiB, with which nothing would be limited.
			burst, ok := limits[rate]
			expect.That(t, ok && burst != 0 && burst <= rate, "%s: limits %v, want the rate %d with a burst below a second's", name, limits, rate)
		}
		p.remove()
		n.wantNothing()
	}
}
