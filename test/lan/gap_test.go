package lan

import (
	"fmt"
	"path/filepath"
	"testing"
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
					fields["ipam"] = static(filepath.Join(t.TempDir(), "ipam"))
				}
				n := l.network(fields)
				n.add(l.newPod("another")) // has the NIC be a port
				ears := map[string]*ear{"the host": l.listen(l.host.ns, bridge), "a machine of the LAN": l.listen(l.other.ns, nic)}
				heard := map[string]int{}
				for i := range 2 * runs(t) {
					// The same name each time: its port has the same name.
					p := l.newPod("evil", published()...)
					for _, phase := range []struct {
						name string
						do   func()
					}{{"ADD", func() { n.add(p) }}, {"DEL", func() { n.del(p) }}} {
						s := l.spoof(p)
						phase.do()
						if sent := s.end(); sent == 0 {
							t.Fatalf("%s %d: the pod has sent nothing", phase.name, i)
						}
						for who, e := range ears {
							heard[phase.name+", "+who] += e.spoofs()
						}
					}
				}
				for _, phase := range []string{"ADD", "DEL"} {
					for who := range ears {
						got := heard[phase+", "+who]
						if (got > 0) == guarded {
							t.Errorf("during %s, %s hears %d frames by which the pod is the router", phase, who, got)
						}
					}
				}
				if guarded {
					l.meet([]int{4}, [2]place{l.host, l.router}, [2]place{l.other, l.router})
				}
			})
		}
	}
}

// static is an IPAM that gives addresses of the LAN of which its router knows nothing.
func static(dir string) object {
	return object{"type": "host-local", "dataDir": dir, "ranges": []any{[]any{
		object{"subnet": subnet4, "rangeStart": "192.168.50.150", "rangeEnd": "192.168.50.160"}}}}
}
