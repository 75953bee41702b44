package keeper

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/state"
)

const settled = pauseUplinks + time.Millisecond

func TestAnUplinkThatIsWellIsLookedAtOnceInAWhile(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.start()
		s.wants("check", "adopt")
		s.later(lookAtUplinks - time.Second)
		s.wants()
		s.later(time.Second)
		s.wants("check")
		s.later(10 * lookAtUplinks)
		if n := len(s.did()); n != 10 {
			t.Errorf("looked at %d times in ten minutes", n)
		}
	})
}

func TestAHostWithoutUplinksCostsNothing(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.start()
		s.later(time.Hour)
		s.wants()
		if s.feeds != 0 {
			t.Error("somebody listens")
		}
		s.save(uplink.Taken)
		s.tell()
		s.wants("check", "adopt")
		if !s.listens() {
			t.Error("nobody listens")
		}
		// It is given back.
		if err := s.dir.Uplink(s.nic).Remove(); err != nil {
			t.Fatal(err)
		}
		s.tell()
		if s.listens() {
			t.Error("somebody listens")
		}
		s.later(time.Hour)
		s.wants()
	})
}

func TestNewsOfAnUplinkHaveItLookedAt(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.start()
		s.did()
		for _, tt := range []struct {
			what string
			m    []netlink.Message
			look bool
		}{
			{"the NIC as it is", linkMessage(unix.RTM_NEWLINK, 3, s.nic, 4), true},
			{"the same again", linkMessage(unix.RTM_NEWLINK, 3, s.nic, 4), false},
			{"the NIC without its master", linkMessage(unix.RTM_NEWLINK, 3, s.nic, 0), true},
			{"the bridge", linkMessage(unix.RTM_NEWLINK, 4, "br0", 0), true},
			{"the bridge again, as pods come and go", linkMessage(unix.RTM_NEWLINK, 4, "br0", 0), false},
			{"a pod's port", linkMessage(unix.RTM_NEWLINK, 9, "veth0", 4), false},
			{"the bridge is deleted", linkMessage(unix.RTM_DELLINK, 4, "br0", 0), true},
			{"another bridge of the name", linkMessage(unix.RTM_NEWLINK, 17, "br0", 0), true},
			{"an address of the NIC", address(3), true},
			{"an address of the NIC again", address(3), true},
			{"an address of the bridge", address(4), true},
			{"an address of another", address(9), false},
			{"something was lost", nil, true},
			{"what is no announcement", []netlink.Message{nltest.Message(unix.RTM_NEWLINK, []byte{1})}, true},
		} {
			s.announce(tt.m)
			s.wants() // not in the middle of it
			s.later(settled)
			if looked := len(s.did()) == 1; looked != tt.look {
				t.Errorf("%s: looked at: %t", tt.what, looked)
			}
		}
	})
}

func TestACarrierThatReturnsIsToldOf(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.start()
		for _, tt := range []struct {
			what string
			m    []netlink.Message
			told bool
		}{
			{"the NIC as it is", withCarrier(linkMessage(unix.RTM_NEWLINK, 3, s.nic, 4)), false},
			{"it loses its carrier", linkMessage(unix.RTM_NEWLINK, 3, s.nic, 4), false},
			{"another link has one", withCarrier(linkMessage(unix.RTM_NEWLINK, 9, "veth0", 4)), false},
			{"the bridge has none", linkMessage(unix.RTM_NEWLINK, 4, "br0", 0), false},
			{"the bridge has one", withCarrier(linkMessage(unix.RTM_NEWLINK, 4, "br0", 0)), false},
			{"the NIC has it again", withCarrier(linkMessage(unix.RTM_NEWLINK, 3, s.nic, 4)), true},
			{"the same again", withCarrier(linkMessage(unix.RTM_NEWLINK, 3, s.nic, 4)), false},
			{"the NIC is unplugged", linkMessage(unix.RTM_DELLINK, 3, s.nic, 0), false},
			{"one of its name, of which nothing was heard", withCarrier(linkMessage(unix.RTM_NEWLINK, 21, s.nic, 0)), false},
		} {
			s.announce(tt.m)
			select {
			case bridge := <-s.keep.carriers:
				if !tt.told || bridge != "br0" {
					t.Errorf("%s: told of %q", tt.what, bridge)
				}
			default:
				if tt.told {
					t.Errorf("%s: nothing is told", tt.what)
				}
			}
		}
		// Nobody hears, and nothing waits for that.
		for range 2 * cap(s.keep.carriers) {
			s.announce(linkMessage(unix.RTM_NEWLINK, 21, s.nic, 4))
			s.announce(withCarrier(linkMessage(unix.RTM_NEWLINK, 21, s.nic, 4)))
		}
		if n := len(s.keep.carriers); n != cap(s.keep.carriers) {
			t.Errorf("told of %d", n)
		}
	})
}

func TestAStreamOfNewsDoesNotPutALookOff(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.start()
		s.did()
		for range 100 {
			s.announce(address(3))
			s.later(pauseUplinks / 10)
		}
		if n := len(s.did()); n < 5 || n > 10 {
			t.Errorf("%d looks in two seconds of news", n)
		}
	})
}

func TestAnUplinkThatSomebodyChangedIsMended(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.start()
		s.did()
		s.set(func() { s.differs = true })
		s.announce(linkMessage(unix.RTM_NEWLINK, 3, s.nic, 0))
		s.later(settled)
		// Once more under the lock: it may have been the middle of somebody's work.
		s.wants("check", "check", "mend")
		if !s.logged("mending it") || !s.logged("master br0 is missing") || !s.logged("uplink mended") {
			t.Errorf("log: %s", &s.log)
		}
		s.later(settled)
		s.wants("check", "adopt") // its address may be another's to renew
		s.later(lookAtUplinks / 2)
		s.wants()
		if _, body := get(t, s.keep, "/metrics"); !strings.Contains(body, "tombolo_uplink_mends_total 1\n") {
			t.Errorf("metrics: %s", body)
		}
	})
}

// A bridge that is made anew has no pods.
func TestPodsOfAMendedUplinkArePutBack(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.start()
		if s.repairs != 0 {
			t.Errorf("%d repairs of what is well", s.repairs)
		}
		s.set(func() { s.differs, s.fails["repair"] = true, errors.New("directory is locked") })
		s.announce(linkMessage(unix.RTM_NEWLINK, 3, s.nic, 0))
		s.later(settled)
		if s.repairs != 1 || !s.logged("directory is locked") {
			t.Errorf("%d repairs after a mend, log: %s", s.repairs, &s.log)
		}
		s.set(func() { delete(s.fails, "repair") })
		s.later(lastRetry)
		if s.repairs != 2 {
			t.Errorf("%d repairs, want one more after the one that failed", s.repairs)
		}
		s.later(time.Hour)
		if s.repairs != 2 {
			t.Errorf("%d repairs, though nothing happened", s.repairs)
		}
	})
}

func TestTwoThatUndoEachOthersWorkDoNotDoSoForEver(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.set(func() { s.differs, s.undo = true, func() { s.differs = true } })
		s.start()
		count := func() (mends int) {
			for _, what := range s.did() {
				if what == "mend" {
					mends++
				}
			}
			return mends
		}
		for range 10 { // seconds, in which there is no lack of news
			s.announce(address(3))
			s.later(time.Second)
		}
		if n := count(); n != mendsAtOnce {
			t.Errorf("%d mends in ten seconds, want %d", n, mendsAtOnce)
		}
		if !s.logged("level=ERROR") || !s.logged("nmcli") || !s.logged("tombolo uplink restore") {
			t.Errorf("log: %s", &s.log)
		}
		for range 3600 {
			s.announce(address(3))
			s.later(time.Second)
		}
		if n := count(); n < 5 || n > 12 {
			t.Errorf("%d mends in an hour", n)
		}
		// It ends, and much later somebody restarts a network manager.
		s.set(func() { s.undo = nil })
		s.later(lastPatience)
		s.later(calmAfter + 2*lookAtUplinks)
		s.did()
		s.set(func() { s.differs = true })
		s.announce(address(3))
		s.later(settled)
		s.wants("check", "check", "mend")
	})
}

func TestAMendThatFailsIsTriedAgainLaterAndLater(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.set(func() { s.differs, s.journals, s.fails["mend"] = true, true, errors.New("no such device") })
		s.start()
		s.later(lastRetry)
		for range 100 {
			s.announce(address(3)) // the half of it that worked
			s.later(settled)
		}
		if n := len(s.did()); n > 3*12 {
			t.Errorf("%d steps in five minutes", n)
		}
		if !s.logged("cannot mend uplink") || !s.logged("no such device") {
			t.Errorf("log: %s", &s.log)
		}
		// The NIC is plugged in again.
		s.set(func() { delete(s.fails, "mend") })
		s.announce(linkMessage(unix.RTM_NEWLINK, 21, s.nic, 0))
		s.later(settled)
		s.wants("check", "check", "mend")
		if _, body := get(t, s.keep, "/metrics"); strings.Contains(body, "tombolo_uplink_errors_total 0\n") {
			t.Error("no error was counted")
		}
	})
}

func TestWorkThatWasCutShortIsFinished(t *testing.T) {
	for _, tt := range []struct {
		state uplink.State
		taken bool // afterwards
		want  []string
	}{
		{uplink.Taking, true, []string{"finish taking", "check", "adopt"}},
		{uplink.Taking, false, []string{"finish taking"}},
		{uplink.Undoing, false, []string{"disown", "finish undoing"}},
		{uplink.Restoring, false, []string{"disown", "finish restoring"}},
	} {
		t.Run(string(tt.state), func(t *testing.T) {
			inSite(t, func(t *testing.T, s *site) {
				s.save(tt.state)
				if tt.taken {
					s.finished = func() *uplink.Record { return s.record(uplink.Taken) }
				}
				s.start()
				s.wants(tt.want...)
				_, body := get(t, s.keep, "/metrics")
				if !strings.Contains(body, "tombolo_uplink_finished_total 1\n") || strings.Contains(body, `tombolo_uplinks{state="taken"} 1`) != tt.taken {
					t.Errorf("metrics: %s", body)
				}
				checkExposition(t, body)
				s.later(time.Hour)
				if s.listens() != tt.taken || len(s.did()) > 0 != tt.taken {
					t.Error("it is looked after if it was given back, or not if it was taken")
				}
			})
		})
	}
}

func TestWorkOfTheLivingIsLeftToThem(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		lock, err := s.dir.LockUplink(t.Context(), s.nic)
		if err != nil {
			t.Fatal(err)
		}
		s.save(uplink.Taking)
		s.start()
		for range 20 {
			s.save(uplink.Taking) // each step
			s.tell()
			s.later(time.Second)
		}
		s.later(time.Minute)
		s.wants()
		// It dies, which nothing tells.
		if err := lock.Close(); err != nil {
			t.Fatal(err)
		}
		s.later(lastBusy)
		s.wants("finish taking")
	})
}

func TestATakeoverThatEndsWellIsNotTouched(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		lock, err := s.dir.LockUplink(t.Context(), s.nic)
		if err != nil {
			t.Fatal(err)
		}
		s.save(uplink.Taking)
		s.start()
		s.save(uplink.Taken)
		s.set(func() { s.differs = true }) // as long as it is under way
		s.tell()
		s.did()
		s.set(func() { s.differs = false })
		if err := lock.Close(); err != nil {
			t.Fatal(err)
		}
		s.later(lastBusy)
		s.wants("check", "adopt")
	})
}

func TestWhatFailsIsTriedAgain(t *testing.T) {
	for what, tt := range map[string]struct {
		state uplink.State
		fails string
		again []string
	}{
		"a look":   {uplink.Taken, "check", []string{"check", "check", "adopt"}},
		"a finish": {uplink.Taking, "finish taking", []string{"finish taking", "finish taking"}},
		"a return": {uplink.Restoring, "disown", []string{"disown", "disown", "finish restoring"}},
	} {
		t.Run(what, func(t *testing.T) {
			inSite(t, func(t *testing.T, s *site) {
				s.save(tt.state)
				s.set(func() { s.fails[tt.fails] = errors.New("not now") })
				s.start()
				s.set(func() { delete(s.fails, tt.fails) })
				s.later(time.Second)
				s.wants(tt.again...)
				if !s.logged("not now") {
					t.Errorf("log: %s", &s.log)
				}
			})
		})
	}
}

func TestALeaseThatCannotBeAdoptedKeepsNothingFromMending(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.set(func() { s.fails["adopt"] = errors.New("not now") })
		s.start()
		s.wants("check", "adopt")
		s.set(func() { s.differs = true })
		s.announce(address(3))
		s.later(settled)
		s.wants("check", "check", "mend")
		s.set(func() { delete(s.fails, "adopt") })
		s.later(lookAtUplinks)
		s.wants("check", "adopt")
	})
}

func TestWithoutAFeedTheLooksRemain(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.save(uplink.Taken)
		s.set(func() { s.fails["listen"] = unix.EMFILE })
		s.start()
		s.did()
		s.set(func() { delete(s.fails, "listen"); s.differs = true })
		s.later(lookAtUplinks)
		s.wants("check", "check", "mend")
		if !s.listens() {
			t.Error("nobody listens when it is possible again")
		}
		s.later(settled)
		s.did()
		// And if it ends by itself it is begun again.
		s.source.Close()
		s.later(firstBusy)
		s.wants("check")
		if !s.listens() || s.feeds != 2 {
			t.Errorf("%d feeds", s.feeds)
		}
	})
}

func TestARecordThatIsOfNoUseIsDealtWith(t *testing.T) {
	const (
		earlier = `{"version":1,"boot":"00000000-1111-2222-3333-444444444444","id":"1"}` + "\n"
		newest  = `{"version":9,"boot":"b","id":"1"}` + "\n{}"
	)
	for what, tt := range map[string]struct {
		content string
		left    string // suffix of what is there afterwards
		logged  string
		did     []string
	}{
		"damaged":             {"{", ".json", "damaged", nil},
		"empty":               {"", ".json", "damaged", nil},
		"of an earlier epoch": {earlier + "{}", "", "earlier epoch", []string{"disown"}},
		"of a newer version":  {newest, ".json", "newer version", nil},
	} {
		t.Run(what, func(t *testing.T) {
			inSite(t, func(t *testing.T, s *site) {
				s.raw(tt.content)
				s.start()
				s.wants(tt.did...)
				if !s.logged(tt.logged) {
					t.Errorf("log: %s", &s.log)
				}
				var left []string
				for _, suffix := range []string{".json", ".json.damaged"} {
					if _, err := os.Stat(s.dir.UplinksPath() + "/" + s.nic + suffix); err == nil {
						left = append(left, suffix)
					}
				}
				if got := strings.Join(left, " "); !strings.HasSuffix(got, tt.left) || (got == "") != (tt.left == "") {
					t.Errorf("left: %q, want %q", got, tt.left)
				}
				// Any process that can repairs it.
				s.save(uplink.Taken)
				s.tell()
				s.wants("check", "adopt")
			})
		})
	}
	t.Run("no record of a takeover", func(t *testing.T) {
		inSite(t, func(t *testing.T, s *site) {
			if err := s.dir.Uplink(s.nic).Save([]byte(`{"version":77}`)); err != nil {
				t.Fatal(err)
			}
			s.start()
			s.later(time.Minute)
			s.wants()
			if _, err := s.dir.Uplink(s.nic).Load(); err != nil || !s.logged("cannot read") {
				t.Errorf("it is gone: %v; log: %s", err, &s.log)
			}
		})
	})
}

func TestPatience(t *testing.T) {
	t.Parallel()
	var p patience
	at := time.Unix(0, 0)
	last := at
	var waits []time.Duration
	for range 9 {
		last = at
		wait := p.mended(at)
		if p.waits(at.Add(wait)) || wait > 0 != p.waits(at) {
			t.Errorf("after %d mends, at once: %t, after %v: %t", p.mends, p.waits(at), wait, p.waits(at.Add(wait)))
		}
		waits = append(waits, wait)
		at = at.Add(wait)
	}
	for i := range waits {
		if (waits[i] == 0) != (i < mendsAtOnce-1) || i > 0 && waits[i] < waits[i-1] || waits[i] > lastPatience {
			t.Errorf("waits: %v", waits)
		}
	}
	p.calm(last.Add(calmAfter))
	if p.mends == 0 {
		t.Error("calm too soon")
	}
	p.calm(last.Add(calmAfter + time.Second))
	if p.mends != 0 || p.waits(at) {
		t.Error("not calm")
	}
}

func TestARecordOfWhichNothingWasHeardIsFound(t *testing.T) {
	inSite(t, func(t *testing.T, s *site) {
		s.start()
		s.save(uplink.Taken)
		s.changes <- change{} // something was lost
		s.later(time.Millisecond)
		s.wants("check", "adopt")
		if err := s.dir.Uplink(s.nic).Remove(); err != nil {
			t.Fatal(err)
		}
		s.changes <- change{}
		s.later(time.Hour)
		s.wants()
	})
}

func TestTheDirectoryOfUplinksIsWatchedUntilItsEnd(t *testing.T) {
	t.Parallel()
	dir, err := state.Open(t.TempDir() + "/run/state")
	if err != nil {
		t.Fatal(err)
	}
	leases, err := lease.Open(t.TempDir() + "/leases")
	if err != nil {
		t.Fatal(err)
	}
	k, err := New(&Config{Leases: leases, State: dir})
	if err != nil {
		t.Fatal(err)
	}
	s := &site{t: t, dir: dir, nic: fmt.Sprintf("n%08x", rand.Uint32()), fails: map[string]error{}}
	u := k.newUplinks(t.Context(), s, s.listen)
	ended := make(chan error)
	go func() { defer u.closeFeed(); ended <- u.keepWatching() }()
	until(t, "its directory is made", func() bool { _, err := os.Stat(dir.UplinksPath()); return err == nil })
	// Once it is adopted nobody takes its lock any more, which would make the directory.
	until(t, "an uplink is heard of", func() bool { s.save(uplink.Taken); return slices.Contains(s.did(), "adopt") })
	if err := os.RemoveAll(dir.UplinksPath()); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("it ended with %v", err)
	}
	// Where it cannot be made there is an error.
	if err := os.WriteFile(dir.UplinksPath(), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := u.keepWatching(); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("a file in its place: %v", err)
	}
}
