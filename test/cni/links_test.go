package cni

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestTombolodPutsRightWhatOthersDoToLinks(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, harm string
		cut        bool // a pod of this harm reaches nothing
	}{
		{"the bridge is deleted", "ip link delete cbr0", true},
		{"the bridge is set down", "ip link set cbr0 down", true},
		{"the bridge's addresses are flushed", "ip address flush dev cbr0", true},
		{"the gateway is deleted", "ip address delete GATEWAY dev cbr0", true},
		{"the subnet's route is deleted", "ip route delete SUBNET dev cbr0", true},
		{"a port is taken off the bridge", "ip link set PORT nomaster", true},
		{"a port is set down", "ip link set PORT down", true},
		{"a port's flag is changed", "bridge link set dev PORT isolated on; bridge link set dev PORT hairpin off", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.outside()
			w := n.podnet(nil)
			p := n.pod("a")
			r := w.add(p)
			wantPing(t, p.NS, outside4)
			m := n.mind(t)
			must.Until(t, "it looks", func() bool { return m.metric("links_looks_total") > 0 })
			gateway := r.IPs[0].Gateway.String()
			subnet := r.IPs[0].Address
			ones, _ := subnet.Mask.Size()
			subnet.IP = subnet.IP.Mask(subnet.Mask)
			harm := strings.NewReplacer("PORT", w.port(p), "GATEWAY", gateway+"/"+strconv.Itoa(ones), "SUBNET", subnet.String()).Replace(tc.harm)
			for range 2 {
				mended := m.metric("drift_mended_total")
				began := time.Now()
				n.run("sh", "-ec", harm)
				must.Until(t, "it is put right: "+harm, func() bool { return m.metric("drift_mended_total") > mended })
				// Every minute it looks though it hears nothing.
				took := time.Since(began)
				expect.That(t, took <= 40*time.Second, "%s is put right after %s", harm, took)
				expect.Success(t, w.check(p), "CHECK after %s", harm)
				wantPing(t, p.NS, outside4)
			}
			// And then it is done: pods that come and go, and its own changes, are none to it.
			mended, looks := m.metric("drift_mended_total"), m.metric("links_looks_total")
			b := n.pod("b")
			w.add(b)
			w.del(b)
			must.Until(t, "it looks", func() bool { return m.metric("links_looks_total") > looks })
			got := m.metric("drift_mended_total")
			expect.That(t, got == mended, "it put something right %d times for nothing", got-mended)
		})
	}
}
