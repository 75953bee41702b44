package keeper

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/dhcp6"
	"github.com/tombolo-cni/tombolo/internal/lease"
)

// leased6 gives a record an address by DHCPv6 for a time.
func leased6(r *lease.Record, valid time.Duration) {
	six, t := lease.SixOf(&r.Client), now()
	six.Address = netip.MustParseAddr("2001:db8::7")
	six.Lease = &dhcp6.Lease{Address: six.Address, Server: dhcpc.Hex{0, 4, 1}, DUID: six.DUID, IAID: six.IAID,
		Obtained: t, Renew: t.Add(valid / 2), Rebind: t.Add(valid / 2), Expire: t.Add(valid)}
	six.Release = dhcpc.Hex{8}
	r.Six = six
}

func TestADHCPv6LeaseThatEndsOutOfReachEndsInTime(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		leased6(r, 17*time.Minute)
		r.Six.Lease.Prefix = netip.MustParsePrefix("2001:db8:60::/64")
		ends := r.Six.Lease.Expire
		w.add(r).outOfReach = errors.New("not now")
		w.start()
		w.later(time.Until(ends) - time.Second)
		if got := w.load(r); got.Six == nil || got.Six.Lease == nil {
			t.Fatalf("before its end the record has %+v", got.Six)
		}
		w.later(2 * time.Second)
		got := w.load(r)
		if got.Six == nil || got.Six.Lease != nil || len(got.Six.Release) > 0 || got.Six.Error == "" || got.Six.Address != r.Six.Address || got.Six.Ended != r.Six.Lease.Prefix {
			t.Errorf("after its end the record has %+v", got.Six)
		}
		if got.State != lease.Bound {
			t.Errorf("the lease of IPv4 is %s", got.State)
		}
	})
}

func TestAPrefixIsAnothersWhereAPodOfTheSameLinkHasAPartOfIt(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*lease.Record)
		free   bool
		alone  bool // an address is leased without a prefix
	}{
		"the same":  {change: func(r *lease.Record) {}},
		"all of it": {change: func(r *lease.Record) { r.Six.Lease.Prefix = netip.MustParsePrefix("2001:db8:60::/48") }},
		"a part":    {change: func(r *lease.Record) { r.Six.Lease.Prefix = netip.MustParsePrefix("2001:db8:60:0:8000::/65") }},
		"an address in it": {change: func(r *lease.Record) {
			r.Six.Lease.Prefix, r.Six.Lease.Address = netip.Prefix{}, netip.MustParseAddr("2001:db8:60::9")
		}},
		"one with our address in it, where we have no prefix": {alone: true, change: func(r *lease.Record) { r.Six.Lease.Prefix = netip.MustParsePrefix("2001:db8::/64") }},
		"one beside our address, where we have no prefix":     {alone: true, change: func(r *lease.Record) {}, free: true},
		"one with our address in it":                          {change: func(r *lease.Record) { r.Six.Lease.Prefix = netip.MustParsePrefix("2001:db8::/64") }},
		"another":                                             {change: func(r *lease.Record) { r.Six.Lease.Prefix = netip.MustParsePrefix("2001:db8:60:1::/64") }, free: true},
		"none":                                                {change: func(r *lease.Record) { r.Six.Lease.Prefix = netip.Prefix{} }, free: true},
		"no lease":                                            {change: func(r *lease.Record) { r.Six.Lease, r.Six.Release = nil, nil }, free: true},
		"no DHCPv6":                                           {change: func(r *lease.Record) { r.Six = nil }, free: true},
		"of another VLAN":                                     {change: func(r *lease.Record) { r.GatewayLink = "br0.20" }, free: true},
		"of another bridge":                                   {change: func(r *lease.Record) { r.Bridge = "br1" }, free: true},
		"before the boot":                                     {change: func(r *lease.Record) { r.Boot = lastBoot }, free: true},
		"that has ended": {change: func(r *lease.Record) {
			r.Six.Lease.Obtained, r.Six.Lease.Renew, r.Six.Lease.Rebind, r.Six.Lease.Expire = past(2), past(1), past(1), past(1)
		}, free: true},
	} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T, w *world) {
				w.start()
				w.stop() // with its clock
				own, other := w.record(1), w.record(2)
				for _, r := range []*lease.Record{own, other} {
					leased6(r, time.Hour)
					r.Six.Lease.Prefix = netip.MustParsePrefix("2001:db8:60::/64")
				}
				if c.alone {
					own.Six.Lease.Prefix = netip.Prefix{}
				}
				asked := *own.Six.Lease
				c.change(other)
				w.add(own)
				w.add(other)
				refuse := w.keep.refuse6(own)
				switch err := refuse(&asked, nil); {
				case c.free && err != nil:
					t.Error(err)
				case !c.free && (err == nil || !strings.Contains(err.Error(), "container "+other.ContainerID)):
					t.Errorf("refused by %v", err)
				}
				// One that the pod has already, it keeps.
				if err := refuse(&asked, own.Six.Lease); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func past(hours int) time.Time { return now().Add(-time.Duration(hours) * time.Hour) }

// A bad cable must not have every pod ask servers each time; but after the last time they do.
func TestServersAreAskedAgainWhenAnUplinkHasItsCarrierAndNotTooOften(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		w.start()
		w.stop()
		l := w.keep.newLoop(t.Context())
		asking := func(bridge string) *entry {
			return &entry{at: -1, mind: memory{session: &dhcpc.Session{}, six: mind6{session: &dhcp6.Session{}, bridge: bridge}}}
		}
		for name, bridge := range map[string]string{"idle": "br0", "due": "br0", "busy": "br0", "other": "br1", "IPv4 alone": ""} {
			l.entries[name] = asking(bridge)
		}
		began := now()
		soon := began.Add(time.Second)
		l.entries["busy"].busy = true
		l.wake(l.entries["other"], began.Add(time.Hour))
		l.wake(l.entries["IPv4 alone"], began.Add(time.Hour))
		l.askAgain("br0")
		for _, name := range []string{"idle", "due"} {
			if e := l.entries[name]; e.mind.six.session != nil || e.mind.session == nil || !e.wake.Equal(began) {
				t.Errorf("%s: %+v, want it at %s", name, e, began)
			}
		}
		if e := l.entries["busy"]; !e.stale {
			t.Errorf("busy: %+v", e)
		}
		for _, name := range []string{"other", "IPv4 alone"} {
			if e := l.entries[name]; e.stale || e.mind.six.session == nil || !e.wake.Equal(began.Add(time.Hour)) {
				t.Errorf("%s: %+v", name, e)
			}
		}
		// They have asked, and the carrier comes and goes.
		next := began.Add(askedOnce)
		for _, name := range []string{"idle", "due"} {
			l.entries[name].mind.six.session = &dhcp6.Session{}
			l.wake(l.entries[name], began.Add(time.Hour))
		}
		l.wake(l.entries["due"], soon)
		for range 50 {
			time.Sleep(askedOnce / 100)
			l.askAgain("br0")
		}
		if e := l.entries["idle"]; e.mind.six.session != nil || !e.wake.Equal(next) {
			t.Errorf("idle: %+v, want it at %s", e, next)
		}
		if e := l.entries["due"]; e.mind.six.session != nil || !e.wake.Equal(soon) {
			t.Errorf("due: %+v, want it at %s", e, soon)
		}
		time.Sleep(time.Until(next) + time.Second)
		l.entries["idle"].mind.six.session = &dhcp6.Session{}
		l.wake(l.entries["idle"], time.Time{})
		l.askAgain("br0")
		if e := l.entries["idle"]; e.mind.six.session != nil || !e.wake.Equal(next.Add(askedOnce)) {
			t.Errorf("idle: %+v, want it at %s", e, next.Add(askedOnce))
		}
		if e := l.entries["other"]; e.mind.six.session == nil {
			t.Errorf("other: %+v", e)
		}
	})
}
