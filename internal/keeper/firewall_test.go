package keeper

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// wall is a firewall that a test changes. Everything happens in a bubble of its own time.
type wall struct {
	t          *testing.T
	keep       *Keeper
	dir        *state.Dir
	turn       sync.Mutex // as in bench
	announced  chan any   // []netlink.Message or error
	generation uint32
	lacking    bool
	stubborn   bool // repairing does not help
	fails      error
	obstacles  []string
	looks      []time.Duration // since the start
	repairs    []time.Duration
	start      time.Time
}

func (w *wall) Look(context.Context) (uint32, []string, error) {
	w.turn.Lock()
	defer w.turn.Unlock()
	w.looks = append(w.looks, time.Since(w.start))
	if w.lacking {
		return 0, []string{"the rule"}, w.fails
	}
	return w.generation, nil, w.fails
}

func (w *wall) Obstacles(context.Context) ([]string, error) {
	w.turn.Lock()
	defer w.turn.Unlock()
	return w.obstacles, nil
}

func (w *wall) Next() ([]netlink.Message, error) {
	switch x := (<-w.announced).(type) {
	case []netlink.Message:
		return x, nil
	case error:
		return nil, x
	}
	return nil, os.ErrClosed
}

func (w *wall) Close() error { close(w.announced); return nil }

// change is one by a program.
func (w *wall) change(by string) {
	w.generation++
	w.announced <- []netlink.Message{nltest.Message(newGeneration, nltest.Body([]byte{0, 0, 0, 0}, func(ae *netlink.AttributeEncoder) {
		ae.ByteOrder = binary.BigEndian
		ae.Uint32(unix.NFTA_GEN_ID, w.generation)
		ae.Uint32(unix.NFTA_GEN_PROC_PID, 7)
		ae.String(unix.NFTA_GEN_PROC_NAME, by)
	}))}
}

// inWall runs a test whose keeper has looked once, and found all right.
func inWall(t *testing.T, test func(t *testing.T, w *wall)) {
	t.Helper()
	inWallThat(t, false, test)
}

// inWallThat runs a test whose keeper has looked once.
func inWallThat(t *testing.T, lacking bool, test func(t *testing.T, w *wall)) {
	t.Helper()
	t.Parallel()
	// Not in the bubble, since they begin goroutines.
	leases, err := lease.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	dir, err := state.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		w := &wall{t: t, dir: dir, announced: make(chan any), generation: 100, start: time.Now(), lacking: lacking}
		w.keep, err = New(&Config{Leases: leases, State: dir, Firewall: w, Repair: func(context.Context) error {
			w.turn.Lock()
			defer w.turn.Unlock()
			w.repairs = append(w.repairs, time.Since(w.start))
			if !w.stubborn {
				w.lacking = false
				w.generation++
			}
			return nil
		}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			w.keep.newFirewall(ctx, w, func() (source, error) { return w, nil }).run()
		}()
		synctest.Wait()
		test(t, w)
		cancel()
		<-ended
	})
}

func (w *wall) after(d time.Duration) { pass(d, &w.turn) }

func (w *wall) wantLooks(want ...time.Duration) {
	w.t.Helper()
	if !slices.Equal(w.looks, want) {
		w.t.Errorf("looked at %v, want %v", w.looks, want)
	}
}

func TestFirewallIsLookedAtAfterABurst(t *testing.T) {
	inWall(t, func(_ *testing.T, w *wall) {
		w.after(time.Second)
		w.change("nft")
		w.after(100 * time.Millisecond)
		w.change("nft")
		w.after(time.Second)
		w.wantLooks(0, 1300*time.Millisecond)
	})
}

func TestFirewallIsLookedAtThoughABurstDoesNotEnd(t *testing.T) {
	inWall(t, func(t *testing.T, w *wall) {
		for range 100 {
			w.change("nft")
			w.after(50 * time.Millisecond)
		}
		for i := 1; i < len(w.looks); i++ {
			if gap := w.looks[i] - w.looks[i-1]; gap > time.Second {
				t.Errorf("not looked for %v", gap)
			}
		}
		if len(w.looks) < 5 || len(w.looks) > 10 {
			t.Errorf("looked %d times: %v", len(w.looks), w.looks)
		}
	})
}

func TestFirewallIsLookedAtOnceInAWhile(t *testing.T) {
	inWall(t, func(_ *testing.T, w *wall) {
		w.after(61 * time.Second)
		w.wantLooks(0, 30*time.Second, 60*time.Second)
	})
}

// A name can be forged: it delays the look, by a little.
func TestChangesInOurNameAreLookedAtLater(t *testing.T) {
	inWall(t, func(_ *testing.T, w *wall) {
		for range 10 {
			w.change("tombolo")
			w.after(100 * time.Millisecond)
		}
		w.after(10 * time.Second)
		w.wantLooks(0, 3*time.Second)
		w.change("tombolod")
		w.change("nft")
		w.change("tombolo")
		w.after(time.Second)
		w.wantLooks(0, 3*time.Second, 11200*time.Millisecond)
	})
}

// A doctor's table is no matter of the keeper's.
func TestADoctorsChangeIsNotLookedAt(t *testing.T) {
	inWall(t, func(_ *testing.T, w *wall) {
		w.after(time.Second)
		w.change("tombolo-doctor")
		w.after(10 * time.Second)
		w.wantLooks(0)
	})
}

func TestWhatWasLookedAtSinceIsNoNews(t *testing.T) {
	inWall(t, func(_ *testing.T, w *wall) {
		w.generation -= 3
		w.change("nft")
		w.change("nft")
		w.change("nft") // that of the look
		w.after(time.Second)
		w.wantLooks(0)
		w.change("nft")
		w.after(time.Second)
		w.wantLooks(0, 1200*time.Millisecond)
	})
}

func TestLostAndBrokenNewsAreNews(t *testing.T) {
	inWall(t, func(_ *testing.T, w *wall) {
		w.announced <- unix.ENOBUFS
		w.after(time.Second)
		w.announced <- []netlink.Message{nltest.Message(newGeneration, []byte{1}), nltest.Message(newGeneration+1, nil)}
		w.after(time.Second)
		w.announced <- nl.ErrMalformed
		w.after(time.Second)
		w.announced <- []netlink.Message{nltest.Message(newGeneration, []byte{0, 0, 0, 0})}
		w.after(time.Second)
		w.wantLooks(0, 200*time.Millisecond, 1200*time.Millisecond, 2200*time.Millisecond, 3200*time.Millisecond)
	})
}

func TestWhatIsUndoneAgainAndAgainIsLeftAloneForAMinute(t *testing.T) {
	inWall(t, func(t *testing.T, w *wall) {
		undo := func() { w.lacking = true; w.change("fighter"); w.after(time.Second) }
		undo()
		undo()
		if c, err := w.dir.Contested(); c != nil || err != nil || len(w.repairs) != 2 {
			t.Fatalf("after two: %+v, %v; %d repairs", c, err, len(w.repairs))
		}
		undo()
		c, err := w.dir.Contested()
		if err != nil || c == nil || c.Times != 3 || c.By != "fighter" || c.What != "the rule" || len(w.repairs) != 3 {
			t.Fatalf("after three: %+v, %v; %d repairs", c, err, len(w.repairs))
		}
		last := w.repairs[2]
		for range 5 {
			undo()
		}
		if len(w.repairs) != 3 {
			t.Errorf("put right at %v", w.repairs)
		}
		// Then once in a minute.
		w.after(150 * time.Second)
		if want := append(w.repairs[:3:3], last+time.Minute); !slices.Equal(w.repairs, want) {
			t.Errorf("put right at %v, want %v", w.repairs, want)
		}
		// Left alone for a minute, it is not contested any more.
		if c, err = w.dir.Contested(); c != nil || err != nil {
			t.Errorf("in the end: %+v, %v", c, err)
		}
		undo()
		if len(w.repairs) != 5 {
			t.Errorf("put right at %v", w.repairs)
		}
		text := exposition(t, &w.keep.metrics)
		for _, line := range []string{"tombolo_firewall_mends_total 5", "tombolo_firewall_contests_total 1", "tombolo_firewall_contested 0", "tombolo_firewall_errors_total 0"} {
			if !strings.Contains(text, line+"\n") {
				t.Errorf("no %s in\n%s", line, text)
			}
		}
	})
}

// A node that comes up with an empty ruleset has been fought by nobody.
func TestWhatIsPutRightWhenTheKeeperBeginsIsNoFight(t *testing.T) {
	inWallThat(t, true, func(t *testing.T, w *wall) {
		undo := func() { w.lacking = true; w.change("nft"); w.after(time.Second) }
		if len(w.repairs) != 1 {
			t.Fatalf("put right at %v at the start", w.repairs)
		}
		undo()
		undo()
		if c, err := w.dir.Contested(); c != nil || err != nil || w.lacking || len(w.repairs) != 3 {
			t.Fatalf("after two: %+v, %v; lacking %v, put right at %v", c, err, w.lacking, w.repairs)
		}
		undo()
		if c, err := w.dir.Contested(); err != nil || c == nil || c.Times != 3 {
			t.Errorf("after three: %+v, %v", c, err)
		}
	})
}

// As ufw does it: what is put right between two of its programs, the next undoes.
func TestAReloadOfManyStepsIsNoFight(t *testing.T) {
	inWall(t, func(t *testing.T, w *wall) {
		reload := func() {
			for range 6 {
				w.lacking = true
				w.change("iptables-restor")
				w.after(400 * time.Millisecond)
			}
			w.after(2 * time.Second)
		}
		reload()
		if c, err := w.dir.Contested(); c != nil || err != nil || w.lacking || len(w.repairs) != 2 {
			t.Errorf("after a reload: %+v, %v; lacking %v, put right at %v", c, err, w.lacking, w.repairs)
		}
		// Another one in the same minute is a third time, but pods have what they need after it.
		reload()
		if w.lacking || len(w.repairs) != 3 {
			t.Errorf("after two: lacking %v, put right at %v", w.lacking, w.repairs)
		}
	})
}

// The keeper does not wait for the end of endless changes.
func TestFirewallIsPutRightAgainThoughABurstDoesNotEnd(t *testing.T) {
	inWall(t, func(t *testing.T, w *wall) {
		w.lacking = true
		for range 60 {
			w.change("nft")
			w.after(100 * time.Millisecond)
			if len(w.repairs) == 1 {
				w.lacking = true
			}
		}
		if len(w.repairs) != 2 || w.repairs[1]-w.repairs[0] > 6*time.Second {
			t.Errorf("put right at %v", w.repairs)
		}
	})
}

func TestThreeTimesInMoreThanAMinuteIsNoFight(t *testing.T) {
	inWall(t, func(t *testing.T, w *wall) {
		for range 6 {
			w.lacking = true
			w.change("nft")
			w.after(31 * time.Second)
		}
		if c, err := w.dir.Contested(); c != nil || err != nil || len(w.repairs) != 6 {
			t.Errorf("%+v, %v; %d repairs", c, err, len(w.repairs))
		}
	})
}

func TestAContestOfAnEarlierKeeperIsOver(t *testing.T) {
	inWall(t, func(t *testing.T, w *wall) {
		if err := w.dir.SetContested(&state.Contested{Times: 7}); err != nil {
			t.Fatal(err)
		}
		w.keep.newFirewall(canceled(), w, func() (source, error) { return nil, errors.New("no") }).run()
		if c, err := w.dir.Contested(); c != nil || err != nil {
			t.Errorf("%+v, %v", c, err)
		}
		// A keeper that cannot subscribe says so.
		text := exposition(t, &w.keep.metrics)
		if !strings.Contains(text, "tombolo_firewall_errors_total 1\n") {
			t.Errorf("%s", text)
		}
	})
}

func canceled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

func TestObstaclesAreCountedOnceInAWhile(t *testing.T) {
	inWall(t, func(t *testing.T, w *wall) {
		w.obstacles = []string{"one", "two"}
		w.after(31 * time.Second)
		if got := w.keep.metrics.firewallObstacles; got != 2 {
			t.Errorf("%d obstacles", got)
		}
	})
}
