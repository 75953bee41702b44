package cni

import (
	"bytes"
	"maps"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// Pods have the MAC of the bridge for their gateway that had its name before: they hear at once which one it is now.
func TestSwappedBridgesThatAreMendedAnnounceTheirMAC(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	w := n.podnet(nil)
	other := n.network("othernet", conf{"bridge": "cbr1", "ipam": hostLocal("10.78.0.0/24", "fd78::/64")})
	a, b := n.pod("a"), n.pod("b")
	w.add(a)
	other.add(b)
	wantPing(t, a.NS, gateway4, gateway6)
	wantPing(t, b.NS, "10.78.0.1", "fd78::1")
	before := links(t, n.ns)
	n.run("sh", "-ec", "ip link set cbr0 down; ip link set cbr1 down; ip link set cbr0 name x; ip link set cbr1 name cbr0; ip link set x name cbr1; ip link set cbr0 up; ip link set cbr1 up")
	ears := map[*pod]int{a: rawSocket(t, a.NS, "eth0"), b: rawSocket(t, b.NS, "eth0")}
	if o := n.operate("repair", "--state", n.state); o.status != 0 {
		t.Errorf("repair: %+v", o)
	}
	after := links(t, n.ns)
	if after["cbr0"].MAC != before["cbr1"].MAC {
		t.Fatalf("cbr0 has the MAC %s, and had %s: this tests nothing", after["cbr0"].MAC, before["cbr0"].MAC)
	}
	for p, at := range map[*pod]struct{ bridge, v4, v6 string }{a: {"cbr0", gateway4, gateway6}, b: {"cbr1", "10.78.0.1", "fd78::1"}} {
		mac := hexMAC(t, n.ns, at.bridge)
		v4, v6 := nstest.Addr(at.v4).AsSlice(), nstest.Addr(at.v6).AsSlice()
		waiting := map[string]func(frame []byte) bool{
			"gratuitous ARP": func(f []byte) bool {
				return len(f) >= 42 && bytes.Equal(f[12:14], []byte{8, 6}) && bytes.Equal(f[22:28], mac) && bytes.Equal(f[28:32], v4) && bytes.Equal(f[38:42], v4)
			},
			"unsolicited advertisement": func(f []byte) bool {
				return len(f) >= 86 && bytes.Equal(f[12:14], []byte{0x86, 0xdd}) && f[54] == 136 && f[58]&0x40 == 0 && bytes.Equal(f[62:78], v6) && bytes.Equal(f[80:86], mac)
			},
		}
		buf := make([]byte, 2048)
		for len(waiting) > 0 {
			got, err := unix.Read(ears[p], buf)
			if err != nil {
				t.Fatalf("pod %s hears no %v: %v", p.id, slices.Sorted(maps.Keys(waiting)), err)
			}
			for what, is := range waiting {
				if is(buf[:got]) {
					delete(waiting, what)
				}
			}
		}
		wantPing(t, p.NS, at.v4, at.v6)
	}
	if o := n.operate("check", "--state", n.state); o.status != 0 {
		t.Errorf("check: %+v", o)
	}
}
