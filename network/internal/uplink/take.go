package uplink

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/tombolo-cni/tombolo/bridge"
)

// Take makes the NIC a port of the bridge, and moves its addresses and routes there, by the steps of Plan. If one fails,
// or ctx is done, Take undoes the steps before it, and removes the journal.
//
// The error matches ErrRefused where nothing was begun. With it, a record means that Recover has to finish something.
func (c *Conn) Take(ctx context.Context, u Uplink, j Journal) (*Record, error) {
	rec := &Record{Uplink: u, State: Taking, progress: progress{Version: recordVersion}}
	if err := errors.Join(u.validate(), rec.validate()); err != nil {
		return nil, err
	}
	s, err := c.snapshot(ctx, u.NIC, u.Bridge)
	if err != nil {
		return nil, fmt.Errorf("take over %s: %w", u.NIC, err)
	}
	if _, err := plan(s, u); err != nil {
		return nil, err
	}
	rec.Before = *s
	r := &run{c, rec, j}
	if err = r.forward(ctx); err == nil {
		return rec, nil
	}

	err = fmt.Errorf("take over %s: %w", u.NIC, err)
	rec.State = Undoing
	if undone := c.back(context.WithoutCancel(ctx), rec, j); undone != nil {
		return rec, errors.Join(err, fmt.Errorf("undo it: %w", undone))
	}

	return nil, err
}

// run is one walk through the steps, in either direction.
type run struct {
	*Conn
	rec     *Record
	journal Journal
}

// forward does the steps of a takeover, and writes into the journal that it is done.
func (r *run) forward(ctx context.Context) error {
	for _, name := range takeSteps() {
		r.rec.Step = name
		if err := errors.Join(ctx.Err(), r.rec.Save(r.journal)); err != nil {
			return err
		}
		if err := r.step(ctx, name); err != nil {
			return fmt.Errorf("step %s: %w", name, err)
		}
	}

	r.rec.State, r.rec.Step = Taken, ""

	return r.rec.Save(r.journal)
}

func (r *run) planned(ctx context.Context, forward bool) (*snapshot, *Steps, error) {
	rec := r.rec
	s, err := r.look(ctx, rec.NIC, rec.Bridge)
	if err != nil {
		return nil, nil, err
	}
	if !forward {
		return s, planRestore(s, rec), nil
	}
	return s, planTake(s, &rec.Uplink), nil
}

// step does one step of a takeover, or of the way back.
func (r *run) step(ctx context.Context, name stepName) error {
	rec := r.rec
	forward := rec.State == Taking
	switch {
	case name == stepBridge && forward:
		if err := r.makeBridge(ctx); err != nil {
			return err
		}
		return r.ns.Do(func() error { return errors.Join(copySettings(rec.NIC, rec.Bridge), loosen(rec.Bridge)) })
	case name == stepBridge:
		return r.ns.Do(func() error { return loosen(rec.Bridge) })
	case name == stepSettle && forward:
		return r.ns.Do(func() error { return tighten(rec.NIC, rec.Bridge) })
	case name == stepRoutes:
		return r.moveAllRoutes(ctx, forward)
	}
	s, steps, err := r.planned(ctx, forward)
	if err != nil {
		return err
	}
	step := steps.step(name)
	if err := r.apply(ctx, step); err != nil {
		return err
	}
	switch {
	case name == stepAddresses && s.Bridge != nil:
		return r.waitUntilLocal(ctx, steps.move)
	case name == stepPort && forward:
		// A bridge that had a port before may still have to notice that it has a carrier.
		r.nl.RefreshCarrier(rec.Bridge)
	}
	return nil
}

// rounds bounds how often routes are moved that other programs add meanwhile.
const rounds = 8

// moveAllRoutes repeats the step until there is nothing left of it: a gateway has to be on a network
// that the link has a route to, the old routes go last, and daemons add some meanwhile.
func (r *run) moveAllRoutes(ctx context.Context, forward bool) error {
	var last error
	for range rounds {
		_, steps, err := r.planned(ctx, forward)
		if err != nil {
			return err
		}
		step := steps.step(stepRoutes)
		if len(step.requests) == 0 {
			return nil
		}
		last = r.apply(ctx, step)
	}
	return last
}

// makeBridge leaves one alone that is as it should be: to write the MAC flushes its neighbours.
func (r *run) makeBridge(ctx context.Context) error {
	rec := r.rec
	if l, err := r.bridge.Link(ctx, rec.Bridge); err == nil && l.Kind == "bridge" && l.Up && bytes.Equal(l.MAC, rec.Before.NIC.MAC) {
		return nil
	}
	_, err := r.bridge.Ensure(ctx, bridge.Bridge{Name: rec.Bridge, Alias: rec.Alias, NoIPv6: true, MAC: rec.Before.NIC.MAC, MTU: rec.Before.NIC.MTU})
	return err
}

// Restore gives the NIC back what the bridge has now, makes it no port any more, and removes the
// journal. The bridge is deleted unless it has other ports. It goes on past errors; where there are
// any, the journal stays, and Restore may be called again.
func (c *Conn) Restore(ctx context.Context, rec *Record, j Journal) error {
	if err := rec.validate(); err != nil {
		return err
	}
	n := *rec
	n.State = Restoring
	return c.back(ctx, &n, j)
}

// back does the steps of a restoration.
func (c *Conn) back(ctx context.Context, rec *Record, j Journal) error {
	first, err := c.snapshot(ctx, rec.NIC, rec.Bridge)
	if isGone(err) {
		err = c.backWithoutNIC(ctx, rec)
	} else if err == nil {
		err = c.backFrom(ctx, rec, j, first)
	}
	if err != nil {
		return fmt.Errorf("give back %s: %w", rec.NIC, err)
	}
	if err := j.Remove(); err != nil {
		return fmt.Errorf("remove the journal: %w", err)
	}
	return nil
}

func (c *Conn) backFrom(ctx context.Context, rec *Record, j Journal, first *snapshot) error {
	r := &run{c, rec, j}
	var errs []error
	for _, name := range restoreSteps() {
		rec.Step = name
		if err := rec.Save(j); err != nil {
			errs = append(errs, err) // to stop here would leave it between the two
		}
		err := r.step(ctx, name)
		if err == nil {
			continue
		}
		errs = append(errs, fmt.Errorf("step %s: %w", name, err))
		if name == stepRoutes && first.Bridge != nil {
			// The bridge gets the routes again that had moved when another was refused. While the NIC
			// is a port, they serve only as long as its neighbours are known.
			errs = append(errs, r.moveAllRoutes(ctx, true))
		}
		if name == stepRoutes || name == stepAddresses && first.Bridge != nil || ctx.Err() != nil {
			break // what is still on the bridge must not be cut off
		}
	}
	return errors.Join(errs...)
}

// backWithoutNIC is for a NIC that was unplugged: nothing can be given back to it.
func (c *Conn) backWithoutNIC(ctx context.Context, rec *Record) error {
	l, err := c.bridge.Link(ctx, rec.Bridge)
	if isGone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	ports, err := c.bridge.Ports(ctx, l.Index)
	if err == nil && len(ports) == 0 {
		err = c.bridge.Remove(ctx, rec.Bridge)
	}
	return err
}

// Recover ends what a crash cut short, by the record that the journal kept: it gives the NIC back. It returns the record
// of a takeover that was done, and nil if the NIC has been given back.
func (c *Conn) Recover(ctx context.Context, rec *Record, j Journal) (*Record, error) {
	if err := rec.validate(); err != nil || rec.State == Taken {
		return rec, err
	}

	n := *rec
	if n.State == Taking {
		n.State = Undoing
	}
	if err := c.back(ctx, &n, j); err != nil {
		return &n, err
	}

	return nil, nil
}
