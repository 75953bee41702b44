// Package firewalld has the links over which the host forwards for pods join a zone of firewalld,
// for as long as their networks are on record. An accept of ours does not override firewalld's
// rejects, so that pods pass only where a zone of it lets them.
//
// firewalld is spoken with over D-Bus. The zone is changed in its running configuration alone, never in the
// permanent one, and so again whenever firewalld begins anew or is reloaded. An operator's choice stays: a link
// that is in a zone other than the default one, or in any by the permanent configuration, is left there.
//
// Without a bus or firewalld, and where firewalld works in another network namespace, nothing
// happens until they come.
package firewalld

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/internal/state"
)

const (
	// timeout is how long the bus and firewalld may take to answer. A firewalld with many rules does not answer for
	// seconds while it loads them.
	timeout = 30 * time.Second

	// again is how long after a failure it tries again, and looks for a bus.
	again = 5 * time.Second

	// pause is how often it looks whether networks have come or gone.
	pause = 500 * time.Millisecond

	// apart is the least time between two looks that signals cause: any local user can send them.
	apart = time.Second

	// mostText is the length to which texts of firewalld are cut.
	mostText = 200

	// later is when it looks again at the latest.
	later = time.Minute
)

// Config says which links join. State and Tell are needed; the rest has defaults.
type Config struct {
	// State has the networks, and keeps what was done.
	State *state.Dir
	// Address is the bus's, as in DBUS_SYSTEM_BUS_ADDRESS; empty is where the system's bus
	// listens. Only unix:path=… is supported.
	Address string
	// Tell is called before and after a change of the links that joined, for the rules to follow State's Zones.
	Tell func(context.Context) error
	// Log gets a line for each link that joins or leaves; it may be nil.
	Log *slog.Logger
}

// Keep has links join, and leave with their networks, until ctx is done. Links that are in the zone
// then stay there, for the next one. Nothing waits for it.
func Keep(ctx context.Context, cfg *Config) {
	newKeeper(cfg).keep(ctx)
}

func (k *keeper) keep(ctx context.Context) {
	for ctx.Err() == nil {
		k.report(k.meet(ctx))
		wait(ctx, k.again)
	}
}

// keeper keeps links in the zone.
type keeper struct {
	state   *state.Dir
	address string
	tell    func(context.Context) error
	log     *slog.Logger

	timeout, again, pause, later time.Duration // the constants, but for tests

	told string          // the error that was reported last
	left map[string]bool // links of which it was logged that they are left where they are
}

func newKeeper(cfg *Config) *keeper {
	return &keeper{
		state: cfg.State, tell: cfg.Tell, address: cmp.Or(cfg.Address, systemBus), log: cmp.Or(cfg.Log, slog.New(slog.DiscardHandler)),
		timeout: timeout, again: again, pause: pause, later: later, left: map[string]bool{},
	}
}

// report logs an error once, until there is another one or none. A missing bus is none.
func (k *keeper) report(err error) {
	text := ""
	if err != nil && !errors.Is(err, errNoBus) && !errors.Is(err, context.Canceled) {
		text = err.Error()
		text = text[:min(len(text), mostText)]
	}
	if text != "" && text != k.told {
		k.log.Warn("cannot have firewalld's zones as pods need them: trying again", "err", text)
	}
	k.told = text
}

// meet connects to the bus, and works until the connection ends.
func (k *keeper) meet(ctx context.Context) error {
	b, err := dialBus(ctx, k.address, k.timeout)
	if err != nil {
		return err
	}
	defer b.close()
	for {
		there, err := b.isThere(ctx)
		var again <-chan time.Time // for as long as firewalld runs; the bus announces its start
		switch {
		case err == nil && there:
			err = k.attend(ctx, b)
			again = time.After(k.again)
		case err == nil:
			err = k.tell(ctx)
		}
		k.report(err)
		if err != nil {
			return err
		}
		select {
		case <-b.news:
			b.settle(ctx)
		case <-again:
		case <-b.ended():
			return nil
		}
	}
}

// attend works for as long as firewalld is there, or until something fails.
func (k *keeper) attend(ctx context.Context, b *bus) error {
	lock, err := k.state.AttendZones()
	if err != nil {
		return err
	}
	defer lock.Close()
	for {
		changed := k.state.NetworksChanged()
		err := k.look(ctx, b)
		if gone(err) {
			return nil
		} else if err != nil {
			return err
		}
		k.report(nil)
		if there, err := k.stir(ctx, b, changed); err != nil || !there {
			return err
		}
	}
}

// stir waits for networks or firewalld to change, and says whether firewalld is still there. A
// change that came within the same tick of the clock as the one before is seen later.
func (k *keeper) stir(ctx context.Context, b *bus, changed int64) (there bool, _ error) {
	timer := time.NewTicker(k.pause)
	defer timer.Stop()
	for end := time.Now().Add(k.later); changed == k.state.NetworksChanged() && time.Now().Before(end); {
		select {
		case <-timer.C:
		case <-b.news:
			b.settle(ctx)
			return b.isThere(ctx)
		case <-b.ended():
			return false, nil
		}
	}
	return true, nil
}

// look has the links of networks join, and those leave whose networks are gone.
func (k *keeper) look(ctx context.Context, b *bus) error {
	// Where not all networks can be read, no link leaves.
	links, unread := k.state.ForwardedLinks()
	before, err := k.state.Zones()
	if err != nil {
		return err
	}
	errs := []error{unread}
	now := state.Zones{}
	for _, link := range slices.Compact(slices.Sorted(slices.Values(slices.Concat(links, before.Joined)))) {
		ours := slices.Contains(before.Joined, link)
		is, err := b.zonesOf(ctx, link)
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		switch what := decide(is, ours, slices.Contains(links, link), unread == nil); what {
		case stay:
			now.Joined = append(now.Joined, link)
		case forget:
		case leaveAlone:
			now.Left = append(now.Left, link)
			if !k.left[link] {
				k.log.Info("a bridge is left in the zone of firewalld that another program or a user chose for it", "link", link, "zone", is.chosen())
			}
		default:
			// On record and in the rules before it is done, so that a kill leaves no link behind in the zone, nor one
			// whose pods reach what firewalld closes.
			if err := errors.Join(k.record(before, now, link), k.tell(ctx)); err != nil {
				return errors.Join(append(errs, err)...)
			}
			err := b.carryOut(ctx, what, link, is)
			switch {
			case err == nil:
				k.log.Info(what.text(), "link", link, "zone", zone)
			case !answered(err):
				return errors.Join(append(errs, err)...)
			}
			errs = append(errs, err)
			if joins := what == join || what == move; joins == (err == nil) {
				now.Joined = append(now.Joined, link)
			}
			if what == yield && err == nil {
				now.Left = append(now.Left, link)
			}
		}
	}
	clear(k.left)
	for _, link := range now.Left {
		k.left[link] = true
	}
	if !slices.Equal(now.Joined, before.Joined) || !slices.Equal(now.Left, before.Left) {
		errs = append(errs, k.state.SetZones(now))
	}
	return errors.Join(append(errs, k.tell(ctx))...)
}

// record adds to what is on record a link that is about to be dealt with.
func (k *keeper) record(before, now state.Zones, link string) error {
	all := append(slices.Concat(before.Joined, now.Joined), link)
	slices.Sort(all)
	all = slices.Compact(all)
	if slices.Equal(all, before.Joined) {
		return nil
	}
	return k.state.SetZones(state.Zones{Joined: all, Left: now.Left})
}

func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
