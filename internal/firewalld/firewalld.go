// Package firewalld puts links into a zone of firewalld: the links over which the host forwards packets of pods, for
// as long as their networks are on record. It is necessary because an accept of ours does not override firewalld's
// rejects.
//
// It talks to firewalld over D-Bus. It changes only firewalld's running configuration, never the permanent one. So it
// repeats the change whenever firewalld starts or reloads. It respects an operator's choice: it leaves a link alone
// that is in a zone other than the default one, or in any zone of the permanent configuration.
//
// Without a bus or firewalld, or if firewalld runs in another network namespace, it waits until they appear.
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
	// timeout is the time limit for answers of the bus and firewalld. A firewalld with many rules does not answer for
	// seconds while it loads them.
	timeout = 30 * time.Second

	// retryPause is the pause after a failure, and between two attempts to reach the bus.
	retryPause = 5 * time.Second

	// pollInterval is the interval between two looks for new and removed networks.
	pollInterval = 500 * time.Millisecond

	// minLookInterval is the least time between two looks caused by signals, since any local user can send signals.
	minLookInterval = time.Second

	// mostText is the maximum length of an error text of firewalld in the log, in bytes.
	mostText = 200

	// maxLookInterval is the longest time between two looks at firewalld.
	maxLookInterval = time.Minute
)

// Config configures Keep. State and Tell are required.
type Config struct {
	// State has the networks' records, and stores which links Keep has put into the zone.
	State *state.Dir
	// Address is the address of the bus, as in DBUS_SYSTEM_BUS_ADDRESS. Empty means the system's bus. Only
	// unix:path=… is supported.
	Address string
	// Tell is called before and after a change of the links in the zone, so that our rules follow State's Zones.
	Tell func(context.Context) error
	// Log receives a line for each link that joins or leaves the zone. It may be nil.
	Log *slog.Logger
}

// Keep puts links into the zone, and takes them out when their networks are gone, until ctx is done. The links then
// stay in the zone, for the next process. Nothing waits for Keep.
func Keep(ctx context.Context, cfg *Config) {
	newKeeper(cfg).keep(ctx)
}

// keep connects to the bus again and again until ctx is done.
func (k *keeper) keep(ctx context.Context) {
	for ctx.Err() == nil {
		k.report(k.connect(ctx))
		wait(ctx, k.retryPause)
	}
}

// keeper is the state of one Keep.
type keeper struct {
	state   *state.Dir
	address string
	tell    func(context.Context) error
	log     *slog.Logger

	timeout, retryPause, pollInterval, maxLookInterval time.Duration // the constants of these names, except in tests

	reported string          // the error that was reported last
	left     map[string]bool // links whose line about another zone is in the log already
}

func newKeeper(cfg *Config) *keeper {
	return &keeper{
		state: cfg.State, tell: cfg.Tell, address: cmp.Or(cfg.Address, systemBus), log: cmp.Or(cfg.Log,
			slog.New(slog.DiscardHandler)),
		timeout: timeout, retryPause: retryPause, pollInterval: pollInterval, maxLookInterval: maxLookInterval,
		left: map[string]bool{},
	}
}

// report logs an error, unless it is the error that was logged last. A missing bus is not logged.
func (k *keeper) report(err error) {
	text := ""
	if err != nil && !errors.Is(err, errNoBus) && !errors.Is(err, context.Canceled) {
		text = err.Error()
		text = text[:min(len(text), mostText)]
	}
	if text != "" && text != k.reported {
		k.log.Warn("cannot have firewalld's zones as pods need them: trying again", "err", text)
	}
	k.reported = text
}

// connect connects to the bus, and works until the connection ends.
func (k *keeper) connect(ctx context.Context) error {
	b, err := dialBus(ctx, k.address, k.timeout)
	if err != nil {
		return err
	}
	defer b.close()
	for {
		there, err := b.isThere(ctx)
		var again <-chan time.Time // set only while firewalld runs; the bus announces its start
		switch {
		case err == nil && there:
			err = k.attend(ctx, b)
			again = time.After(k.retryPause)
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

// attend works while firewalld is running, or until something fails.
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

// stir waits until networks or firewalld change, and reports whether firewalld is still running. If two changes of
// networks come within one tick of the clock, the second is noticed later.
func (k *keeper) stir(ctx context.Context, b *bus, changed int64) (there bool, _ error) {
	timer := time.NewTicker(k.pollInterval)
	defer timer.Stop()
	for end := time.Now().Add(k.maxLookInterval); changed == k.state.NetworksChanged() && time.Now().Before(end); {
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

// look puts the links of networks into the zone, and takes out those whose networks are gone.
func (k *keeper) look(ctx context.Context, b *bus) error {
	// If some networks cannot be read, no link leaves the zone.
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
				k.log.Info("a bridge is left in the zone of firewalld that another program or a user chose for it",
					"link", link, "zone", is.chosen())
			}
		default:
			// Write the record and the rules before the change. So a kill leaves no unrecorded link in the zone, and
			// no link whose pods reach ports that firewalld closes.
			if err := errors.Join(k.record(before, now, link), k.tell(ctx)); err != nil {
				return errors.Join(append(errs, err)...)
			}

			err := b.changeZone(ctx, what, link, is)
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

// record adds a link to the record before the link is changed.
func (k *keeper) record(before, now state.Zones, link string) error {
	all := append(slices.Concat(before.Joined, now.Joined), link)
	slices.Sort(all)
	all = slices.Compact(all)
	if slices.Equal(all, before.Joined) {
		return nil
	}
	return k.state.SetZones(state.Zones{Joined: all, Left: now.Left})
}

// wait waits for d, or until ctx is done.
func wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
