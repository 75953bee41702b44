// Package firewalld puts links into a zone of firewalld: the links over which the host forwards packets of pods, for
// as long as their networks are on record. It is necessary because an accept of ours does not override firewalld's
// rejects.
//
//	z := firewalld.New(ctx, &firewalld.Config{State: dir, Tell: tell})
//	defer z.Close()
//	for err := error(nil); err == nil; _, err = z.Next() {
//		log.Print(z.Look(ctx))
//	}
//
// It talks to firewalld over D-Bus. It changes only firewalld's running configuration, never the permanent one. So it
// repeats the change whenever firewalld starts or reloads. It respects an operator's choice: it leaves a link alone
// that is in a zone other than the default one, or in any zone of the permanent configuration.
package firewalld

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/mdlayher/netlink"

	"github.com/tombolo-cni/tombolo/internal/state"
)

const (
	// timeout is the time limit for answers from the bus and firewalld. A firewalld with many rules does not answer
	// for seconds while it loads them.
	timeout = 30 * time.Second

	// pollInterval is the interval of checks for new and removed networks.
	pollInterval = 250 * time.Millisecond

	// minInterval is the least time between two results of Next caused by signals, since any local user can send
	// signals.
	minInterval = time.Second
)

// Config configures Zones. All fields are required.
type Config struct {
	// State has the networks' records, and stores which links Look has put into the zone.
	State *state.Dir
	// Address is the address of the bus, as in DBUS_SYSTEM_BUS_ADDRESS. Only unix:path=… is supported.
	Address string
	// Tell adapts our rules to State.Zones. Look calls it before each change of a link's zone, and again at the end.
	Tell func(context.Context) error
	// Log receives a line for each link that joins or leaves the zone.
	Log *slog.Logger
}

// Zones puts links into the zone, and takes them out when their networks are gone. Another goroutine may call Next
// while Look is at work.
type Zones struct {
	Config
	ctx     context.Context // the connection to the bus ends when ctx is done
	timeout time.Duration
	bus     *bus          // nil while there is no connection
	lock    *os.File      // the announcement that links are put into the zone; nil while firewalld does not run
	news    chan struct{} // has an element after a signal about firewalld
	changed int64         // the last result of State.NetworksChanged
	last    time.Time     // the time of the last signal that Next reported
}

// New returns a Zones that works until ctx is done.
func New(ctx context.Context, cfg *Config) *Zones {
	return &Zones{Config: *cfg, ctx: ctx, timeout: timeout, news: make(chan struct{}, 1)}
}

// Close closes the connection. The links stay in the zone, for the next process.
func (z *Zones) Close() error {
	z.release()
	return nil
}

// Next waits until firewalld, its bus or a network may have changed, so that a Look is due. It returns no messages.
// When the ctx of New is done, Next returns the error of ctx.
func (z *Zones) Next() ([]netlink.Message, error) {
	poll := time.NewTicker(pollInterval)
	defer poll.Stop()
	for {
		select {
		case <-z.ctx.Done():
			return nil, z.ctx.Err()
		case <-poll.C:
			if now := z.State.NetworksChanged(); now != z.changed {
				z.changed = now
				return nil, nil
			}
			if len(z.news) > 0 && time.Since(z.last) > minInterval {
				<-z.news
				z.last = time.Now()
				return nil, nil
			}
		}
	}
}

// notify makes Next return.
func (z *Zones) notify() {
	select {
	case z.news <- struct{}{}:
	default:
	}
}

// Look puts the links of networks into the zone, and takes out links whose networks are gone. If firewalld does not
// run in this network namespace, Look only calls Tell. After an error, call Look again soon. ErrNoBus is no fault:
// the bus or firewalld does not run.
func (z *Zones) Look(ctx context.Context) error {
	if z.bus != nil && z.bus.conn.Context().Err() != nil {
		z.release()
	}

	err := z.attend(ctx)
	if err != nil {
		z.release() // ADDs must not wait for the zone now
	}

	if isDisconnected(err) {
		return ErrNoBus
	}
	return err
}

// attend connects to the bus if necessary. If firewalld runs, it announces that links are put into the zone, and
// calls look.
func (z *Zones) attend(ctx context.Context) (err error) {
	if z.bus == nil {
		if z.bus, err = dialBus(z.ctx, z.Address, z.timeout, z.notify); err != nil {
			return err
		}
	}

	isRunning, err := z.bus.isThere(ctx)
	if err != nil {
		return err
	}

	if !isRunning {
		z.unlock()
		return z.Tell(ctx)
	}

	if z.lock == nil {
		if z.lock, err = z.State.AttendZones(); err != nil {
			return err
		}
	}
	return z.look(ctx, z.bus)
}

// release closes the connection, and withdraws the announcement that links are put into the zone.
func (z *Zones) release() {
	if z.bus != nil {
		z.bus.close()
		z.bus = nil
	}
	z.unlock()
}

// unlock withdraws the announcement that links are put into the zone.
func (z *Zones) unlock() {
	_ = z.lock.Close() // Close does nothing if lock is nil
	z.lock = nil
}

// look finds and carries out the action for each link that a network has or that we put into the zone before. It also
// records the links in the zone.
func (z *Zones) look(ctx context.Context, b *bus) error {
	// If some networks cannot be read, remove no link from the zone.
	links, unread := z.State.ForwardedLinks()
	before, err := z.State.Zones()
	if err != nil {
		return err
	}

	errs := []error{unread}
	now := state.Zones{}
	for _, link := range slices.Compact(slices.Sorted(slices.Values(slices.Concat(links, before.Joined)))) {
		joined := slices.Contains(before.Joined, link)
		current, err := b.zonesOf(ctx, link)
		if err != nil {
			return errors.Join(append(errs, err)...)
		}

		switch action := decide(current, joined, slices.Contains(links, link), unread == nil); action {
		case stay:
			now.Joined = append(now.Joined, link)
		case forget:
		case leaveAlone:
			now.Left = append(now.Left, link)
			if !slices.Contains(before.Left, link) {
				z.Log.Info("a bridge is left in the zone of firewalld that another program or a user chose for it",
					"link", link, "zone", current.chosen())
			}
		default:
			// Write the record and the rules before the change. So even if this process is killed, every link that it
			// put into the zone has a record, and rules that restrict its pods.
			if err := errors.Join(z.record(before, now, link), z.Tell(ctx)); err != nil {
				return errors.Join(append(errs, err)...)
			}

			err := b.changeZone(ctx, action, link, current)
			switch {
			case err == nil:
				z.Log.Info(action.text(), "link", link, "zone", zone)
			case !isAnswer(err):
				return errors.Join(append(errs, err)...)
			}

			errs = append(errs, err)
			if joins := action == join || action == move; joins == (err == nil) {
				now.Joined = append(now.Joined, link)
			}

			if action == yield && err == nil {
				now.Left = append(now.Left, link)
			}
		}
	}

	if !slices.Equal(now.Joined, before.Joined) || !slices.Equal(now.Left, before.Left) {
		errs = append(errs, z.State.SetZones(now))
	}

	return errors.Join(append(errs, z.Tell(ctx))...)
}

// record adds the link to the recorded links in the zone, before its zone is changed.
func (z *Zones) record(before, now state.Zones, link string) error {
	all := append(slices.Concat(before.Joined, now.Joined), link)
	slices.Sort(all)
	all = slices.Compact(all)
	if slices.Equal(all, before.Joined) {
		return nil
	}
	return z.State.SetZones(state.Zones{Joined: all, Left: now.Left})
}
