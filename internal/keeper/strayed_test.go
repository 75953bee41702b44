package keeper

import (
	"net/netip"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

// leadTo is what a repair does to a lease's record when the host has another address.
func leadTo(h *lease.Held, own string) error {
	r, err := h.Load()
	if err != nil {
		return err
	}
	r.Policy.Gateway = netip.MustParseAddr(own)
	r.Applied = r.Policy.Apply(r.Lease)
	return h.Replace(r)
}

// The host gets another address while a pod's lease is being renewed: what the keeper has
// read before must not bring the old way out back.
func TestARenewalDoesNotBringAnOldDefaultRouteBack(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		r.Policy.Gateway = netip.MustParseAddr("192.0.2.5")
		r.Applied = r.Policy.Apply(r.Lease)
		p := w.add(r)
		led := false
		w.serve(func(d *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
			if !led {
				led = true
				w.lock(r, func(h *lease.Held) error { return leadTo(h, "192.0.2.6") })
				p.has.Routes = nil // the repair has replaced it in the pod, too
			}
			return w.grant(d)
		})
		w.start()
		w.later(31 * time.Minute)
		if !led {
			t.Fatal("nothing was renewed")
		}
		want := dhcpc.Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("192.0.2.6")}
		got := w.load(r)
		if got.Policy.Gateway != want.Gateway || len(got.Applied.Routes) != 1 || got.Applied.Routes[0] != want {
			t.Errorf("on record is %+v, %+v", got.Policy, got.Applied)
		}
		expect.That(t, got.Lease.Renew.After(r.Lease.Renew), "the lease was not renewed: %v", got.Lease.Renew)
		w.mu.Lock()
		defer w.mu.Unlock()
		if len(p.has.Routes) != 1 || p.has.Routes[0] != want {
			t.Errorf("the pod has %+v", p.has)
		}
	})
}
