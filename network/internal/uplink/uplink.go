package uplink

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/route"
)

// ErrRefused means that a NIC cannot be taken over as it is. Nothing was changed. The text of the error has advice.
var ErrRefused = errors.New("it cannot be taken over as it is")

// Uplink describes a takeover.
type Uplink struct {
	// NIC is the interface that becomes a port. It must be an Ethernet device that is up.
	NIC string
	// Bridge is the name of the new bridge. Take creates it with the NIC's MAC and MTU.
	Bridge string
	// Alias is the alias of a new bridge: see bridge.Bridge.
	Alias string
}

func (u *Uplink) validate() error {
	switch {
	case !ident.IsLinkName(u.NIC):
		return fmt.Errorf("take over a NIC: %w: its name is %q", tombolo.ErrInvalid, u.NIC)
	case !ident.IsLinkName(u.Bridge) || u.Bridge == u.NIC:
		return fmt.Errorf("take over %s: %w: the bridge's name is %q", u.NIC, tombolo.ErrInvalid, u.Bridge)
	}
	return nil
}

// Conn works on the NICs of the calling thread's network namespace. For one NIC or bridge, only one caller in all
// processes may make changes at a time. The caller must ensure this with a lock.
type Conn struct {
	nl     *nl.Conn
	addrs  *addr.Conn
	routes *route.Conn
	bridge *bridge.Conn
}

// On returns a Conn over an open socket of the namespace, which still belongs to its owner.
func On(s tombolo.Socket) *Conn {
	return &Conn{nl: nl.Of(s), addrs: addr.On(s), routes: route.On(s), bridge: bridge.On(s, nil)}
}

// recordVersion is the version of the records that we write.
const recordVersion = 1

// State is the progress of a takeover.
type State string

// The states of a takeover.
const (
	Taking    State = "taking"    // moving the NIC's addresses and routes to the bridge
	Taken     State = "taken"     // all addresses and routes are on the bridge
	Restoring State = "restoring" // moving back to the NIC
)

// Record is the content of the journal: the request, its progress, and the state before the takeover. The steps are
// planned from this and the kernel's present state, so that each may be repeated.
type Record struct {
	Uplink
	State   State `json:"state"`
	Version int   `json:"version"`
	// Before is the state before the takeover.
	Before snapshot `json:"before"`
}

// Journal stores the record of one takeover, so that it survives a crash of the process. Save must replace the previous
// record at once or not at all.
type Journal interface {
	Save(record []byte) error
	Remove() error
}

// ParseRecord parses the content of a Journal.
func ParseRecord(b []byte) (*Record, error) {
	var r Record
	err := json.Unmarshal(b, &r)
	if err == nil {
		err = r.validate()
	}
	if err != nil {
		return nil, fmt.Errorf("read the record of a takeover: %w", err)
	}
	return &r, nil
}

func (r *Record) validate() error {
	switch {
	case r.Version != recordVersion:
		return fmt.Errorf("%w: version %d, where this program knows %d", tombolo.ErrInvalid, r.Version, recordVersion)
	case r.Uplink.validate() != nil:
	case r.State == Taking, r.State == Taken, r.State == Restoring:
		return nil
	}
	return fmt.Errorf("%w: NIC %q, bridge %q, state %q", tombolo.ErrInvalid, r.NIC, r.Bridge, r.State)
}

// save writes the record to a journal.
func (r *Record) save(j Journal) error {
	b, err := json.Marshal(r)
	if err == nil {
		err = j.Save(b)
	}
	if err != nil {
		return fmt.Errorf("save the journal: %w", err)
	}
	return nil
}

// Take makes the NIC a port of the bridge, and moves its addresses, routes and neighbours there by the steps of Plan.
// If a step fails, or ctx ends, Take undoes the previous steps and removes the journal.
//
// If Take refuses the NIC before the first step, the error matches ErrRefused. If Take returns a record together with
// an error, the caller must call Restore to complete the undo.
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
	if undone := c.Restore(context.WithoutCancel(ctx), rec, j); undone != nil {
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

// step runs one step. It plans the move by the present state, in up to st.rounds rounds.
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

// makeBridge creates the bridge, or corrects it if it is down or its MAC is not the NIC's. It does not compare the
// MTU. It leaves a right bridge alone, since writing the MAC flushes the bridge's neighbours. In any case it copies
// the NIC's kernel parameters, and sets loose source checks.
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
	if m.from.Index == noLink {
		return nil
	}

	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	usable, err := addr.Listen(nil)
	if err != nil {
		return err
	}

	defer usable.Close()
	var added []netip.Addr
	for _, a := range m.addresses() {
		added = append(added, a.Prefix.Addr())
	}
	return usable.Wait(ctx, c.addrs, m.to.Index, added...)
}

// Restore moves everything that is on the bridge to the NIC, removes the NIC from the bridge, and removes the
// journal. It deletes the bridge unless other ports are on it. It continues after errors. If there were errors, the
// journal stays, and the caller may call Restore again. After a crash, Restore undoes an interrupted takeover, or
// completes an interrupted restoration.
func (c *Conn) Restore(ctx context.Context, before *Record, j Journal) error {
	n := *before
	rec := &n
	rec.State = Restoring
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

// backWithoutNIC deletes the bridge of a NIC that was unplugged, unless the bridge has ports. Nothing can move back
// to that NIC.
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
