package uplink

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
)

// ErrNotTaken is the cause of an error about a takeover that is not finished: Recover
// is for that.
var ErrNotTaken = errors.New("the takeover is not finished")

// Check lists differences from how Take left it: objects that a network manager has given back to the NIC, has
// taken from the bridge, or has deleted. Addresses and routes that the bridge has got since, beside those on record
// or in their place, are no difference, nor is what was leased or learnt and has run out.
//
// Where nothing differs, now is the record as it would be if the NIC was taken over at this
// time: with the addresses, routes and rules that the bridge has got since. The caller that keeps it
// (Record.Save) has a later Mend put back those. Elsewhere it is the record that was given.
func (c *Conn) Check(ctx context.Context, rec *Record) (_ []tombolo.Difference, now *Record, _ error) {
	if err := c.taken(ctx, rec); err != nil {
		return nil, nil, err
	}
	s, err := c.look(ctx, rec.NIC, rec.Bridge)
	if isGone(err) {
		return []tombolo.Difference{{Object: "link " + rec.NIC, What: "interface", Want: rec.NIC, Remedy: tombolo.RemedyConfigure}}, rec, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("check %s: %w", rec.NIC, err)
	}
	if list := s.differences(rec); len(list) > 0 {
		return list, rec, nil
	}
	n := *rec
	n.Before = s.asBefore(rec)
	return nil, &n, nil
}

// taken is given for what takes a finished takeover.
func (c *Conn) taken(ctx context.Context, rec *Record) error {
	if err := c.usable(ctx); err != nil {
		return err
	}
	if err := rec.validate(); err != nil {
		return err
	}
	if rec.State != Taken {
		return fmt.Errorf("look at %s: %w: its state is %s", rec.NIC, ErrNotTaken, rec.State)
	}
	return nil
}

// differences is Check without a kernel.
func (s *snapshot) differences(rec *Record) []tombolo.Difference {
	nic, br := "link "+rec.NIC, "bridge "+rec.Bridge
	var list []tombolo.Difference
	add := func(is bool, object, what, want, have string) {
		if is {
			list = append(list, tombolo.Difference{Object: object, What: what, Want: want, Have: have})
		}
	}
	decided := func(is bool, what, want, have string) { // by the operator: see cannotMend
		if is {
			list = append(list, tombolo.Difference{Object: nic, What: what, Want: want, Have: have, Remedy: tombolo.RemedyConfigure})
		}
	}
	decided(!s.NIC.Up(), "state", "up", "down")
	s.withoutKept(rec).tell(s.NIC, func(what, have string) { add(true, nic, what, "", have) })
	if s.Bridge == nil {
		add(true, br, "link", rec.Bridge, "")
		return list
	}
	add(s.NIC.Master == 0, nic, "master", rec.Bridge, "")
	decided(s.NIC.Master != 0 && s.NIC.Master != s.Bridge.Index, "master", rec.Bridge, s.master())
	add(!s.Bridge.Up(), br, "state", "up", "down")
	add(s.Bridge.MAC != rec.Before.NIC.MAC, br, "MAC", rec.Before.NIC.MAC, s.Bridge.MAC)
	bare := s.withoutKept(rec)
	want := bare.withLost(rec.withoutReplaced(s), *s.Bridge, false)
	lost := &snapshot{Addresses: want.Addresses[len(bare.Addresses):], Routes: want.Routes[len(bare.Routes):], Rules: want.Rules[len(bare.Rules):]}
	lost.tell(*s.Bridge, func(what, want string) { add(true, br, what, want, "") })
	for _, a := range s.stale(rec) {
		add(true, nic, "address", "", a.Prefix.String())
	}
	return list
}

// tell tells what a link has of layer 3.
func (s *snapshot) tell(link linkState, tell func(what, text string)) {
	m := newMove(s, link, linkState{Index: noLink})
	for _, a := range m.addresses() {
		tell("address", a.Prefix.String())
	}
	for _, r := range m.routes() {
		tell("route", m.words(r))
	}
	for _, r := range m.rules() {
		tell("rule", r.String())
	}
}

// isKept says that the NIC keeps an address beside the bridge's, for agents.
func (s *snapshot) isKept(rec *Record, a addr.Address) bool {
	ours := rec.Before.address(rec.Before.NIC.Index, a) != nil || s.Bridge != nil && s.address(s.Bridge.Index, a) != nil
	return rec.KeepAddress && ours && a.Link == s.NIC.Index && a.Valid == nil && !a.Prefix.Addr().IsLinkLocalUnicast()
}

// withoutKept is the snapshot without these.
func (s *snapshot) withoutKept(rec *Record) *snapshot {
	n := *s
	n.Addresses = slices.DeleteFunc(slices.Clone(s.Addresses), func(a addr.Address) bool { return s.isKept(rec, a) })
	return &n
}

// stale are kept addresses that the bridge has no more: the host got another.
func (s *snapshot) stale(rec *Record) []addr.Address {
	want := s.withoutKept(rec).withLost(rec.withoutReplaced(s), s.NIC, s.Bridge == nil)
	return slices.DeleteFunc(slices.Clone(s.Addresses), func(a addr.Address) bool { return !s.isKept(rec, a) || want.somewhere(a) })
}

// Mend corrects the differences that Check finds, by the steps of a takeover, and says whether there were any.
// Addresses and routes that the NIC has got go to the bridge, and those that the bridge has lost come back as the
// record has them, unless another is in their place. A NIC that is gone cannot be mended (fs.ErrNotExist).
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
	s, err := c.whole(ctx, rec.NIC, rec.Bridge)
	if err != nil || len(s.differences(rec)) == 0 {
		return false, err
	}
	if err := s.cannotMend(rec); err != nil {
		return false, err
	}
	for _, a := range s.stale(rec) {
		if err := c.addrs.Remove(ctx, a); err != nil {
			return true, err
		}
	}
	n := s.toMend(rec)
	if err := (&run{Conn: c, rec: n, journal: j, settings: s.Settings}).forward(ctx, takeSteps()); err != nil {
		return true, err
	}
	*rec = *n
	return true, nil
}

// toMend is the record that a Mend goes by. A new bridge gets the NIC's MAC and MTU of now.
func (s *snapshot) toMend(rec *Record) *Record {
	n := rec.withoutReplaced(s)
	// There is no other way than forward, for Recover too.
	n.Mending, n.Committed = true, true
	if s.Bridge == nil {
		n.Anew, n.Before.NIC = true, s.NIC
	}
	return n
}

// cannotMend says what only the operator can decide.
func (s *snapshot) cannotMend(rec *Record) error {
	switch {
	case s.NIC.Master != 0 && s.Bridge == nil:
		return fmt.Errorf("%w: %s is a port of %s now, and %s is gone; if it was renamed, set %s down, name it back (ip link set %s name %s), and set it up",
			ErrRefused, rec.NIC, s.master(), rec.Bridge, s.master(), s.master(), rec.Bridge)
	case s.NIC.Master != 0 && s.master() != rec.Bridge:
		return fmt.Errorf("%w: %s is a port of %s now; take it off with `ip link set %s nomaster`", ErrRefused, rec.NIC, s.master(), rec.NIC)
	case !s.NIC.Up():
		return fmt.Errorf("%w: %s is down; set it up with `ip link set %s up`", ErrRefused, rec.NIC, rec.NIC)
	}
	return nil
}
