package keeper

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// present is what the record would be by now.
func (s *site) present(_ context.Context, rec *uplink.Record) (*uplink.Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now == nil {
		return rec, s.fails["present"]
	}
	return s.now(rec), s.fails["present"]
}

// has has the host have addresses from now on, and hear of it.
func (s *site) has(list ...string) {
	s.t.Helper()
	s.set(func() {
		s.now = func(rec *uplink.Record) *uplink.Record {
			n := *rec
			n.Before = uplink.Snapshot{NIC: uplink.Link{Index: 3}}
			for _, a := range list {
				n.Before.Addresses = append(n.Before.Addresses, addr.Address{Link: 3, Prefix: netip.MustParsePrefix(a)})
			}
			if strings.Join(prefixTexts(n.HostAddresses()), " ") == strings.Join(prefixTexts(rec.HostAddresses()), " ") {
				return rec
			}
			return &n
		}
	})
	s.announce(address(4))
	s.later(settled)
}

func prefixTexts(list []netip.Prefix) []string {
	all := make([]string, len(list))
	for i, p := range list {
		all[i] = p.String()
	}
	return all
}

// recorded gives the host's addresses by the record.
func (s *site) recorded() string {
	s.t.Helper()
	data, err := s.dir.Uplink(s.nic).Load()
	var rec *uplink.Record
	if err == nil {
		rec, err = uplink.ParseRecord(data)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return strings.Join(prefixTexts(rec.HostAddresses()), " ")
}

func TestPodsAndRecordFollowTheHostsAddresses(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.start()
		s.has("10.0.0.5/24")
		if s.repairs != 1 || s.recorded() != "10.0.0.5/24" {
			t.Errorf("%d repairs, and on record is %s", s.repairs, s.recorded())
		}
		s.has("10.0.0.5/24") // the lifetime of a lease, say
		if s.repairs != 1 {
			t.Errorf("%d repairs, though nothing is new", s.repairs)
		}
		s.has("10.0.0.5/24", "10.0.0.6/24")
		s.has("10.0.0.6/24")
		if s.repairs != 3 || s.recorded() != "10.0.0.6/24" || !s.logged("the host has other addresses") {
			t.Errorf("%d repairs, and on record is %s; log: %s", s.repairs, s.recorded(), &s.log)
		}
		s.later(time.Hour)
		if s.repairs != 3 {
			t.Errorf("%d repairs, though nothing happened", s.repairs)
		}
	})
}

// Many changes in a row count as one.
func TestAStormOfAddressesIsFollowedInTheEnd(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.start()
		s.has("10.0.0.5/24")
		before := s.repairs
		for range 100 {
			s.announce(address(4))
		}
		s.has("10.0.0.6/24")
		if s.repairs != before+1 {
			t.Errorf("%d repairs for a hundred announcements", s.repairs-before)
		}
	})
}

func TestARepairThatFailsIsTriedAgain(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.start()
		s.set(func() { s.fails["repair"] = errors.New("directory is locked") })
		s.has("10.0.0.5/24")
		// For the next mend, whatever becomes of the pods.
		if s.repairs != 1 || s.recorded() != "10.0.0.5/24" {
			t.Errorf("%d repairs, and on record is %s", s.repairs, s.recorded())
		}
		s.set(func() { delete(s.fails, "repair") })
		s.later(lastRetry)
		if s.repairs != 2 {
			t.Errorf("%d repairs, want one more after the one that failed", s.repairs)
		}
	})
}

// The pods were put back for addresses that are past by the time that this is written down.
func TestAChangeWhileThePodsFollowIsFollowedToo(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.start()
		once := func(rec *uplink.Record, list ...string) *uplink.Record {
			n := *rec
			n.Before = uplink.Snapshot{NIC: uplink.Link{Index: 3}}
			for _, a := range list {
				n.Before.Addresses = append(n.Before.Addresses, addr.Address{Link: 3, Prefix: netip.MustParsePrefix(a)})
			}
			return &n
		}
		looks := 0
		s.set(func() {
			s.now = func(rec *uplink.Record) *uplink.Record {
				looks++
				switch {
				case looks == 1:
					return once(rec, "10.0.0.5/24")
				case len(rec.HostAddresses()) > 0 && rec.HostAddresses()[0].String() == "10.0.0.6/24":
					return rec
				}
				return once(rec, "10.0.0.6/24")
			}
		})
		s.announce(address(4))
		s.later(settled)
		s.later(time.Second)
		if s.repairs != 2 || s.recorded() != "10.0.0.6/24" {
			t.Errorf("%d repairs, and on record is %s", s.repairs, s.recorded())
		}
	})
}

// It was killed after it had heard, or the addresses are others since it was.
func TestAKeeperThatBeginsSeesThatTheHostHasOtherAddresses(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.set(func() {
			s.now = func(rec *uplink.Record) *uplink.Record {
				n := *rec
				n.Before = uplink.Snapshot{NIC: uplink.Link{Index: 3}, Addresses: []addr.Address{{Link: 3, Prefix: netip.MustParsePrefix("10.0.0.5/24")}}}
				return &n
			}
		})
		s.start()
		if s.repairs != 1 || s.recorded() != "10.0.0.5/24" {
			t.Errorf("%d repairs, and on record is %s", s.repairs, s.recorded())
		}
	})
}

func TestARecordIsNotWrittenWhileSomebodyElseIsAtIt(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.start()
		lock, err := s.dir.TryLockUplink(s.nic)
		if err != nil || lock == nil {
			t.Fatal(err)
		}
		s.set(func() { s.noRepairLock = true })
		s.has("10.0.0.5/24")
		if s.recorded() != "" {
			t.Errorf("on record is %s, and somebody has the lock", s.recorded())
		}
		if err := lock.Close(); err != nil {
			t.Fatal(err)
		}
		s.later(lastBusy)
		if s.recorded() != "10.0.0.5/24" {
			t.Errorf("on record is %q", s.recorded())
		}
	})
}

func TestAnUplinkThatCannotBeLookedAtIsLookedAtAgain(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.set(func() { s.fails["present"] = unix.EMFILE })
		s.start()
		if !s.logged("cannot look at uplink") {
			t.Errorf("log: %s", &s.log)
		}
		s.did()
		s.set(func() { delete(s.fails, "present") })
		s.later(2 * time.Second)
		s.wants("check", "adopt")
	})
}

// A pod whose lease took it where the host is not by that address.
func TestAPodThatStrayedIsBroughtBack(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.start()
		s.keep.strayed <- struct{}{}
		s.later(settled)
		if s.repairs != 1 {
			t.Errorf("%d repairs", s.repairs)
		}
	})
}

// What the administrator does on the bridge, the keeper leaves, and what a network manager
// takes away then comes back as it was last.
func TestAnAddressThatTheAdministratorChangedStays(t *testing.T) {
	t.Parallel()
	h := newHome(t)
	h.take()
	h.keep()
	ip := func(commands ...string) {
		for _, c := range commands {
			nstest.Run(t, h.host, "ip", strings.Fields(c)...)
		}
	}
	ip("address add 10.9.7.7/16 dev br0")
	until(t, "the record has the new address", func() bool { return h.onRecord() == "10.9.0.2/16 10.9.7.7/16 fd09::2/64" })
	nstest.Sysctl(t, h.host, "net/ipv4/conf/br0/promote_secondaries", "1")
	ip("address del " + hostAddress + "/16 dev br0")
	until(t, "the record has the old address no longer", func() bool { return h.onRecord() == "10.9.7.7/16 fd09::2/64" })
	ip("link delete br0")
	until(t, "it is well", h.isWell)
	until(t, "the host is reachable by its new address", func() bool {
		return nstest.Ping(t, h.router, netip.MustParseAddr("10.9.7.7")) == nil && nstest.Ping(t, h.host, netip.MustParseAddr(beyondTheRoute)) == nil
	})
	if out := nstest.Run(t, h.host, "ip", "-4", "address"); strings.Contains(out, hostAddress+"/16") {
		t.Errorf("the old address is back:\n%s", out)
	}
}

// onRecord gives the host's addresses by the record.
func (h *home) onRecord() string {
	h.Helper()
	rec := h.record()
	if rec == nil {
		return ""
	}
	return strings.Join(prefixTexts(rec.HostAddresses()), " ")
}
