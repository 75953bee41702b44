package cni

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// TestLayer2WithoutIPAMLeavesIPv6ToThePod has a real router on the bridge: a pod that nobody gives
// addresses forms its own, as with the reference's bridge.
func TestLayer2WithoutIPAMLeavesIPv6ToThePod(t *testing.T) {
	t.Parallel()
	reference := referenceDir(t)
	const bridge, prefix = "br0", "2001:db8:5::"
	for name, tt := range map[string]struct {
		fields conf
		off    bool // the runtime switches IPv6 off
		forms  bool
	}{
		"the reference":                   {fields: conf{"type": "bridge"}, forms: true},
		"the reference, IPv6 off":         {fields: conf{"type": "bridge"}, off: true},
		"mode l2":                         {fields: conf{"mode": "l2"}, forms: true},
		"mode l2, guarded":                {fields: conf{"mode": "l2", "guard": true}, forms: true},
		"mode l2, IPv6 off":               {fields: conf{"mode": "l2"}, off: true},
		"mode l2 with addresses of IPv4":  {fields: conf{"mode": "l2", "ipam": hostLocal(subnet4)}},
		"mode l2 with addresses of both":  {fields: conf{"mode": "l2", "ipam": dualStack()}},
		"mode gateway, which is a router": {fields: conf{"ipam": hostLocal(subnet4)}},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w := n.network("wire", conf{"bridge": bridge, "ipam": nil})
			maps.Copy(w.plugin, tt.fields) // with would put back the ipam that tests have by default
			if w.plugin["type"] == "bridge" {
				n.searchAlso(reference)
				delete(w.plugin, "stateDir")
				delete(w.plugin, "deadline")
			}
			first := n.pod("first")
			w.add(first) // so that the bridge is there

			router := nstest.New(t)
			nstest.Veth(t, n.ns, "wall", router, "eth0")
			n.ip("link set wall master " + bridge + " up")
			nstest.Run(t, router, "sh", "-ec", "ip address add 192.0.2.1/24 dev eth0; ip address add "+prefix+"1/64 dev eth0 nodad; ip address add fe80::1/64 dev eth0 nodad; ip link set eth0 up")
			nstest.WaitForAddresses(t, router)
			advertise := func() {
				nstest.NewDnsmasq(t, router, "eth0", "--dhcp-range=192.0.2.100,192.0.2.200,1h", "--enable-ra", "--dhcp-range="+prefix+",ra-only,64,1h", "--ra-param=eth0,4,600")
			}

			p := n.pod("a")
			nstest.Sysctl(t, p.NS, "net/ipv6/conf/default/router_solicitation_delay", "0")
			nstest.Sysctl(t, p.NS, "net/ipv6/conf/default/dad_transmits", "0")
			if tt.off {
				nstest.Sysctl(t, p.NS, "net/ipv6/conf/default/disable_ipv6", "1")
			}
			if tt.forms {
				advertise()
				w.add(p)
				formed := func() bool {
					return slices.ContainsFunc(globals(t, p.NS, "eth0"), func(a string) bool { return strings.HasPrefix(a, "2001:db8:5:") })
				}
				for end := time.Now().Add(patience); !formed(); time.Sleep(10 * time.Millisecond) {
					if time.Now().After(end) {
						t.Fatalf("the pod formed no address: %s", nstest.Run(t, p.NS, "ip", "address"))
					}
				}
				wantPing(t, p.NS, prefix+"1")
				got := routes(t, p.NS, "-6", "default")
				expect.That(t, len(got) == 1, "default routes %v, want the router's", got)
				err := w.check(p) // the reference's wants an IPAM
				expect.That(t, err == nil || w.plugin["type"] == "bridge", "%v", err)
				w.del(p)
				return
			}
			// What the router says to all comes by, and the pod does nothing with it.
			result := w.add(p)
			heard := capture(t, n.ns, "br0")
			if w.plugin["type"] != "bridge" {
				heard = capture(t, n.ns, w.port(p))
			}
			advertise()
			heard.until(func(f frame) bool { return f.icmp6 == 134 && f.to == "33:33:00:00:00:01" })
			if !tt.off {
				wantPing(t, first.NS, ip4(result).String()) // whose answer comes after all of it has been dealt with
			}
			if got := nstest.Run(t, p.NS, "ip", "-6", "address", "show", "dev", "eth0"); strings.Contains(got, "2001:db8:5:") || tt.off && got != "" {
				t.Errorf("the pod formed an address:\n%s", got)
			}
			w.del(p)
		})
	}
}
