package uplink

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// Take makes the NIC a port of the bridge, and moves all that it has of layer 3
// there. The steps are those of Plan, of which the record is saved before each; one
// that fails before the point of no return (see the package's comment) undoes those
// before it, and removes the journal.
//
// The error matches ErrRefused where nothing was begun, and ErrUnreachable where
// nothing answered through the bridge in time. With an error, a record is returned
// only if something is left that Recover has to finish. A ctx that is done before
// the point of no return undoes it too.
func (c *Conn) Take(ctx context.Context, u Uplink, j Journal) (*Record, error) {
	err := c.usable(ctx)
	if err == nil {
		err = u.validate()
	}
	if err == nil && j == nil {
		err = missing("journal")
	}
	if err != nil {
		return nil, err
	}
	s, err := c.whole(ctx, u.NIC, u.Bridge)
	if err != nil {
		return nil, fmt.Errorf("take over %s: %w", u.NIC, err)
	}
	if _, err := Plan(s, u); err != nil {
		return nil, err
	}
	rec := &Record{Version: recordVersion, Uplink: u, State: Taking, Before: *s, MadeBridge: s.Bridge == nil}
	r := c.run(rec, j, s.Settings)
	if r.targets, err = c.answering(ctx, s, u.timeout()); err != nil {
		return nil, fmt.Errorf("take over %s: %w", u.NIC, err)
	}
	if err := r.forward(ctx, takeSteps()); err != nil {
		return c.failed(ctx, rec, j, fmt.Errorf("take over %s: %w", u.NIC, err))
	}
	return rec, nil
}

// failed undoes what was done, unless there is no way back.
func (c *Conn) failed(ctx context.Context, rec *Record, j Journal, err error) (*Record, error) {
	if rec.Committed {
		return rec, err
	}
	rec.State = Undoing
	undone := c.back(context.WithoutCancel(ctx), rec, j)
	if undone != nil {
		return rec, errors.Join(err, fmt.Errorf("undo it: %w", undone))
	}
	return nil, err
}

// run is one walk through the steps, in either direction.
type run struct {
	*Conn
	rec     *Record
	journal Journal
	// settings are those that plans are made by; to read them each time takes longer
	// than all else.
	settings map[string]string
	targets  []target
	// lost, if not nil, adds to a snapshot what is to be mended.
	lost func(*Snapshot) *Snapshot
}

func (c *Conn) run(rec *Record, j Journal, settings map[string]string) *run {
	return &run{Conn: c, rec: rec, journal: j, settings: settings}
}

// forward does the steps of a takeover, and says in the journal that it is done.
func (r *run) forward(ctx context.Context, steps []StepName) error {
	rec := r.rec
	rec.State = Taking
	for _, name := range steps {
		if err := ctx.Err(); err != nil && !rec.Committed {
			return err
		}
		committed := rec.Committed
		rec.Step, rec.Committed = name, committed || name == StepRelease
		if err := rec.save(r.journal); err != nil {
			rec.Committed = committed
			return err
		}
		if rec.Committed {
			ctx = context.WithoutCancel(ctx)
		}
		if err := r.takeStep(ctx, name); err != nil {
			return fmt.Errorf("step %s: %w", name, err)
		}
	}
	rec.State, rec.Step, rec.Mending = Taken, "", nil
	return rec.save(r.journal)
}

// planned is a plan and the snapshot that it was made from.
func (r *run) planned(ctx context.Context, plan func(*Snapshot) *Steps) (*Snapshot, *Steps, error) {
	s, err := r.look(ctx, r.rec.NIC, r.rec.Bridge)
	if err != nil {
		return nil, nil, err
	}
	s.Settings = r.settings
	if r.rec.State == Taking {
		s = s.asRecorded(r.rec)
	}
	if r.lost != nil {
		s = r.lost(s)
	}
	return s, plan(s), nil
}

func (r *run) takeStep(ctx context.Context, name StepName) error {
	rec := r.rec
	if name == StepBridge {
		if err := r.makeBridge(ctx, rec); err != nil {
			return err
		}
	}
	plan := func(s *Snapshot) *Steps { return planTake(s, &rec.Uplink, rec.MadeBridge) }
	s, steps, err := r.planned(ctx, plan)
	if err != nil {
		return err
	}
	switch name {
	case StepVerify:
		return r.verify(ctx, s.Bridge.Index, r.targets, rec.timeout())
	case StepRoutes:
		return r.untilDone(ctx, name, plan)
	}
	if err := r.apply(ctx, steps.step(name)); err != nil {
		return err
	}
	switch name {
	case StepAddresses:
		return r.waitUntilLocal(ctx, s.Bridge.Index, newMove(s, s.NIC, *s.Bridge))
	case StepPort:
		// A bridge that had a port before may still have to notice that it has a carrier.
		r.nl.RefreshCarrier(rec.Bridge)
	}
	return nil
}

// rounds bounds how often routes are moved that other programs add meanwhile.
const rounds = 5

// untilDone repeats a step until there is nothing left of it: what the kernel refused
// in its first order, and what a daemon or the kernel added meanwhile.
func (r *run) untilDone(ctx context.Context, name StepName, plan func(*Snapshot) *Steps) error {
	var last error
	for range rounds {
		_, steps, err := r.planned(ctx, plan)
		if err != nil {
			return err
		}
		ops := steps.step(name)
		if len(ops) == 0 {
			return nil
		}
		last = r.apply(ctx, ops)
	}
	return last
}

func (rec *Record) save(j Journal) error {
	b, err := rec.encode()
	if err == nil {
		err = j.Save(b)
	}
	if err != nil {
		return fmt.Errorf("save the journal: %w", err)
	}
	return nil
}

// Restore gives the NIC back what the bridge has now, makes it no port any more,
// and removes the journal. The bridge is deleted if Take made it and nothing else is
// a port of it; else it stays, without addresses. It goes on past errors; where there
// are any, the journal stays, and Restore may be called again.
func (c *Conn) Restore(ctx context.Context, rec *Record, j Journal) error {
	if err := c.journaled(ctx, rec, j); err != nil {
		return err
	}
	n := *rec
	n.State, n.Mending = Restoring, nil
	return c.back(ctx, &n, j)
}

// back does the steps of a restoration.
func (c *Conn) back(ctx context.Context, rec *Record, j Journal) error {
	var errs []error
	first, err := c.whole(ctx, rec.NIC, rec.Bridge)
	if isGone(err) {
		return c.backWithoutNIC(ctx, rec, j)
	}
	if err != nil {
		return fmt.Errorf("give back %s: %w", rec.NIC, err)
	}
	if first.Bridge == nil {
		rec.Before = rec.withoutReplaced(first).Before
	}
	r := c.run(rec, j, first.Settings)
	for _, name := range restoreSteps() {
		rec.Step = name
		if err := rec.save(j); err != nil {
			errs = append(errs, err) // to stop here would leave it between the two
		}
		if err := r.restoreStep(ctx, name); err != nil {
			errs = append(errs, fmt.Errorf("step %s: %w", name, err))
			if name == StepRoutes && first.Bridge != nil {
				errs = append(errs, r.returnRoutes(ctx))
			}
			if name == StepRoutes || name == StepAddresses && first.Bridge != nil || ctx.Err() != nil {
				break // what is still on the bridge must not be cut off
			}
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("give back %s: %w", rec.NIC, errors.Join(errs...))
	}
	if err := j.Remove(); err != nil {
		return fmt.Errorf("remove the journal: %w", err)
	}
	return nil
}

// returnRoutes gives the bridge the routes again that had moved when another was refused.
// While the NIC is a port, they serve only as long as its neighbours are known: answers to
// what it asks come in by the bridge.
func (r *run) returnRoutes(ctx context.Context) error {
	return r.untilDone(ctx, StepRoutes, func(s *Snapshot) *Steps { return planTake(s, &r.rec.Uplink, r.rec.MadeBridge) })
}

// backWithoutNIC is for a NIC that was unplugged: nothing can be given back to it.
func (c *Conn) backWithoutNIC(ctx context.Context, rec *Record, j Journal) error {
	index, err := c.index(ctx, rec.Bridge)
	if err == nil && index != 0 && rec.MadeBridge {
		ports, listErr := c.bridge.Ports(ctx, index)
		if err = listErr; err == nil && len(ports) == 0 {
			err = c.bridge.Remove(ctx, rec.Bridge)
		}
	}
	if err == nil {
		err = j.Remove()
	}
	if err != nil {
		return fmt.Errorf("give back %s, which is gone: %w", rec.NIC, err)
	}
	return nil
}

func (r *run) restoreStep(ctx context.Context, name StepName) error {
	plan := func(s *Snapshot) *Steps { return planRestore(s, r.rec) }
	s, steps, err := r.planned(ctx, plan)
	if err != nil {
		return err
	}
	if s.Bridge == nil && name == StepAddresses {
		return r.apply(ctx, steps.step(name))
	}
	if name == StepRoutes {
		return r.untilDone(ctx, name, plan)
	}
	if err := r.apply(ctx, steps.step(name)); err != nil || name != StepAddresses {
		return err
	}
	return r.waitUntilLocal(ctx, s.NIC.Index, backMove(s, r.rec))
}

// Recover finishes what a crash cut short, by the record that the journal kept:
// forward, if it was past the point of no return, else back. It gives the record of
// the takeover if there is one, and nil if the NIC has been given back. One that was
// finished is left as it is.
func (c *Conn) Recover(ctx context.Context, rec *Record, j Journal) (*Record, error) {
	if err := c.journaled(ctx, rec, j); err != nil {
		return rec, err
	}
	n := *rec
	switch {
	case n.State == Taken:
		return &n, nil
	case n.State == Taking && n.Mending != nil:
		// From the beginning, as a Mend does that finds little to do: the program that undid the
		// takeover may have gone on at it, and then the steps that were done are undone.
		if err := c.mending(&n, j).forward(ctx, takeSteps()); err != nil {
			return &n, fmt.Errorf("finish mending %s: %w", n.NIC, err)
		}
		return &n, nil
	case n.State == Taking && n.Committed:
		if err := c.run(&n, j, n.Before.Settings).forward(ctx, n.rest()); err != nil {
			return &n, fmt.Errorf("finish the takeover of %s: %w", n.NIC, err)
		}
		return &n, nil
	case n.State == Taking:
		n.State = Undoing
	}
	if err := c.back(ctx, &n, j); err != nil {
		return &n, err
	}
	return nil, nil
}

// rest are the steps from the one under way on.
func (rec *Record) rest() []StepName {
	steps := takeSteps()
	return steps[max(slices.Index(steps, rec.Step), 0):]
}
