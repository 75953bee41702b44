package keeper

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// in runs a test in a world with a clock of its own.
func in(t *testing.T, test func(*testing.T, *world)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { test(t, newWorld(t)) })
}

func only(t *testing.T, said []string, kind string) {
	t.Helper()
	expect.That(t, len(said) != 0, "nothing was sent")
	for _, s := range said {
		if !strings.HasPrefix(s, kind+" ") {
			t.Errorf("sent %v, want only %s", said, kind)
			return
		}
	}
}

func TestLeasesAreRenewedForAsLongAsTheirPodsLive(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		var records []*lease.Record
		for i := range 20 {
			r := w.record(i + 1)
			w.add(r)
			records = append(records, r)
		}
		w.start()
		w.later(25 * time.Minute)
		if said := w.said(); said != nil {
			t.Errorf("before T1: %v", said)
		}
		w.later(5 * time.Hour)
		only(t, w.said(), "REQUEST")
		for _, r := range records {
			got := w.load(r)
			if got.State != lease.Bound || got.Lease.Left(now()) < 25*time.Minute || got.Lease.Address != r.Lease.Address || got.Token != r.Token {
				t.Errorf("%s: %s %v with %v left", r.ContainerID, got.State, got.Lease.Address, got.Lease.Left(now()))
			}
			p := w.pods[r.Hash()]
			if p.left < 59*time.Minute || p.addresses() != fmt.Sprint(r.Applied.Addresses) {
				t.Errorf("%s: the pod has %s for %v", r.ContainerID, p.addresses(), p.left)
			}
		}
		if w.open != 0 || w.mostOpen > 4 {
			t.Errorf("%d sockets are open, and were up to %d with 4 workers", w.open, w.mostOpen)
		}
	})
}

func TestARestartedKeeperGoesOnWithoutADiscover(t *testing.T) {
	for _, away := range []time.Duration{0, 10 * time.Minute, 40 * time.Minute, 58 * time.Minute} {
		t.Run(away.String(), func(t *testing.T) {
			in(t, func(t *testing.T, w *world) {
				r := w.record(1)
				p := w.add(r)
				w.start()
				w.stop()
				w.later(away)
				w.start()
				w.later(59*time.Minute - away)
				only(t, w.said(), "REQUEST")
				if got := w.load(r); got.Lease.Address != r.Lease.Address || got.Lease.Left(now()) < 25*time.Minute {
					t.Errorf("away for %v: %v left of %v", away, got.Lease.Left(now()), got.Lease.Address)
				}
				expect.That(t, p.addresses() == "[192.0.2.1/24]", "away for %v: the pod has %s", away, p.addresses())
			})
		})
	}
}

func TestALeaseThatIsRefusedIsReplaced(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		p := w.add(r)
		var atDiscover string
		w.serve(func(d *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
			switch d.MessageType() {
			case dhcpv4.MessageTypeDiscover:
				atDiscover = p.addresses()
				return reply(d, dhcpv4.MessageTypeOffer, net.IPv4(192, 0, 2, 77))
			default:
				if d.ServerIdentifier() == nil {
					return nak(d)
				}
				return reply(d, dhcpv4.MessageTypeAck, net.IPv4(192, 0, 2, 77))
			}
		})
		w.start()
		w.later(35 * time.Minute)
		if got := w.load(r); got.State != lease.Bound || got.Lease.Address.String() != "192.0.2.77/24" || got.Error != "" {
			t.Errorf("the record has %s %v (%s)", got.State, got.Lease.Address, got.Error)
		}
		expect.That(t, atDiscover == "[]", "the pod had %s still after the NAK", atDiscover)
		expect.That(t, p.addresses() == "[192.0.2.77/24]", "the pod has %s", p.addresses())
		if w.counted("naks") != 1 || w.counted("acquisitions") != 1 {
			t.Errorf("%d NAKs and %d acquisitions are counted", w.counted("naks"), w.counted("acquisitions"))
		}
	})
}

// A keeper that cannot look, for want of memory or of the bridge, knows of no conflict.
func TestARenewedAddressIsLostToAConflictAlone(t *testing.T) {
	for _, tt := range []struct {
		name string
		err  error
		kept bool
	}{
		{"no memory", fmt.Errorf("get link br0: %w", unix.ENOBUFS), true},
		{"no bridge", fmt.Errorf("get link br0: %w", os.ErrNotExist), true},
		{"the host took it", lease.Conflict("it is the host's own address"), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in(t, func(t *testing.T, w *world) {
				r := w.record(1)
				p := w.add(r)
				w.conflictErr = tt.err
				w.start()
				w.later(32 * time.Minute)
				expect.Equal(t, p.addresses() == "[192.0.2.1/24]", tt.kept, "the pod has %s", p.addresses())
				expect.Equal(t, w.load(r).State == lease.Bound, tt.kept, "the record has %s", w.load(r).State)
				if tt.kept {
					only(t, w.said(), "REQUEST")
				}
			})
		})
	}
}

func TestANewAddressOfARenewalTakesTheOldOnesPlace(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		p := w.add(r)
		w.serve(func(d *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
			a := w.grant(d)
			a.UpdateOption(dhcpv4.OptSubnetMask(net.CIDRMask(16, 32)))
			a.UpdateOption(dhcpv4.OptRouter(net.IPv4(192, 0, 2, 253)))
			a.UpdateOption(dhcpv4.OptDNS(net.IPv4(192, 0, 2, 53)))
			a.UpdateOption(dhcpv4.Option{Code: dhcpv4.OptionInterfaceMTU, Value: dhcpv4.Uint16(1400)})
			return a
		})
		w.start()
		w.later(35 * time.Minute)
		got := w.load(r)
		want := got.Policy.Apply(got.Lease)
		if p.addresses() != "[192.0.2.1/16]" || fmt.Sprint(p.has) != fmt.Sprint(want) || fmt.Sprint(got.Applied) != fmt.Sprint(want) || want.MTU != 1400 {
			t.Errorf("the pod has %v, the record says %v, want %v", p.has, got.Applied, want)
		}
		expect.That(t, fmt.Sprint(got.Lease.DNS) == "[192.0.2.53]", "DNS of the record: %v", got.Lease.DNS)
	})
}

func TestALeaseThatNobodyRenewsExpiresAndComesBack(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		p := w.add(r)
		w.serve(silent)
		w.start()
		w.later(59 * time.Minute)
		only(t, w.said(), "REQUEST")
		if got := w.load(r); got.State != lease.Bound || p.addresses() != "[192.0.2.1/24]" {
			t.Errorf("before its end it is %s, and the pod has %s", got.State, p.addresses())
		}
		w.later(5 * time.Minute)
		if got := w.load(r); got.State != lease.Expired || !got.Applied.Empty() || !strings.Contains(got.Error, "expired") {
			t.Errorf("after its end it is %s with %v: %q", got.State, got.Applied, got.Error)
		}
		w.said()
		w.later(10 * time.Hour)
		if said := w.said(); len(said) < 300 || len(said) > 1000 {
			t.Errorf("%d DISCOVERs in 10 hours", len(said))
		} else {
			only(t, said, "DISCOVER")
		}
		w.serve(w.grant)
		w.later(lastRetry * 2)
		if got := w.load(r); got.State != lease.Bound || got.Lease.Address != r.Lease.Address || p.addresses() != "[192.0.2.1/24]" {
			t.Errorf("with a server again: %s %v, the pod has %s", got.State, got.Lease.Address, p.addresses())
		}
	})
}

func TestASlowServerIsWaitedForAsByAnADD(t *testing.T) {
	for timeout, comes := range map[time.Duration]bool{0: true, time.Minute: true, 20 * time.Second: false} {
		t.Run(timeout.String(), func(t *testing.T) {
			in(t, func(t *testing.T, w *world) {
				r := w.record(1)
				r.State, r.Applied, r.Client.Timeout = lease.Expired, lease.Applied{}, timeout
				w.add(r)
				w.delay = 12 * time.Second // of each answer, of which it takes two
				w.serve(w.grant)
				w.start()
				w.later(time.Hour)
				expect.Equal(t, w.load(r).State == lease.Bound, comes, "it has a lease")
			})
		})
	}
}

func TestAKeeperThatComesTooLateAsksForTheSameAddress(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		p := w.add(r)
		p.has = lease.Applied{} // the kernel took it away
		w.later(2 * time.Hour)
		w.start()
		w.later(time.Minute)
		if got := w.load(r); got.State != lease.Bound || got.Lease.Address != r.Lease.Address {
			t.Errorf("%s %v", got.State, got.Lease.Address)
		}
		if p.addresses() != "[192.0.2.1/24]" || len(p.has.Routes) != 1 {
			t.Errorf("the pod has %v", p.has)
		}
	})
}

// A kill switch, gVisor, and KubeVirt do so.
func TestWhatThePodsOwnerRemovedStaysAway(t *testing.T) {
	for name, remove := range map[string]func(*lease.Applied){
		"route":   func(has *lease.Applied) { has.Routes = nil },
		"address": func(has *lease.Applied) { *has = lease.Applied{} },
	} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T, w *world) {
				r := w.record(1)
				p := w.add(r)
				w.start()
				w.later(time.Minute)
				p.mu.Lock()
				remove(&p.has)
				want := fmt.Sprint(p.has)
				p.mu.Unlock()
				w.later(40 * time.Minute)
				only(t, w.said(), "REQUEST")
				if got := fmt.Sprint(p.has); got != want || w.load(r).Lease.Left(now()) < 45*time.Minute {
					t.Errorf("the pod has %s, want %s, and %v of its lease", got, want, w.load(r).Lease.Left(now()))
				}
				// Nor by another keeper, or another lease with other routers.
				w.stop()
				w.start()
				w.serve(nak)
				w.later(40 * time.Minute)
				w.serve(func(d *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
					a := w.grant(d)
					a.UpdateOption(dhcpv4.OptRouter(net.IPv4(192, 0, 2, 253)))
					return a
				})
				w.later(2 * lastRetry)
				got := w.load(r)
				if has := fmt.Sprint(p.has); got.State != lease.Bound || has != want {
					t.Errorf("with a new lease, which is %s, the pod has %s, want %s", got.State, has, want)
				}
			})
		})
	}
}

func TestADeletedLeaseIsNotRevivedByARenewal(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		p := w.add(r)
		w.serve(func(d *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
			w.del(r) // between request and answer
			return w.grant(d)
		})
		w.start()
		applied := p.applied
		w.later(35 * time.Minute)
		if len(w.said()) != 1 {
			t.Fatal("there was no renewal to race with")
		}
		if got := w.load(r); got != nil {
			t.Errorf("the record came back: %+v", got)
		}
		expect.That(t, p.applied == applied, "the lease was applied")
		w.later(10 * time.Hour)
		if said := w.said(); said != nil {
			t.Errorf("later: %v", said)
		}
	})
}

func TestARenewalThatALaterAddOvertookLeavesItAlone(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r, next := w.record(1), w.record(1)
		w.add(r)
		first := true
		w.serve(func(d *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
			if first {
				first = false
				w.del(r)
				w.add(next)
			}
			return w.grant(d)
		})
		w.start()
		w.later(35 * time.Minute)
		if got := w.load(r); got == nil || got.Token != next.Token {
			t.Errorf("the record is %+v, want that of the later ADD", got)
		}
		if got := w.released(); len(got) > 0 {
			t.Errorf("released %v, which the later ADD has", got)
		}
	})
}

func TestALeaseOfADeadPodIsReleased(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		w.add(r)
		w.start()
		w.kill(r)
		w.mu.Lock()
		w.releaseErr = errors.New("no such bridge")
		w.mu.Unlock()
		w.later(lookEvery + time.Second)
		if w.load(r) == nil {
			t.Fatal("the record went before its lease was released")
		}
		w.mu.Lock()
		w.releaseErr = nil
		w.mu.Unlock()
		w.later(2 * lastRetry) // the longest pause between two tries is a quarter over lastRetry
		if got := fmt.Sprint(w.released()); got != "[192.0.2.1]" || w.load(r) != nil {
			t.Errorf("released %s, record %v", got, w.load(r))
		}
	})
}

func TestALeaseThatCannotBeReleasedGoesWhenItEnds(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		w.add(r)
		w.kill(r)
		w.releaseErr = errors.New("no such bridge")
		w.start()
		w.later(59 * time.Minute)
		expect.That(t, w.load(r) != nil, "the record went before the lease ended")
		w.later(10 * time.Minute)
		expect.That(t, w.load(r) == nil, "the record is still there")
	})
}

func TestAfterABoot(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		plain, sticky, ended, adding := w.record(1), w.record(2), w.record(3), w.record(4)
		for _, r := range []*lease.Record{plain, sticky, ended, adding} {
			r.Boot = lastBoot
		}
		sticky.Client.Sticky = true
		ended.Lease.Renew, ended.Lease.Rebind, ended.Lease.Expire = ended.Lease.Obtained, ended.Lease.Obtained, ended.Lease.Obtained
		adding.State, adding.Lease, adding.Applied = lease.Adding, nil, lease.Applied{}
		// Even where a path names a pod again.
		for _, r := range []*lease.Record{plain, sticky, ended, adding} {
			w.add(r)
		}
		address := sticky.Lease.Address
		w.start()
		w.later(time.Second)
		if got := fmt.Sprint(w.released()); got != "[192.0.2.1]" {
			t.Errorf("released %s, want the one that is neither sticky nor over", got)
		}
		if said := w.said(); said != nil {
			t.Errorf("sent %v", said)
		}
		for _, r := range []*lease.Record{plain, ended, adding} {
			expect.That(t, w.load(r) == nil, "the record of %s is still there", r.ContainerID)
		}
		left := must.Of(w.dir.Hashes()).Get(t)
		if got := w.dir.Recall(sticky); len(left) != 1 || got == nil || got.Address != address {
			t.Fatalf("recalled %v of %v", got, left)
		}
		w.tell(left[0])
		w.later(2 * time.Hour)
		if got := w.dir.Recall(sticky); got != nil {
			t.Errorf("after its end: recalled %v", got)
		}
	})
}

func TestALeaseThatAPodDoesNotHaveIsNotReleased(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		refused, wanted := w.record(1), w.record(2)
		refused.State, wanted.State = lease.Expired, lease.Adding
		for _, r := range []*lease.Record{refused, wanted} {
			r.Boot = lastBoot
			w.add(r)
		}
		w.start()
		w.later(time.Second)
		if w.load(refused) != nil || w.load(wanted) != nil || len(w.released()) > 0 {
			t.Errorf("records %v and %v, released %v", w.load(refused), w.load(wanted), w.released())
		}
	})
}

func TestAnIdentityThatAnotherPodHasIsNotReleased(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		old, next := w.record(1), w.record(1)
		next.ContainerID = "another"
		w.add(old)
		w.add(next)
		w.kill(old)
		w.start()
		w.later(time.Second)
		if w.load(old) != nil || len(w.released()) > 0 {
			t.Errorf("record %v, released %v; want neither", w.load(old), w.released())
		}
	})
}

func TestTheKeeperStartsDuringAnAdd(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		l := r.Lease
		r.State, r.Lease, r.Applied = lease.Adding, nil, lease.Applied{}
		p := w.add(r)
		h := must.Of(w.dir.Lock(t.Context(), r.Hash())).Get(t)
		w.start()
		w.later(3 * time.Minute)
		if said := w.said(); said != nil || p.applied > 0 {
			t.Errorf("it meddled: sent %v", said)
		}
		r.State, r.Lease, r.Applied = lease.Bound, l, r.Policy.Apply(l)
		p.has = r.Applied
		must.Succeed(t, errors.Join(h.Replace(r), h.Close()))
		w.tell(r.Hash())
		w.later(40 * time.Minute)
		only(t, w.said(), "REQUEST")
	})
}

func TestWhatADeadAddLeftGoesWithItsPod(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		r.State, r.Lease, r.Applied = lease.Adding, nil, lease.Applied{}
		w.add(r)
		w.start()
		w.later(time.Hour)
		expect.That(t, w.load(r) != nil, "the record went while its pod lives")
		w.kill(r)
		w.later(lookEvery + time.Second)
		if w.load(r) != nil || len(w.released()) > 0 || len(w.said()) > 0 {
			t.Errorf("record %v, released %v", w.load(r), w.released())
		}
	})
}

func TestADamagedRecordIsToldOfAndOthersAreKept(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		bad, good, newer := w.record(1), w.record(2), w.record(3)
		for _, r := range []*lease.Record{bad, good, newer} {
			w.add(r)
		}
		path := func(r *lease.Record) string { return w.dir.Path() + "/" + r.Hash() + ".json" }
		for file, text := range map[string]string{path(bad): `{"version":1,"st`, path(newer): `{"version":99}`} {
			must.Succeed(t, os.WriteFile(file, []byte(text), 0o600))
		}
		w.start()
		w.later(40 * time.Minute)
		if got, err := os.ReadFile(path(bad)); string(got) != `{"version":1,"st` {
			t.Errorf("damaged: %q, %v; want it left alone", got, err)
		}
		if got, err := os.ReadFile(path(newer)); string(got) != `{"version":99}` {
			t.Errorf("a newer version's: %q, %v; want it left alone", got, err)
		}
		if got := w.said(); !slices.Equal(got, []string{"REQUEST 2"}) {
			t.Errorf("sent %v", got)
		}
		expect.That(t, w.counted("damaged") == 1, "%d damaged records are counted", w.counted("damaged"))
	})
}

func TestAfterALossOfEventsAllRecordsAreRead(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		old := w.record(1)
		w.add(old)
		w.start()
		next := w.record(2)
		w.add(next) // nobody hears of it,
		w.del(old)  // nor of that
		w.later(time.Second)
		if got := w.said(); got != nil {
			t.Fatalf("it heard of the records by itself: %v", got)
		}
		w.tell("")
		w.later(40 * time.Minute)
		if got := w.said(); !slices.Equal(got, []string{"REQUEST 2"}) {
			t.Errorf("sent %v", got)
		}
		expect.That(t, w.counted("rescans") == 1, "%d rescans", w.counted("rescans"))
	})
}

func TestAnEndReleasesNothing(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		p := w.add(r)
		w.serve(silent)
		w.start()
		w.later(30*time.Minute + 20*time.Second) // some of the time a renewal is on its way
		w.stop()
		if len(w.released()) > 0 || p.addresses() != "[192.0.2.1/24]" || w.open != 0 {
			t.Errorf("released %v, the pod has %s, %d sockets are open", w.released(), p.addresses(), w.open)
		}
		if got := w.load(r); got.State != lease.Bound || !got.Lease.Expire.Equal(r.Lease.Expire) {
			t.Errorf("the record says %s until %v", got.State, got.Lease.Expire)
		}
	})
}

func TestWhatAKilledKeeperWasAboutToTakeAwayGoes(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		old := netip.MustParsePrefix("192.0.2.99/24")
		r.Applied.Addresses = append(r.Applied.Addresses, old)
		p := w.add(r)
		w.start()
		w.later(time.Second)
		expect.That(t, p.addresses() == "[192.0.2.1/24]", "the pod has %s", p.addresses())
		if got := w.load(r); slices.Contains(got.Applied.Addresses, old) {
			t.Errorf("the record says %v", got.Applied)
		}
	})
}

func TestALeaseThatCannotBeAppliedIsTriedAgain(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		p := w.add(r)
		w.start()
		p.mu.Lock()
		p.applyErr = errors.New("no buffer space")
		p.mu.Unlock()
		w.later(32 * time.Minute)
		if got := w.load(r); !strings.Contains(got.Error, "no buffer space") || got.Lease.Left(now()) < 50*time.Minute {
			t.Errorf("the record says %q, with %v left", got.Error, got.Lease.Left(now()))
		}
		before := p.applied
		p.mu.Lock()
		p.applyErr = nil
		p.mu.Unlock()
		w.later(lookEvery)
		if got := w.load(r); got.Error != "" || p.applied == before {
			t.Errorf("the record says %q, and it was applied %d times more", got.Error, p.applied-before)
		}
	})
}

func TestARenewalThatCannotBeWrittenDownIsMadeAgain(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		p := w.add(r)
		w.start()
		w.later(29 * time.Minute)
		// Somebody has the record's lock, for longer than is waited for it.
		w.lock(r, func(*lease.LockedRecord) error {
			w.later(3 * time.Minute)
			return nil
		})
		only(t, w.said(), "REQUEST")
		if left := w.load(r).Lease.Left(now()); left > 30*time.Minute {
			t.Fatalf("the record says %v, though it was locked", left)
		}
		w.later(3 * time.Minute)
		if left := w.load(r).Lease.Left(now()); left < 55*time.Minute || p.left < 55*time.Minute {
			t.Errorf("%v are left by the record, and the pod has the address for %v", left, p.left)
		}
		only(t, w.said(), "REQUEST")
	})
}

// So the kernel does now and then with an address that has just been set.
func TestAnAddressThatGoesByItselfAtARenewalIsPutBack(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		p := w.add(r)
		w.start()
		want := p.addresses()
		lose := func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			p.has = lease.Applied{}
		}
		for range 3600 {
			if w.later(time.Second); len(w.heard) > 0 {
				break
			}
		}
		only(t, w.said(), "REQUEST")
		lose()
		w.later(confirmAfter + time.Second)
		if got := p.addresses(); got != want || len(p.has.Routes) != 1 {
			t.Errorf("lost at a renewal, the pod has %v, want %s", p.has, want)
		}
		// Later the pod's owner has removed it.
		w.later(time.Minute)
		lose()
		w.later(lookEvery + time.Second)
		expect.Equal(t, p.addresses(), "[]", "lost between renewals, the pod has")
	})
}

func TestAPodOutOfReachIsNotTakenForDead(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		p := w.add(r)
		p.dialErr = errors.New("too many open files")
		w.start()
		w.later(40 * time.Minute)
		if w.load(r) == nil || len(w.released()) > 0 {
			t.Error("its lease was dropped")
		}
		p.mu.Lock()
		p.dialErr = nil
		p.mu.Unlock()
		w.later(lastRetry * 2)
		only(t, w.said(), "REQUEST")
	})
}

func TestALeaseForEverIsOnlyLookedAfter(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		r.Lease.Renew, r.Lease.Rebind, r.Lease.Expire = time.Time{}, time.Time{}, time.Time{}
		p := w.add(r)
		w.start()
		w.later(1000 * time.Hour)
		if said := w.said(); said != nil || p.left != -1 {
			t.Errorf("sent %v, applied for %v", said, p.left)
		}
		w.kill(r)
		w.later(lookEvery + time.Second)
		if w.load(r) != nil || len(w.released()) != 1 {
			t.Errorf("record %v, released %v", w.load(r), w.released())
		}
	})
}

func TestALeaseOfTheFutureIsAskedAbout(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		for _, at := range []*time.Time{&r.Lease.Obtained, &r.Lease.Renew, &r.Lease.Rebind, &r.Lease.Expire} {
			*at = at.Add(24 * 365 * time.Hour) // the clock was wrong then, or is now
		}
		w.add(r)
		w.start()
		w.later(time.Minute)
		only(t, w.said(), "REQUEST")
		if got := w.load(r).Lease.Left(now()); got > time.Hour {
			t.Errorf("%v left", got)
		}
	})
}
