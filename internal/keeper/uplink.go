package keeper

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// The keeper finishes takeovers of NICs whose process was killed, and repairs those
// that are undone: network managers put their addresses back on the NIC, or take it out
// of the bridge, when they are restarted or told to reload. What the host's lease or its
// administrator changes on the bridge is not undone: the takeover's record follows, for
// the next repair, and so do the pods whose default route leads to the host's address. It
// learns of records by inotify(7) and of links and addresses from the kernel, and looks
// once in a while, for what neither announces (routes). On a host without uplinks it
// watches records alone.

const (
	// lookAtUplinks is how often a takeover is looked at of which nothing was heard.
	lookAtUplinks = time.Minute

	// pauseUplinks is how long after the first news an uplink is looked at: programs that
	// rewrite it do so in several steps, and so does a repair.
	pauseUplinks = 200 * time.Millisecond

	// While another works on an uplink, its lock is tried for after the first of these,
	// doubled up to the second: the end of the other process is not announced.
	firstBusy = 500 * time.Millisecond
	lastBusy  = 10 * time.Second
)

// uplinks looks after all of them. It has one goroutine, since there are few, and beside
// it that of the feed.
type uplinks struct {
	*Keeper
	ctx  context.Context
	all  map[string]*taken // by NIC
	work takeovers
	// listen subscribes to links and addresses; feed is nil as long as there is no
	// uplink.
	listen func() (*feed, error)
	feed   *feed
	// seen is what the kernel told last of links, by index: as such they are no news.
	seen map[int]linkFacts
}

// taken is what is known of one uplink. It can be lost: it is with the keeper.
type taken struct {
	nic      string
	bridge   string // "" before its record was read
	links    [2]int // the indexes of NIC and bridge; 0 if they are not there
	due      time.Time
	record   []byte // as it was last seen; nil if it cannot be read
	state    uplink.State
	busy     int // how often in a row its lock was not to be had
	failures int // in a row
	patience patience
	adopted  bool // the lease that the NIC had is looked after
	putBack  bool // the pods behind it may have lost their port, or their way out
}

// takeovers is what is done to uplinks.
type takeovers interface {
	// check gives what is not as the takeover made it.
	check(ctx context.Context, rec *uplink.Record) ([]tombolo.Difference, error)
	mend(ctx context.Context, rec *uplink.Record, j uplink.Journal) (changed bool, err error)
	// present gives the record as it would be by now; rec itself if that is the same.
	present(ctx context.Context, rec *uplink.Record) (*uplink.Record, error)
	// finish brings one to its end that was cut short; nil: the NIC has all back.
	finish(ctx context.Context, rec *uplink.Record, j uplink.Journal) (*uplink.Record, error)
	// adopt has the keeper renew the lease that the NIC had, if it had one, and disown
	// ends that once give has succeeded.
	adopt(ctx context.Context, rec *uplink.Record) error
	disown(ctx context.Context, nic string, give func() error) error
	// links gives the indexes of NIC and bridge, 0 for what is not there.
	links(rec *uplink.Record) [2]int
}

// keepUplinks looks after uplinks until ctx is done.
func (k *Keeper) keepUplinks(ctx context.Context) {
	u := k.newUplinks(ctx, kernelUplinks{k}, func() (*feed, error) { return newFeed(&nl.Config{NetNS: k.host}) })
	defer u.closeFeed()
	for ctx.Err() == nil {
		if err := u.keepWatching(); err != nil {
			u.trouble("cannot hear of uplinks: looking again later", "err", err)
		}
		// The directory was removed, or cannot be made.
		select {
		case <-ctx.Done():
		case <-time.After(lastBusy):
		}
	}
}

func (k *Keeper) newUplinks(ctx context.Context, work takeovers, listen func() (*feed, error)) *uplinks {
	return &uplinks{Keeper: k, ctx: ctx, all: map[string]*taken{}, seen: map[int]linkFacts{}, work: work, listen: listen}
}

// keepWatching runs until ctx is done, or the directory of the records is gone.
func (u *uplinks) keepWatching() error {
	dir := u.state.UplinksPath()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	// Before the records are listed, so that none falls in between.
	w, err := watchFor(dir, state.UplinkNIC)
	if err != nil {
		return err
	}
	u.rescan()
	u.loop(w.changes)
	return w.close()
}

// loop is the one place that decides what is done when. changes are of records.
func (u *uplinks) loop(changes <-chan change) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for u.ctx.Err() == nil {
		u.visitDue()
		timer.Reset(u.pause())
		select {
		case <-u.ctx.Done():
		case <-timer.C:
		case c, ok := <-changes:
			switch {
			case !ok:
				return
			case c.name == "":
				u.rescan()
			default:
				u.changed(c.name)
			}
		case news, ok := <-u.feed.news():
			if !ok {
				u.closeFeed()
				u.lookAtAll(firstBusy) // not at once, in case that it ends again
				break
			}
			u.heard(news)
		case <-u.strayed:
			for _, t := range u.all {
				t.putBack = true
			}
			u.lookAtAll(pauseUplinks)
		}
	}
}

// rescan has every uplink looked at, and those that are gone.
func (u *uplinks) rescan() {
	nics, err := u.state.Uplinks()
	if err != nil {
		u.trouble("cannot list uplinks", "err", err)
	}
	for _, nic := range nics {
		u.look(nic)
	}
	u.lookAtAll(0)
}

func (u *uplinks) lookAtAll(in time.Duration) {
	for _, t := range u.all {
		t.due = now().Add(in)
	}
}

// changed has an uplink looked at whose record was written. What the keeper
// wrote itself is no reason to try again what failed.
func (u *uplinks) changed(nic string) {
	if t := u.all[nic]; t != nil && t.record != nil {
		if data, err := u.state.Uplink(nic).Load(); err == nil && bytes.Equal(data, t.record) {
			return
		}
	}
	u.look(nic)
}

// look has an uplink looked at.
func (u *uplinks) look(nic string) {
	t := u.all[nic]
	if t == nil {
		t = &taken{nic: nic}
		u.all[nic] = t
	}
	t.due = now()
}

// pause is how long nothing is due.
func (u *uplinks) pause() time.Duration {
	var due []time.Time
	for _, t := range u.all {
		due = append(due, t.due)
	}
	first := earliest(due...)
	if first.IsZero() {
		return longestPause
	}
	return min(max(first.Sub(now()), 0), longestPause)
}

func (u *uplinks) visitDue() {
	for nic, t := range u.all {
		if t.due.After(now()) {
			continue
		}
		if u.visit(t); t.due.IsZero() {
			delete(u.all, nic)
		}
	}
	if len(u.all) == 0 {
		u.closeFeed()
	}
	u.counted()
}

// closeFeed ends the feed.
func (u *uplinks) closeFeed() {
	if u.feed != nil {
		u.feed.close()
	}
	u.feed = nil
	clear(u.seen)
}

// hear begins to hear what happens to links and addresses. Without that the looks that
// are made once in a while remain.
func (u *uplinks) hear() {
	if u.feed != nil {
		return
	}
	f, err := u.listen()
	if err != nil {
		u.trouble("cannot hear of links and addresses", "err", err)
		return
	}
	u.feed = f
}

// heard has those uplinks looked at that news are about.
func (u *uplinks) heard(list []news) {
	for _, n := range list {
		if n.lost {
			clear(u.seen)
		} else if !u.isNew(n) {
			continue
		}
		for _, t := range u.all {
			switch {
			case !n.lost && !t.isAbout(n):
			case t.appears(n):
				// A NIC that is plugged in again is worth a try at once.
				t.failures, t.due = 0, now().Add(pauseUplinks)
			case t.failures == 0 && !t.patience.waits(now()) && t.due.After(now().Add(pauseUplinks)):
				t.due = now().Add(pauseUplinks)
			}
		}
	}
}

// isNew says whether an announcement tells something: every pod that comes and goes has
// the kernel announce the bridge again, as it was.
func (u *uplinks) isNew(n news) bool {
	switch {
	case n.facts == nil:
		return true
	case n.gone:
		delete(u.seen, n.index)
		return true
	}
	last, ok := u.seen[n.index]
	if ok && last == *n.facts {
		return false
	}
	for _, t := range u.all {
		if !t.isAbout(n) {
			continue
		}
		u.seen[n.index] = *n.facts // of others there are too many
		if ok && !last.carrier && n.facts.carrier && n.facts.name == t.nic && t.bridge != "" {
			select {
			case u.carriers <- t.bridge:
			default: // so many are waiting to be heard that this is not worth waiting for
			}
		}
	}
	return true
}

// isAbout says whether an announcement is about the NIC or the bridge.
func (t *taken) isAbout(n news) bool {
	return n.index == t.links[0] || n.index == t.links[1] || n.facts != nil && (n.facts.name == t.nic || n.facts.name == t.bridge)
}

// appears says that a NIC or bridge is there again that was not.
func (t *taken) appears(n news) bool {
	return n.facts != nil && !n.gone && n.index != t.links[0] && n.index != t.links[1] && (n.facts.name == t.nic || n.facts.name == t.bridge)
}

// load reads a record. It is nil where there is none to go by, and then all that is to be
// done about that is done.
func (u *uplinks) load(t *taken) *uplink.Record {
	file := u.state.Uplink(t.nic)
	data, err := file.Load()
	t.record = data
	var rec *uplink.Record
	if err == nil {
		rec, err = uplink.ParseRecord(data)
	}
	switch {
	case err == nil:
		t.state, t.bridge = rec.State, rec.Bridge
		return rec
	case errors.Is(err, fs.ErrNotExist):
		t.due = time.Time{} // forgotten
	case errors.Is(err, state.ErrStale):
		if err := u.work.disown(u.ctx, t.nic, func() error { return nil }); err != nil {
			u.later(t, "cannot drop the lease of an uplink", err)
			return nil
		}
		u.alone(t, func() { u.drop(t) })
	default: // damaged, or a newer version's
		u.later(t, "cannot read the record of an uplink", err)
	}
	return nil
}

// alone does something under the uplink's lock, or comes back later.
func (u *uplinks) alone(t *taken, fn func()) {
	lock, err := u.state.TryLockUplink(t.nic)
	if err != nil {
		u.later(t, "cannot lock uplink", err)
		return
	}
	if lock == nil {
		t.due = now().Add(min(firstBusy<<min(t.busy, 10), lastBusy))
		t.busy++
		return
	}
	t.busy = 0
	fn()
	t.record, _ = u.state.Uplink(t.nic).Load() // before anybody else writes it
	if err := lock.Close(); err != nil {
		u.trouble("cannot unlock uplink", "nic", t.nic, "err", err)
	}
}

// trouble reports what went wrong.
func (u *uplinks) trouble(what string, args ...any) {
	u.metrics.count(&u.metrics.uplinkErrors)
	u.log.Warn(what, args...)
}

// counted tells the metrics what there is.
func (u *uplinks) counted() {
	states := map[uplink.State]int{}
	for _, t := range u.all {
		if t.state != "" {
			states[t.state]++
		}
	}
	u.metrics.uplinksAre(states)
}
