package uplink

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/route"
)

// Take makes the NIC a port of the bridge, and moves its addresses, routes and rules there by the steps of Plan. If a
// step fails, or ctx ends, Take undoes the previous steps and removes the journal.
//
// If Take refuses the NIC before the first step, the error matches ErrRefused. If Take returns a record together with
// an error, the caller must call Recover to complete the undo.
func (c *Conn) Take(ctx context.Context, u Uplink, j Journal) (*Record, error) {
	if err := u.validate(); err != nil {
		return nil, err
	}

	s, err := c.snapshot(ctx, u.NIC, u.Bridge)
	if err != nil {
		return nil, fmt.Errorf("take over %s: %w", u.NIC, err)
	}

	if _, err := plan(s, u); err != nil {
		return nil, err
	}

	rec := &Record{Uplink: u, State: Taking, Version: recordVersion, Before: *s}
	if err = c.take(ctx, rec, j); err == nil {
		return rec, nil
	}

	err = fmt.Errorf("take over %s: %w", u.NIC, err)
	rec.State = Undoing
	if undone := c.restoreSteps(context.WithoutCancel(ctx), rec, j); undone != nil {
		return rec, errors.Join(err, fmt.Errorf("undo it: %w", undone))
	}

	return nil, err
}

// take runs the steps of a takeover, and records their end in the journal.
func (c *Conn) take(ctx context.Context, rec *Record, j Journal) error {
	for _, st := range takeSteps(&rec.Uplink, &rec.Before.NIC) {
		if err := errors.Join(ctx.Err(), rec.save(j)); err != nil {
			return err
		}

		if err := c.step(ctx, rec, &st, moveToBridge); err != nil {
			return err
		}
	}

	rec.State = Taken
	return rec.save(j)
}

// step runs one step. It plans the move by the present state.
func (c *Conn) step(ctx context.Context, rec *Record, st *step, planned func(*snapshot, *Record) *move) error {
	var m *move
	var last error
	for range max(st.rounds, 1) {
		s, err := c.snapshot(ctx, rec.NIC, rec.Bridge)
		if err != nil {
			return fmt.Errorf("step %s: %w", st.name, err)
		}

		m = planned(s, rec)
		if st.requests == nil {
			break
		}

		requests := st.requests(m)
		if last = c.apply(ctx, requests); len(requests) == 0 {
			break
		}
	}

	if last == nil && st.work != nil {
		last = st.work(ctx, c, rec, m)
	}

	if last != nil {
		return fmt.Errorf("step %s: %w", st.name, last)
	}
	return nil
}

// makeBridge creates the bridge or corrects it. If the bridge is right already, it changes nothing, since writing the
// MAC flushes the bridge's neighbours.
func makeBridge(ctx context.Context, c *Conn, rec *Record, _ *move) error {
	nic := &rec.Before.NIC
	l, err := c.bridge.Link(ctx, rec.Bridge)
	if err != nil || l.Kind != "bridge" || !l.Up || !bytes.Equal(l.MAC, nic.MAC) {
		_, err = c.bridge.Ensure(ctx, bridge.Bridge{Name: rec.Bridge, Alias: rec.Alias, NoIPv6: true, MAC: nic.MAC,
			MTU: nic.MTU})
	}

	if err != nil {
		return err
	}
	return errors.Join(copySettings(rec.NIC, rec.Bridge), setSourceChecks(rec.Bridge, ""))
}

// waitUntilLocal waits until a link receives packets to its new IPv6 addresses. After the answer to the request, a
// worker of the kernel joins the groups for their neighbour discovery and adds their local routes. Until then packets
// would be lost once the other link no longer has the addresses.
func waitUntilLocal(ctx context.Context, c *Conn, _ *Record, m *move) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for m.from.Index != noLink {
		have, err := c.routes.List(ctx, route.Filter{Family: unix.AF_INET6, Table: unix.RT_TABLE_LOCAL,
			Link: m.to.Index, Type: unix.RTN_LOCAL})
		if err != nil {
			return err
		}

		missing := slices.DeleteFunc(m.addresses(), func(a addr.Address) bool {
			return a.Prefix.Addr().Is4() ||
				slices.ContainsFunc(have, func(r route.Route) bool { return r.Dst.Addr() == a.Prefix.Addr() })
		})
		if len(missing) == 0 {
			return nil
		}

		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until the kernel receives what is sent to %s: %w", missing[0].Prefix.Addr(),
				ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}

	return nil
}

// Restore moves everything that is on the bridge to the NIC, removes the NIC from the bridge, and removes the
// journal. It deletes the bridge unless other ports are on it. It continues after errors. If there were errors, the
// journal stays, and the caller may call Restore again.
func (c *Conn) Restore(ctx context.Context, rec *Record, j Journal) error {
	if err := rec.validate(); err != nil {
		return err
	}
	n := *rec
	n.State = Restoring
	return c.restoreSteps(ctx, &n, j)
}

// Recover cleans up after a crash, by the record in the journal: it undoes an interrupted takeover, or completes an
// interrupted restore. If the NIC is given back, it returns nil. Otherwise it returns the record.
func (c *Conn) Recover(ctx context.Context, rec *Record, j Journal) (*Record, error) {
	if err := rec.validate(); err != nil || rec.State == Taken {
		return rec, err
	}

	n := *rec
	if n.State == Taking {
		n.State = Undoing
	}
	if err := c.restoreSteps(ctx, &n, j); err != nil {
		return &n, err
	}
	return nil, nil
}

// restoreSteps runs the steps of a restoration, and removes the journal.
func (c *Conn) restoreSteps(ctx context.Context, rec *Record, j Journal) error {
	s, err := c.snapshot(ctx, rec.NIC, rec.Bridge)
	if isGone(err) {
		err = c.backWithoutNIC(ctx, rec)
	} else if err == nil {
		err = c.restore(ctx, rec, j, s.Bridge != nil)
	}

	if err != nil {
		return fmt.Errorf("give back %s: %w", rec.NIC, err)
	}

	if err := j.Remove(); err != nil {
		return fmt.Errorf("remove the journal: %w", err)
	}

	return nil
}

// restore runs the steps of a restoration. hasBridge is false if another program deleted the bridge.
func (c *Conn) restore(ctx context.Context, rec *Record, j Journal, hasBridge bool) error {
	var errs []error
	for _, st := range restoreSteps() {
		if err := rec.save(j); err != nil {
			errs = append(errs, err) // go on, so that the NIC is not left halfway
		}

		err := c.step(ctx, rec, &st, moveBack)
		if err == nil {
			continue
		}

		errs = append(errs, err)
		if st.rounds > 0 && hasBridge {
			// The kernel refused some route, so move the other routes back to the bridge. While the NIC is a port,
			// routes through the NIC work only as long as the NIC's neighbours are known.
			errs = append(errs, c.step(ctx, rec, &st, moveToBridge))
		}

		if st.rounds > 0 || st.name == "addresses" && hasBridge || ctx.Err() != nil {
			break // stop here: the rest stays reachable on the bridge
		}
	}

	return errors.Join(errs...)
}

// backWithoutNIC deletes the bridge of a NIC that was unplugged. Nothing can move back to that NIC.
func (c *Conn) backWithoutNIC(ctx context.Context, rec *Record) error {
	l, err := c.bridge.Link(ctx, rec.Bridge)
	if err == nil {
		var ports []bridge.Link
		if ports, err = c.bridge.Ports(ctx, l.Index); err == nil && len(ports) == 0 {
			err = c.bridge.Remove(ctx, rec.Bridge)
		}
	}

	if isGone(err) {
		return nil
	}
	return err
}
