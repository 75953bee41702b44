package uplink

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/tombolo-cni/tombolo/bridge"
)

// Take makes the NIC a port of the bridge and moves its addresses, routes and rules there, by the steps of Plan. If a
// step fails, or ctx ends, Take undoes the previous steps and removes the journal.
//
// If nothing was begun, the error matches ErrRefused. If Take returns a record together with an error, Recover has to
// finish.
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

// run is one pass through the steps, in either direction.
type run struct {
	*Conn
	rec     *Record
	journal Journal
}

// forward makes the steps of a takeover, and records their end in the journal.
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

// step makes one step of a takeover, or of the way back.
func (r *run) step(ctx context.Context, name stepName) error {
	rec := r.rec

	// forward makes the steps of a takeover, and records their end in the journal.
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
		// The kernel may not have noticed yet that a bridge with its first port has a carrier.
		r.nl.RefreshCarrier(rec.Bridge)
	}

	return nil
}

// rounds limits the repetitions of moving routes, since other programs may keep adding routes.
const rounds = 8

// moveAllRoutes repeats the step until nothing is left to move. One pass may not suffice: a gateway must be on a
// network that the link has a route to, old routes are deleted last, and daemons add routes meanwhile.
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

// makeBridge creates the bridge or corrects it. It does not touch a bridge that is right already, since writing the
// MAC flushes the bridge's neighbours.
func (r *run) makeBridge(ctx context.Context) error {
	rec := r.rec
	if l, err := r.bridge.Link(ctx, rec.Bridge); err == nil && l.Kind == "bridge" && l.Up &&
		bytes.Equal(l.MAC, rec.Before.NIC.MAC) {
		return nil
	}

	_, err := r.bridge.Ensure(ctx, bridge.Bridge{Name: rec.Bridge, Alias: rec.Alias, NoIPv6: true,
		MAC: rec.Before.NIC.MAC, MTU: rec.Before.NIC.MTU})

	return err
}

// Restore moves everything that is now on the bridge to the NIC, makes the NIC leave the bridge, and removes the
// journal. It deletes the bridge unless that has other ports. It continues after errors. If there were any, the
// journal stays, and Restore may be called again.
func (c *Conn) Restore(ctx context.Context, rec *Record, j Journal) error {
	if err := rec.validate(); err != nil {
		return err
	}
	n := *rec
	n.State = Restoring
	return c.back(ctx, &n, j)
}

// back makes the steps of a restoration.
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
			errs = append(errs, err) // stopping here would leave it halfway
		}

		err := r.step(ctx, name)
		if err == nil {
			continue
		}

		errs = append(errs, fmt.Errorf("step %s: %w", name, err))
		if name == stepRoutes && first.Bridge != nil {
			// Some route was refused, so move the others back to the bridge. While the NIC is a port, routes through
			// it work only as long as its neighbours are known.
			errs = append(errs, r.moveAllRoutes(ctx, true))
		}

		if name == stepRoutes || name == stepAddresses && first.Bridge != nil || ctx.Err() != nil {
			break // do not cut off the rest on the bridge
		}
	}

	return errors.Join(errs...)
}

// backWithoutNIC handles a NIC that was unplugged. Nothing can move back to it.
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

// Recover follows a crash: it undoes an interrupted takeover, or completes an interrupted restoration, by the record in
// the journal. It returns nil if it gave the NIC back, and else the record.
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
