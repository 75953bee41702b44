package route

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// The targets read what might be an object, and if it is one, ask for it and read
// that: nothing that can be asked for gets lost. The seeds are what kernels sent.

func mustBeMalformed(t *testing.T, err error) {
	t.Helper()
	must.That(t, errors.Is(err, nl.ErrMalformed), "%v is not %v", err, nl.ErrMalformed)
}

func FuzzRoute(f *testing.F) {
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
		m, err := r.AddMessage()
		if err != nil {
			must.That(t, r.From.IsValid() || len(data) >= 1<<15, "%+v cannot be asked for", r)
			return
		}
		mustKeepUnknown(t, data, m.Data, unix.SizeofRtMsg)
		again, _, err := decode(m.Data)
		must.Succeed(t, err)
		want := r.normal()
		expect.NoDiff(t, cmp.Diff(askable(want), askable(again), cmpopts.EquateComparable(r.Dst, r.Gateway), cmpopts.EquateEmpty()), "read and asked for")
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
		m, err := r.CopyMessage()
		if err != nil {
			must.That(t, len(data) >= 1<<15 || strings.ContainsRune(r.IIF+r.OIF, 0), "%+v cannot be asked for", r)
			return
		}
		mustKeepUnknown(t, data, m.Data, 12)
		again, _, err := decodeRule(m.Data)
		must.Succeed(t, err)
		expect.NoDiff(t, cmp.Diff(askableRule(r), askableRule(again), cmpopts.EquateComparable(r.From)), "read and asked for")
	})
}

// askableRule leaves out what is not sent.
func askableRule(r Rule) Rule {
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
		m, err := n.ReplaceMessage()
		if err != nil {
			must.That(t, len(data) >= 1<<15, "%+v cannot be asked for", n)
			return
		}
		mustKeepUnknown(t, data, m.Data, unix.SizeofNdMsg)
		again, _, err := decodeNeighbour(m.Data)
		must.Succeed(t, err)
		if n.State == 0 {
			n.State = Permanent
		}
		expect.NoDiff(t, cmp.Diff(n, again, cmpopts.EquateComparable(n.Addr), cmpopts.EquateEmpty()), "read and asked for")
	})
}

// mustKeepUnknown fails where attributes are lost that no kernel of today has.
func mustKeepUnknown(t *testing.T, listed, copied []byte, header int) {
	t.Helper()
	const unheardOf = 64
	unknown := func(b []byte) []netlink.Attribute {
		var list []netlink.Attribute
		must.Succeed(t, nl.Decode(b[header:], func(ad *netlink.AttributeDecoder) error {
			if ad.Type() >= unheardOf {
				list = append(list, nl.Keep(ad))
			}
			return nil
		}))
		return list
	}
	diff := cmp.Diff(unknown(listed), unknown(copied))
	expect.That(t, diff == "", "unknown attributes (-listed +copied):\n%s", diff)
}
