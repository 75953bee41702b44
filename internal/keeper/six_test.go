package keeper

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/dhcp6"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

// leased6 gives a record an address by DHCPv6 for a time.
func leased6(r *lease.Record, valid time.Duration) {
	six, t := lease.SixOf(&r.Client), now()
	six.Address = netip.MustParseAddr("2001:db8::7")
	six.Lease = &dhcp6.Lease6{Address: six.Address, Server: dhcpc.Hex{0, 4, 1}, DUID: six.DUID, IAID: six.IAID,
		Obtained: t, Renew: t.Add(valid / 2), Rebind: t.Add(valid / 2), Expire: t.Add(valid)}
	six.Release = dhcpc.Hex{8}
	r.Six = six
}

func TestADHCPv6LeaseThatEndsOutOfReachEndsInTime(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		leased6(r, 17*time.Minute)
		ends := r.Six.Lease.Expire
		w.add(r).outOfReach = errors.New("not now")
		w.start()
		w.later(time.Until(ends) - time.Second)
		if got := w.load(r); got.Six == nil || got.Six.Lease == nil {
			t.Fatalf("before its end the record has %+v", got.Six)
		}
		w.later(2 * time.Second)
		got := w.load(r)
		if got.Six == nil || got.Six.Lease != nil || len(got.Six.Release) > 0 || got.Six.Error == "" || got.Six.Address != r.Six.Address {
			t.Errorf("after its end the record has %+v", got.Six)
		}
		expect.That(t, got.State == lease.Bound, "the lease of IPv4 is %s", got.State)
	})
}
