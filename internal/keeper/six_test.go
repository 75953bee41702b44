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

// A bad cable must not have every pod ask servers each time; but after the last time they do.
func TestServersAreAskedAgainWhenAnUplinkHasItsCarrierAndNotTooOften(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		w.start()
		w.stop()
		l := w.keep.newLoop(t.Context())
		for _, name := range []string{"idle", "due", "busy"} {
			l.entries[name] = &entry{memory: memory{session: &dhcpc.Session{}, six: memory6{session: &dhcp6.Session{}}}}
		}
		l.entries["at its first visit"] = &entry{slot: slot{busy: true}}
		began := now()
		soon := began.Add(time.Second)
		l.entries["busy"].busy = true
		l.confirmAll()
		for _, name := range []string{"idle", "due"} {
			if e := l.entries[name]; e.memory.six.session != nil || e.memory.session == nil || !e.wake.Equal(began) {
				t.Errorf("%s: %+v, want it at %s", name, e, began)
			}
		}
		for _, name := range []string{"busy", "at its first visit"} {
			if e := l.entries[name]; !e.stale {
				t.Errorf("%s: %+v, want it visited again", name, e)
			}
		}
		// They have asked, and the carrier comes and goes.
		next := began.Add(confirmInterval)
		for _, name := range []string{"idle", "due"} {
			l.entries[name].memory.six.session = &dhcp6.Session{}
			l.entries[name].wake = began.Add(time.Hour)
		}
		l.entries["due"].wake = soon
		for range 50 {
			time.Sleep(confirmInterval / 100)
			l.confirmAll()
		}
		if e := l.entries["idle"]; e.memory.six.session != nil || !e.wake.Equal(next) {
			t.Errorf("idle: %+v, want it at %s", e, next)
		}
		if e := l.entries["due"]; e.memory.six.session != nil || !e.wake.Equal(soon) {
			t.Errorf("due: %+v, want it at %s", e, soon)
		}
		time.Sleep(time.Until(next) + time.Second)
		l.entries["idle"].memory.six.session = &dhcp6.Session{}
		l.entries["idle"].wake = time.Time{}
		l.confirmAll()
		if e := l.entries["idle"]; e.memory.six.session != nil || !e.wake.Equal(next.Add(confirmInterval)) {
			t.Errorf("idle: %+v, want it at %s", e, next.Add(confirmInterval))
		}
	})
}
