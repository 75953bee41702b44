package uplink

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
)

// ErrNotTaken is the cause of an error about a takeover that is not finished: Recover
// is for that.
var ErrNotTaken = errors.New("the takeover is not finished")

// Check says what is no longer as Take left it: what a network manager has given the
// NIC back, has taken from the bridge, or has deleted. Addresses and routes that the
// bridge has got since, beside those on record or in their place, are no difference, nor
// is what was leased or learnt and has run out.
func (c *Conn) Check(ctx context.Context, rec *Record) ([]tombolo.Difference, error) {
	if err := c.taken(ctx, rec); err != nil {
		return nil, err
	}
	s, err := c.look(ctx, rec.NIC, rec.Bridge)
	if isGone(err) {
		return []tombolo.Difference{{Object: "link " + rec.NIC, What: "interface", Want: rec.NIC}}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("check %s: %w", rec.NIC, err)
	}
	return s.differences(rec), nil
}

// taken is given for what takes a finished takeover.
func (c *Conn) taken(ctx context.Context, rec *Record) error {
	if err := c.given(ctx, rec); err != nil {
		return err
	}
	if rec.State != Taken {
		return fmt.Errorf("look at %s: %w: its state is %s", rec.NIC, ErrNotTaken, rec.State)
	}
	return nil
}

// differences is Check without a kernel.
func (s *Snapshot) differences(rec *Record) []tombolo.Difference {
	rec = rec.withoutReplaced(s)
	nic, br := "link "+rec.NIC, "bridge "+rec.Bridge
	var list []tombolo.Difference
	add := func(object, what, want, have string) {
		list = append(list, tombolo.Difference{Object: object, What: what, Want: want, Have: have})
	}
	if !s.NIC.Up() {
		add(nic, "state", "up", "down")
	}
	switch {
	case s.Bridge == nil:
		add(br, "link", rec.Bridge, "")
	case s.Bridge.Kind != "bridge":
		add(br, "kind", "bridge", s.Bridge.Kind)
	case s.NIC.Master == 0:
		add(nic, "master", rec.Bridge, "")
	case s.NIC.Master != s.Bridge.Index:
		add(nic, "master", rec.Bridge, s.master())
	}
	if s.Bridge != nil {
		if !s.Bridge.Up() {
			add(br, "state", "up", "down")
		}
		if rec.MadeBridge && s.Bridge.MAC != rec.Before.NIC.MAC {
			add(br, "MAC", rec.Before.NIC.MAC, s.Bridge.MAC)
		}
	}
	s.onNIC(rec, func(what, have string) { add(nic, what, "", have) })
	s.missing(rec, func(what, want string) { add(br, what, want, "") })
	return list
}

// onNIC tells what the NIC has of layer 3.
func (s *Snapshot) onNIC(rec *Record, tell func(what, have string)) {
	m := newMove(s, s.NIC, Link{Index: noLink})
	for _, a := range m.addresses() {
		kept := rec.KeepAddress && !a.Prefix.Addr().IsLinkLocalUnicast() && s.Bridge != nil && s.address(s.Bridge.Index, a) != nil
		if !kept {
			tell("address", a.Prefix.String())
		}
	}
	for _, r := range m.routes() {
		tell("route", m.names.on(r.String()))
	}
	for _, r := range m.rules() {
		tell("rule", r.String())
	}
}

// missing tells what the bridge has no longer. Without a bridge that is all of it,
// and told already.
func (s *Snapshot) missing(rec *Record, tell func(what, want string)) {
	if s.Bridge == nil {
		return
	}
	want := s.withLost(rec, s.Bridge.Index, false)
	m := newMove(want, *s.Bridge, s.NIC)
	for _, a := range want.Addresses[len(s.Addresses):] {
		tell("address", a.Prefix.String())
	}
	for _, r := range want.Routes[len(s.Routes):] {
		tell("route", m.names.on(r.String()))
	}
	for _, r := range want.Rules[len(s.Rules):] {
		tell("rule", r.String())
	}
}

// Mend puts right what Check finds, by the steps of a takeover, and says whether
// there was anything. What the NIC has got goes to the bridge, and what the bridge has
// lost comes back as the record has it, unless the host has another address or route in
// its place by now. The record is saved before each step, so that Recover can finish it.
// A NIC that is gone cannot be mended (fs.ErrNotExist).
func (c *Conn) Mend(ctx context.Context, rec *Record, j Journal) (changed bool, _ error) {
	if j == nil {
		return false, missing("journal")
	}
	if err := c.taken(ctx, rec); err != nil {
		return false, err
	}
	changed, err := c.mend(ctx, rec, j)
	if err != nil {
		err = fmt.Errorf("mend %s: %w", rec.NIC, err)
	}
	return changed, err
}

func (c *Conn) mend(ctx context.Context, rec *Record, j Journal) (changed bool, _ error) {
	renamed, err := c.rename(ctx, rec)
	if err != nil {
		return renamed, err
	}
	s, err := c.whole(ctx, rec.NIC, rec.Bridge)
	if err != nil {
		return renamed, err
	}
	if len(s.differences(rec)) == 0 {
		return renamed, nil
	}
	if err := s.cannotMend(rec); err != nil {
		return renamed, err
	}
	for _, a := range s.stale(rec) {
		if err := c.addrs.Remove(a); err != nil {
			return true, err
		}
		s.Addresses = slices.DeleteFunc(s.Addresses, func(have addr.Address) bool {
			return have.Link == a.Link && have.Prefix == a.Prefix && have.Peer == a.Peer
		})
	}
	n := s.toMend(rec)
	if err := c.mending(n, j).forward(ctx, takeSteps()); err != nil {
		return true, err
	}
	*rec = *n
	return true, nil
}

// rename gives the bridge that the takeover made its name back, if somebody gave it another one:
// a bridge in its place would have nothing of what the host has on this one.
func (c *Conn) rename(ctx context.Context, rec *Record) (renamed bool, _ error) {
	_, err := c.bridge.Link(ctx, rec.Bridge)
	if !rec.MadeBridge || !errors.Is(err, fs.ErrNotExist) {
		return false, nil // what is wrong with it, the snapshot tells
	}
	nic, err := c.bridge.Link(ctx, rec.NIC)
	if err != nil || nic.Master == 0 {
		return false, nil
	}
	on, err := c.bridge.LinkByIndex(ctx, nic.Master)
	if err != nil || on.Kind != "bridge" || on.Alias != rec.Alias || rec.Alias == "" || !bytes.Equal(on.MAC, nic.MAC) {
		return false, nil
	}
	return true, c.bridge.Rename(ctx, on.Index, rec.Bridge)
}

// toMend is the record that a Mend goes by. A bridge that is made anew gets the NIC's MAC
// and MTU of now, as with a takeover.
func (s *Snapshot) toMend(rec *Record) *Record {
	n := *rec.withoutReplaced(s)
	n.Mending = &Mending{Anew: s.Bridge == nil, Settings: s.settingsToMend(rec)}
	// There is no other way than forward, for Recover too.
	n.Committed = true
	if s.Bridge == nil {
		n.MadeBridge = true
		n.Before.NIC.MAC, n.Before.NIC.MTU, n.Before.NIC.Flags = s.NIC.MAC, s.NIC.MTU, s.NIC.Flags
	}
	return &n
}

// mending walks through the steps of a Mend, or through the rest of them.
func (c *Conn) mending(rec *Record, j Journal) *run {
	r := c.run(rec, j, rec.Mending.Settings)
	anew := rec.Mending.Anew
	r.lost = func(s *Snapshot) *Snapshot { return s.withLost(rec, s.NIC.Index, anew) }
	return r
}

// stale are the NIC's copies of addresses that the bridge has no longer: a new lease, or
// an administrator, has given the host another.
func (s *Snapshot) stale(rec *Record) []addr.Address {
	if !rec.KeepAddress || s.Bridge == nil {
		return nil
	}
	onBridge := *s
	onBridge.Addresses = slices.DeleteFunc(slices.Clone(s.Addresses), func(a addr.Address) bool { return a.Link != s.Bridge.Index })
	look := &replacement{s: &onBridge, rec: rec, inPlace: s.NIC.Master == s.Bridge.Index}
	var list []addr.Address
	for _, a := range s.Addresses {
		was := rec.Before.address(rec.Before.NIC.Index, a)
		if a.Link != s.NIC.Index || a.Valid != nil || was == nil || s.address(s.Bridge.Index, a) != nil {
			continue
		}
		if was.Valid != nil || look.isReplaced(a) {
			list = append(list, a)
		}
	}
	return list
}

// cannotMend says what only the operator can decide.
func (s *Snapshot) cannotMend(rec *Record) error {
	switch {
	case s.Bridge != nil && s.Bridge.Kind != "bridge":
		return fmt.Errorf("%w: %s is not a bridge any more; delete it", ErrRefused, rec.Bridge)
	case s.NIC.Master != 0 && (s.Bridge == nil || s.NIC.Master != s.Bridge.Index):
		return fmt.Errorf("%w: %s is a port of %s now; take it off with `ip link set %s nomaster`", ErrRefused, rec.NIC, s.master(), rec.NIC)
	case !s.NIC.Up():
		return fmt.Errorf("%w: %s is down; set it up with `ip link set %s up`", ErrRefused, rec.NIC, rec.NIC)
	}
	return nil
}

// settingsToMend are the parameters that a mend is planned by. Those of a bridge that is
// there are its owner's by now: pods are routed, and get no redirects, by what an operator
// has set since. A new one gets what the first one got, but is a router if the
// NIC is one now, and has the NIC's present MTU for IPv6: it may not have the old one.
func (s *Snapshot) settingsToMend(rec *Record) map[string]string {
	settings := map[string]string{}
	if s.Bridge == nil {
		for path, value := range rec.Before.Settings {
			if _, ours := renamed(path, rec.Bridge, rec.Bridge); !ours {
				settings[path] = value
			}
		}
		for path, value := range s.Settings {
			if name(path) == "forwarding" || path == conf6+rec.NIC+"/mtu" {
				settings[path] = value
			}
		}
		return settings
	}
	for path, value := range s.Settings {
		if _, ours := renamed(path, rec.NIC, rec.NIC); ours {
			continue
		}
		settings[path] = value
		if of, ours := renamed(path, rec.Bridge, rec.NIC); ours {
			settings[of] = value
		}
	}
	return settings
}
