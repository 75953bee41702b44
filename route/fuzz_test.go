package route

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
)

// The targets read what might be an object, and if it is one, ask for it and read
// that: nothing that can be asked for gets lost. The seeds are what kernels sent:
// see TestRecordSeeds and TestRecordMessages.

// asked gives the data of the one message that do sends; nil where it could not be
// encoded.
func asked(do func(*Conn) error) []byte {
	rec := nltest.Record(nltest.NewFake(nltest.AckAll))
	if do(On(nl.New(rec))) != nil {
		return nil
	}
	return nltest.Split(rec.Sent()[0])[0].Data
}

func mustBeMalformed(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, nl.ErrMalformed) {
		t.Fatalf("%v is not %v", err, nl.ErrMalformed)
	}
}

func FuzzRoute(f *testing.F) {
	seed(f, unix.RTM_NEWROUTE)
	f.Fuzz(func(t *testing.T, data []byte) {
		r, known, err := decode(data)
		if err != nil {
			mustBeMalformed(t, err)
			return
		}
		if !known {
			return
		}
		_, _ = r.String(), r.Matches(r)
		sent := asked(func(c *Conn) error { return c.Add(r) })
		if sent == nil {
			if !r.From.IsValid() && len(data) < 1<<15 {
				t.Fatalf("%+v cannot be asked for", r)
			}
			return
		}
		mustKeepUnknown(t, data, sent, unix.SizeofRtMsg)
		again, _, err := decode(sent)
		if err != nil {
			t.Fatal(err)
		}
		want := r.normal()
		if diff := cmp.Diff(askable(want), askable(again), cmpopts.EquateComparable(r.Dst, r.Gateway), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("read and asked for (-first +again):\n%s", diff)
		}
	})
}

// askable leaves out of a normal route what is not sent.
func askable(r Route) Route {
	r.Flags, r.Expires, r.Other = 0, nil, r.others()
	if r.Family == unix.AF_INET {
		r.Pref = 0
	}
	if r.NexthopID != 0 {
		r.Gateway, r.Link, r.Nexthops = netip.Addr{}, 0, nil
	}
	if len(r.Nexthops) > 0 {
		r.Gateway, r.Link = netip.Addr{}, 0
	}
	hops := append([]Nexthop(nil), r.Nexthops...)
	for i := range hops {
		hops[i].Flags = 0
	}
	r.Nexthops = hops
	return r
}

func FuzzRule(f *testing.F) {
	seed(f, unix.RTM_NEWRULE)
	f.Fuzz(func(t *testing.T, data []byte) {
		r, known, err := decodeRule(data)
		if err != nil {
			mustBeMalformed(t, err)
			return
		}
		if !known {
			return
		}
		_ = r.String()
		sent := asked(func(c *Conn) error { return c.AddRule(r) })
		if sent == nil {
			if len(data) < 1<<15 {
				t.Fatalf("%+v cannot be asked for", r)
			}
			return
		}
		mustKeepUnknown(t, data, sent, 12)
		again, _, err := decodeRule(sent)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(askableRule(r), askableRule(again), cmpopts.EquateComparable(r.From)); diff != "" {
			t.Errorf("read and asked for (-first +again):\n%s", diff)
		}
	})
}

// askableRule spells out the zero values, and leaves out what is not sent.
func askableRule(r Rule) Rule {
	r.Table, r.Mask = r.table(), r.mask()
	r.Action = max(r.Action, ToTable)
	if r.Protocol == 0 {
		r.Protocol = ProtocolTombolo
	}
	if r.Mask == 0 {
		r.Mark = 0
	}
	if r.From = r.From.Masked(); r.From.Bits() == 0 {
		r.From = netip.Prefix{}
	}
	if r.To = r.To.Masked(); r.To.Bits() == 0 {
		r.To = netip.Prefix{}
	}
	return r
}

func FuzzNeighbour(f *testing.F) {
	seed(f, unix.RTM_NEWNEIGH)
	f.Fuzz(func(t *testing.T, data []byte) {
		n, known, err := decodeNeighbour(data)
		if err != nil {
			mustBeMalformed(t, err)
			return
		}
		if !known {
			return
		}
		_ = n.String()
		sent := asked(func(c *Conn) error { return c.AddNeighbour(n) })
		if sent == nil {
			if len(data) < 1<<15 {
				t.Fatalf("%+v cannot be asked for", n)
			}
			return
		}
		mustKeepUnknown(t, data, sent, unix.SizeofNdMsg)
		again, _, err := decodeNeighbour(sent)
		if err != nil {
			t.Fatal(err)
		}
		if n.State == 0 {
			n.State = Permanent
		}
		if diff := cmp.Diff(n, again, cmpopts.EquateComparable(n.Addr), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("read and asked for (-first +again):\n%s", diff)
		}
	})
}
