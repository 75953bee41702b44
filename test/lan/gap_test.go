package lan

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A process in the pod's namespace sends from before the pod has an interface until after
// it has none any more.
func TestGuardHoldsFromTheFirstFrameToTheLast(t *testing.T) {
	for _, guarded := range []bool{false, true} {
		for _, ipam := range []string{"dhcp", "host-local"} {
			t.Run(fmt.Sprintf("lanGuard %t, %s", guarded, ipam), func(t *testing.T) {
				l, _ := newLab(t)
				fields := object{"lanGuard": guarded}
				if ipam != "dhcp" {
					fields["ipam"] = staticAddresses(filepath.Join(t.TempDir(), "ipam"))
				}
				n := l.network(fields)
				n.add(l.newPod("another")) // has the NIC shared
				ears := map[string]*ear{"the host": l.listen(l.host.ns, nic), "a machine of the LAN": l.listen(l.other.ns, nic)}
				heard := map[string]int{}
				for i := range 2 * runs(t) {
					// The same name each time: its port has the same name.
					p := l.newPod("evil", published()...)
					for _, phase := range []struct {
						name string
						do   func()
					}{{"ADD", func() { n.add(p) }}, {"DEL", func() { n.del(p) }}} {
						s := l.spoof(p)
						// Before the DEL it is at work, and after the ADD there is something to send by.
						if phase.name == "DEL" {
							s.began()
						}
						phase.do()
						s.began()
						must.That(t, s.end() != 0, "%s %d: the pod has sent nothing", phase.name, i)
						for who, e := range ears {
							heard[phase.name+", "+who] += e.spoofs()
						}
					}
				}
				for _, phase := range []string{"ADD", "DEL"} {
					for who := range ears {
						got := heard[phase+", "+who]
						expect.That(t, (got > 0) != guarded,
							"during %s, %s hears %d frames by which the pod is the router", phase, who, got)
					}
				}
				if guarded {
					l.meet([]int{4}, [2]place{l.host, l.router}, [2]place{l.other, l.router})
				}
			})
		}
	}
}

// staticAddresses is an IPAM that gives addresses of the LAN of which its router knows nothing.
func staticAddresses(dir string) object {
	return object{"type": "host-local", "dataDir": dir, "ranges": []any{[]any{
		object{"subnet": subnet4, "rangeStart": "192.168.50.150", "rangeEnd": "192.168.50.160"}}}}
}

// An ADD that waits for a router has no lock that others need, and ends with a DEL.
func TestAnADDThatWaitsForARouterIsInNobodysWay(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	n := l.network(object{"ipv6": "slaac", "deadline": "1h", "ipam": staticAddresses(filepath.Join(t.TempDir(), "ipam"))})
	l.plug(l.host.ns)
	l.static(l.host)
	p := l.newPod("waits")
	ended := make(chan error, 1)
	go func() { ended <- expect.Err(n.verb("ADD", p)) }()
	must.Until(l, "the pod asks for a router", func() bool {
		return strings.Contains(nstest.Run(t, p.ns, "ip", "-6", "address"), "fe80::")
	})
	expect.Success(t, expect.Err(nstest.Try(l.host.ns, "timeout", "20", program(t, "tombolo"), "repair", "--state", n.state)), "repair, which waits for all locks")
	n.del(p)
	expect.Says(t, <-ended, "deleted", "the ADD")
}

// While an ADD waits for its server, somebody flushes the firewall or deletes the bridge,
// and the repair puts the guard back of the pod that waits.
func TestGuardOfAPodThatWaitsForItsLeaseIsPutBack(t *testing.T) {
	t.Parallel()
	for _, mend := range []string{"an ADD", "repair"} {
		t.Run(mend, func(t *testing.T) {
			t.Parallel()
			l, d := newLab(t)
			n := l.network(object{"deadline": "5m"})
			n.add(l.newPod("another"))
			e := l.listen(l.other.ns, nic)
			d.Stop()
			p := l.newPod("evil")
			done := make(chan error, 1)
			go func() {
				out, err := n.verb("ADD", p)
				if err == nil {
					p.learn(t, out)
				}
				done <- err
			}()
			port := n.portOf(p)
			s := l.spoof(p)
			must.Until(l, "the pod sends", func() bool { return s.sent.Load() > 0 })
			must.Until(l, "the ADD waits for its lease", func() bool { return guards(t, l, port) })
			l.hostRun("nft", "flush", "ruleset")
			must.Until(l, "without a guard, the pod passes for the router", func() bool { return e.spoofs() > 0 })
			if mend == "repair" {
				n.repair()
			} else {
				static := n.another(object{"lanGuard": true, "name": "fixed", "ipam": staticAddresses(filepath.Join(t.TempDir(), "ipam"))})
				static.add(l.newPod("next"))
			}
			expect.That(t, guards(t, l, port), "the guard of the pod that waits is not there")
			e.spoofs()
			l.meet([]int{4}, [2]place{l.other, l.host})
			before := s.sent.Load()
			must.Until(l, "the pod goes on", func() bool { return s.sent.Load() > before+100 })
			got := e.spoofs()
			expect.That(t, got <= 0, "mended, a machine of the LAN hears %d frames by which the pod is the router", got)
			d.start()
			expect.Success(t, <-done)
			if s.end(); e.spoofs() > 0 {
				t.Error("with its lease, the pod passes for the router")
			}
			n.del(p)
			n.wantGone(t, p, port)
		})
	}
}

// guards says whether a port is held to its MAC.
func guards(t *testing.T, l *lan, port string) bool {
	t.Helper()
	out, err := nstest.Try(l.host.ns, "nft", "list", "set", "bridge", "tombolo", "guarded")
	return err == nil && strings.Contains(out, `"`+port+`"`)
}

// Somebody deletes the bridge and flushes the firewall: what a pod may send is there
// again before its port is on a bridge.
func TestGuardIsPutBackBeforeThePort(t *testing.T) {
	for _, guarded := range []bool{false, true} {
		t.Run(fmt.Sprintf("lanGuard %t", guarded), func(t *testing.T) {
			l, _ := newLab(t)
			n := l.network(object{"lanGuard": guarded})
			good := n.add(l.newPod("good"))
			p := n.add(l.newPod("evil"))
			e := l.listen(l.other.ns, nic)
			heard := 0
			for range 3 * runs(t) {
				l.hostRun("ip", "link", "del", bridge)
				l.hostRun("nft", "flush", "ruleset")
				e.spoofs()
				s := l.spoof(p)
				must.Until(l, "the pod sends", func() bool { return s.sent.Load() > 0 })
				n.repair()
				s.end()
				heard += e.spoofs()
			}
			expect.That(t, (heard > 0) != guarded,
				"a machine of the LAN hears %d frames by which the pod is the router", heard)
			n.check(good)
			n.check(p)
		})
	}
}
