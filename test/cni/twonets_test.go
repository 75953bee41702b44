package cni

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// onTwo is a container on two networks, as podman connects one: each call brings its ports, to whichever network.
type onTwo struct {
	*node
	nets    [2]*network
	results [2][]netip.Addr
	p       *pod
}

func (o *onTwo) options(t *testing.T, i int) []option {
	return []option{as(fmt.Sprintf("eth%d", i)), publish(t, "8080:80/tcp", "8080:80/udp")}
}

func (o *onTwo) connect(t *testing.T, i int) {
	t.Helper()
	o.results[i] = nil
	for _, ip := range o.nets[i].add(o.p, o.options(t, i)...).IPs {
		a, _ := netip.AddrFromSlice(ip.Address.IP)
		o.results[i] = append(o.results[i], a.Unmap())
	}
}

// callsItself asks the pod's port at the host's address on each of its networks, from its interface there.
func (o *onTwo) callsItself(t *testing.T, when string) {
	t.Helper()
	for i, w := range o.nets {
		for _, at := range []string{fmt.Sprintf("10.3%d.0.1", i+1), fmt.Sprintf("fd3%d::1", i+1)} {
			for _, protocol := range []string{"tcp", "udp"} {
				_, err := nstest.AskWithin(t, o.p.NS, protocol, netip.AddrPortFrom(nstest.Addr(at), 8080), 5*time.Second)
				expect.That(t, err == nil, "%s: the pod cannot reach its port at %s, by eth%d: %v", when, at, i, err)
			}
		}
		expect.Success(t, w.check(o.p, o.options(t, i)...), "%s", when)
	}
}

func TestAPodOnTwoNetworksReachesItsPortByBoth(t *testing.T) {
	t.Parallel()
	o := &onTwo{node: newNode(t)}
	for i := range o.nets {
		o.nets[i] = o.network(fmt.Sprintf("net%d", i), conf{
			"bridge": fmt.Sprintf("br3%d", i+1), "capabilities": conf{"portMappings": true},
			"ipam": hostLocal(fmt.Sprintf("10.3%d.0.0/24", i+1), fmt.Sprintf("fd3%d::/64", i+1)),
		})
	}
	outside := o.outside()
	o.p = o.pod("web")
	o.connect(t, 0)
	o.connect(t, 1)
	o.p.serve(t, "tcp", 80)
	o.p.serve(t, "udp", 80)
	o.callsItself(t, "connected")

	// The address of a network that it leaves may be another pod's then.
	left := o.results[1]
	o.nets[1].del(o.p, o.options(t, 1)...)
	for _, a := range left {
		selves := o.nft("list set inet tombolo selves4") + o.nft("list set inet tombolo selves6")
		expect.That(t, !strings.Contains(selves, " "+a.String()+" "), "the pod has left with %s, and there is\n%s", a, selves)
	}
	o.connect(t, 1)
	o.callsItself(t, "connected again")

	// Exchanged: the ports pass to the network that is left, and the pod comes back to the other.
	o.nets[0].del(o.p, o.options(t, 0)...)
	o.connect(t, 0)
	o.callsItself(t, "exchanged")

	// Whom it calls as any other pod's, sees it.
	other := o.pod("other")
	o.nets[0].add(other, publish(t, "9090:80/tcp"))
	other.serve(t, "tcp", 80)
	for i, at := range []string{"10.31.0.1", "10.32.0.1"} {
		if seen, err := askPort(t, o.p.NS, "tcp", at, 9090); err != nil || !slices.Contains(o.results[i], seen) {
			t.Errorf("at %s the pod is seen as %s (%v), want one of %s", at, seen, err, o.results[i])
		}
	}
	expect.Success(t, expect.Err(askPort(t, outside, "tcp", uplink4, 8080)))

	o.nft("flush ruleset")
	repairs := o.pod("repairs")
	o.nets[1].add(repairs)
	o.callsItself(t, "after a flush")
	for i, w := range o.nets {
		w.del(o.p, o.options(t, i)...)
	}
	o.nets[0].del(other)
	o.nets[1].del(repairs)
	for _, set := range []string{"selves4", "selves6"} {
		if left := o.nft("list set inet tombolo " + set); strings.Count(left, "tombolo:1:") != 1 || !strings.Contains(left, "tombolo:1:sentinel") {
			t.Errorf("the pods have gone, and there is\n%s", left)
		}
	}
}
