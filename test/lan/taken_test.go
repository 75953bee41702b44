package lan

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// staticAddress is the ipam of a pod with one address.
func staticAddress(a netip.Addr, more object) object {
	prefix, gateway := a.String()+"/24", routerIP4
	if a.Is6() {
		prefix, gateway = a.String()+"/64", routerIP6
	}
	all := object{"type": "static", "addresses": []any{object{"address": prefix, "gateway": gateway}}}
	for k, v := range more {
		all[k] = v
	}
	return all
}

func TestAddressesOfOthersAreRefused(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, exit string
		bridged    bool
	}{{"shared NIC", "router", false}, {"shared NIC, by the host", "host", false}, {"the system's bridge", "router", true}} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			l := newHost(t)
			if tt.bridged {
				ip(t, l.host.ns, "link add "+bridge+" type bridge forward_delay 0")
				l.moveToBridge()
			}
			n := l.network(object{"defaultRoute": tt.exit})
			a := l.newPod("a")
			held := object{"type": "static", "addresses": []any{
				object{"address": "192.168.50.40/24", "gateway": routerIP4}, object{"address": "fd50::40/64", "gateway": routerIP6}}}
			n.another(object{"ipam": held}).add(a)

			other := macOf(t, l.other, nic)
			for _, row := range []struct{ address, owner string }{
				{hostIP4, "the host's own"}, {hostIP6, "the host's own"}, {routerIP4, "a gateway of the host's"}, {routerIP6, "a gateway of the host's"},
				{otherIP4, other}, {otherIP6, other}, {a.ip4.String(), "container a has the address"}, {a.ip6.String(), "container a has the address"},
			} {
				for _, name := range []string{"home", "guests"} { // one network, and two of one LAN
					b := l.newPod("b" + strings.NewReplacer(".", "-", ":", "-").Replace(row.address) + name)
					o := n.another(object{"name": name, "ipam": staticAddress(nstest.Addr(row.address), nil)})
					out, err := o.verb("ADD", b)
					if err == nil || !strings.Contains(err.Error(), `"code":112`) {
						t.Errorf("%s of network %s: %v %s, want code 112", row.address, name, err, out)
					}
					wantError(t, row.address, err, row.address, row.owner)
					expect.That(t, !strings.Contains(nstest.Run(t, b.ns, "ip", "link"), nic), "%s is refused, and the pod has an interface", row.address)
					o.del(b)
				}
			}

			// What is free is given, at once, and again.
			for range 2 {
				b := l.newPod("free")
				n.conf["ipam"] = object{"type": "static", "addresses": []any{
					object{"address": "192.168.50.41/24", "gateway": routerIP4}, object{"address": "fd50::41/64", "gateway": routerIP6}}}
				n.add(b)
				l.serve(b.place, servicePort, both()...)
				for _, family := range both() {
					l.ask(l.other, b.at(family), servicePort)
				}
				n.check(b)
				n.del(b)
			}
		})
	}
}

// A machine that answers later is heard with detectConflicts, and nobody is asked if that is false.
func TestDetectConflictsWithoutDHCP(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	for _, family := range []string{"ipv4", "ipv6"} { // the kernel asks three times, a second apart
		nstest.Sysctl(t, l.host.ns, "net/"+family+"/neigh/"+nic+"/retrans_time_ms", "100")
		nstest.Sysctl(t, l.host.ns, "net/"+family+"/neigh/"+nic+"/mcast_solicit", "30")
	}
	for _, address := range []string{"192.168.50.41/24", "fd50::41/64"} {
		own := netip.MustParsePrefix(address).Addr()
		n := l.network(object{"ipam": staticAddress(own, object{"detectConflicts": true})})
		b, free := l.newPod("b"), l.newPod("free")
		n.add(free)
		n.del(free)
		var err error
		for {
			late := make(chan time.Time)
			begun := time.Now()
			go func() {
				time.Sleep(500 * time.Millisecond) // of the 1.5 s that an ADD waits
				ip(t, l.other.ns, "address add "+address+" dev "+nic+" nodad")
				late <- time.Now()
			}()
			_, err = n.verb("ADD", b)
			ended := time.Now()
			if (<-late).Sub(begun) < time.Second {
				if ended.Sub(begun) < 500*time.Millisecond {
					t.Errorf("%s: ADD ends after %s", own, ended.Sub(begun))
				}
				break
			}
			ip(t, l.other.ns, "address del "+address+" dev "+nic) // the machine was busy, and the address came too late
			n.del(b)
		}
		wantError(t, "detectConflicts", err, own.String(), macOf(t, l.other, nic), `"code":112`)
		n.del(b)
		n.conf["ipam"] = staticAddress(own, object{"detectConflicts": false})
		n.add(b)
	}
}
