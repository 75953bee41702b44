package keeper

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
)

// pass lets time pass in a bubble. That its clock has an order for what the test and the keeper do
// is unknown to the race detector, which knows the lock.
func pass(d time.Duration, l sync.Locker) {
	func() {
		l.Lock()
		defer l.Unlock()
	}()
	time.Sleep(d)
	synctest.Wait()
}

// wall is a firewall of which a test tells changes, in a bubble of its own time.
type wall struct {
	*firewall
	t          *testing.T
	turn       sync.Mutex
	announced  chan any // []netlink.Message or error
	generation uint32
	looks      []time.Duration // since the start
}

// Next gives what is announced.
func (w *wall) Next() ([]netlink.Message, error) {
	switch x := (<-w.announced).(type) {
	case []netlink.Message:
		return x, nil
	case error:
		return nil, x
	}
	return nil, os.ErrClosed
}

// Close ends it.
func (w *wall) Close() error { close(w.announced); return nil }

// change is one by a program.
func (w *wall) change(by string) {
	w.generation++
	w.announced <- []netlink.Message{nltest.Message(newGeneration, nltest.Body([]byte{0, 0, 0, 0}, func(ae *netlink.AttributeEncoder) {
		ae.ByteOrder = binary.BigEndian
		ae.Uint32(unix.NFTA_GEN_ID, w.generation)
		ae.String(unix.NFTA_GEN_PROC_NAME, by)
	}))}
}

func (w *wall) after(d time.Duration) { pass(d, &w.turn) }

func (w *wall) wantLooks(want ...time.Duration) {
	w.t.Helper()
	if !slices.Equal(w.looks, want) {
		w.t.Errorf("looked at %v, want %v", w.looks, want)
	}
}

// inWall runs a test whose keeper has looked once, and finds all right.
func inWall(t *testing.T, test func(*wall)) {
	t.Helper()
	in(t, func(t *testing.T, world *world) {
		w := &wall{t: t, announced: make(chan any), generation: 100, firewall: &firewall{}}
		start := time.Now()
		look := func(context.Context) {
			w.turn.Lock()
			defer w.turn.Unlock()
			w.looks = append(w.looks, time.Since(start))
			w.checked = w.generation
		}
		world.with = func(l *loop) {
			w.source = source{Keeper: l.Keeper, ctx: l.ctx, kind: "firewall", every: lookAtFirewall, listen: func() (feed, error) { return w, nil }, hear: w.hear, look: look,
				contests: map[string]*contest{}}
			l.sources = append(l.sources, &w.source)
		}
		world.start()
		test(w)
		world.stop()
	})
}

func TestChangesAreLookedAtAfterABurst(t *testing.T) {
	inWall(t, func(w *wall) {
		w.after(time.Second)
		w.change("nft")
		w.after(100 * time.Millisecond)
		w.change("nft")
		w.after(time.Second)
		w.wantLooks(0, 1300*time.Millisecond)
		w.after(61 * time.Second)
		w.wantLooks(0, 1300*time.Millisecond, 31300*time.Millisecond, 61300*time.Millisecond)
	})
}

func TestChangesAreLookedAtThoughABurstDoesNotEnd(t *testing.T) {
	inWall(t, func(w *wall) {
		for range 100 {
			w.change("nft")
			w.after(50 * time.Millisecond)
		}
		for i := 1; i < len(w.looks); i++ {
			if gap := w.looks[i] - w.looks[i-1]; gap > time.Second {
				w.t.Errorf("not looked for %v", gap)
			}
		}
		if len(w.looks) < 5 || len(w.looks) > 10 {
			w.t.Errorf("looked %d times: %v", len(w.looks), w.looks)
		}
	})
}

// A name can be forged: it delays the look, by a little. A doctor's table is no matter of the keeper's.
func TestChangesInOurNameAreLookedAtLater(t *testing.T) {
	inWall(t, func(w *wall) {
		for range 10 {
			w.change("tombolo")
			w.change("tombolo-doctor")
			w.after(100 * time.Millisecond)
		}
		w.after(9 * time.Second)
		w.wantLooks(0, 3*time.Second)
		w.change("tombolo-doctor")
		w.after(5 * time.Second)
		w.wantLooks(0, 3*time.Second)
		w.change("tombolod")
		w.change("nft")
		w.change("tombolo")
		w.after(time.Second)
		w.wantLooks(0, 3*time.Second, 15200*time.Millisecond)
	})
}

func TestWhatWasLookedAtSinceIsNoNews(t *testing.T) {
	inWall(t, func(w *wall) {
		w.generation -= 3
		w.change("nft")
		w.change("nft")
		w.change("nft") // that of the look
		w.after(time.Second)
		w.wantLooks(0)
	})
}

func TestLostAndBrokenNewsAreNews(t *testing.T) {
	inWall(t, func(w *wall) {
		for _, news := range []any{
			unix.ENOBUFS, fmt.Errorf("odd: %w", nl.ErrMalformed),
			[]netlink.Message{nltest.Message(newGeneration, []byte{1}), nltest.Message(newGeneration+1, nil)},
			[]netlink.Message{nltest.Message(newGeneration, []byte{0, 0, 0, 0})},
		} {
			w.announced <- news
			w.after(time.Second)
		}
		w.wantLooks(0, 200*time.Millisecond, 1200*time.Millisecond, 2200*time.Millisecond, 3200*time.Millisecond)
	})
}

// ufw runs a dozen programs, each of which undoes what was repaired before it.
func TestAReloadOfManyStepsIsNoFight(t *testing.T) {
	inWall(t, func(w *wall) {
		w.recordRepair("", "", "")
		for range 6 {
			w.change("ufw")
			w.after(700 * time.Millisecond)
		}
		w.after(time.Second)
		w.wantLooks(0, 4400*time.Millisecond)
		for range 20 {
			w.change("ufw")
			w.after(800 * time.Millisecond)
		}
		if n := len(w.looks); n < 4 || n > 6 { // within 5 s at the latest
			w.t.Errorf("a reload without an end is looked at at %v", w.looks)
		}
	})
}

// An operator may change several things within a minute, and each is put right at once.
func TestOneRepairThreeTimesOrNineAreAFight(t *testing.T) {
	inWall(t, func(w *wall) {
		for key, when := range map[string]int{"same": 3, "different": 9} {
			for i := 1; i <= when; i++ {
				_, begins := w.recordRepair(key, fmt.Sprint(key, i*map[string]int{"different": 1}[key]), "a fight")
				expect.Equal(w.t, begins, i == when, "%s: it is a fight at repair %d", key, i)
			}
		}
	})
}

// FuzzAnnouncements: nothing that is announced ends the keeper.
func FuzzAnnouncements(f *testing.F) {
	f.Add(uint16(unix.RTM_NEWLINK), make([]byte, unix.SizeofIfInfomsg))
	f.Add(uint16(unix.RTM_DELADDR), make([]byte, unix.SizeofIfAddrmsg))
	f.Add(uint16(unix.RTM_DELROUTE), []byte{1})
	f.Fuzz(func(_ *testing.T, kind uint16, data []byte) {
		message := nltest.Message(kind, data)
		l := &linkSource{firewall: &source{slot: slot{busy: true}}, ports: map[int]bool{}}
		l.hear(message)
		(&firewall{}).hear(message)
	})
}
