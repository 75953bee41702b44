package vlan

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
)

func TestMembershipReadsAsTheCommandBridgeHasIt(t *testing.T) {
	t.Parallel()
	for want, m := range map[string]Membership{
		"none":                             {},
		"100 pvid untagged":                {ID: 100},
		"1 pvid untagged, 7":               {Trunk: []Range{{7, 7}}},
		"1 pvid untagged, 2-4094":          {Trunk: []Range{{1, 4094}}},
		"5-6, 7 pvid untagged, 8-10, 4094": {ID: 7, Trunk: []Range{{8, 9}, {5, 7}, {9, 10}, {4094, 4094}}},
	} {
		expect.Equal(t, m.String(), want, "%+v is", m)
		expect.Success(t, m.Check())
	}
	for _, m := range []Membership{{ID: 4095}, {Trunk: []Range{{0, 7}}}, {Trunk: []Range{{7, 4095}}}, {Trunk: []Range{{8, 7}}}} {
		expect.Is(t, m.Check(), tombolo.ErrInvalid, "%+v", m)
	}
}

func TestChangesAreWhatAPortLacksAndHasTooMuch(t *testing.T) {
	t.Parallel()
	fresh := entries{1: flagPVID | flagUntagged}
	for _, tt := range []struct {
		name     string
		m        Membership
		have     entries
		del, add string
	}{
		{"a fresh port", Membership{ID: 100}, fresh, "1 pvid untagged", "100 pvid untagged"},
		{"that stays in the default VLAN", Membership{ID: 100, KeepDefault: true}, fresh, "none", "100 pvid untagged"},
		{"a trunk whose native VLAN is the default one", Membership{Trunk: []Range{{7, 9}}}, fresh, "none", "7-9"},
		{"nothing", Membership{ID: 100, Trunk: []Range{{7, 7}}}, entries{100: flagPVID | flagUntagged, 7: 0}, "none", "none"},
		{"a trunk that became native", Membership{Trunk: []Range{{7, 7}}}, entries{1: flagUntagged, 7: flagPVID | flagUntagged}, "none", "1 pvid untagged, 7"},
		{"too many", Membership{ID: 5}, entries{5: flagPVID | flagUntagged, 6: 0, 7: 0, 9: 0}, "6-7, 9", "none"},
	} {
		del, add := tt.m.changes(tt.have)
		expect.That(t, del.String() != "" && del.String() == tt.del && add.String() == tt.add,
			"%s: deletes %s and adds %s, want %s and %s", tt.name, del, add, tt.del, tt.add)
	}
}

func TestRangesGoToTheKernelAndBack(t *testing.T) {
	t.Parallel()
	want := entries{1: flagUntagged, 7: flagPVID | flagUntagged, 8: 0, 9: 0, 10: 0, 4094: 0}
	ae := netlink.NewAttributeEncoder()
	for _, r := range want.runs() {
		nl.Nested(ae, dbEntry, r.encode)
	}
	b := must.Of(ae.Encode()).Get(t)
	got := entries{}
	must.Succeed(t, nl.Decode(b, got.decode))
	expect.NoDiff(t, cmp.Diff(want, got))
}

// A kernel without VLANs refuses each of their messages. A call that looks first has nothing to leave.
func TestCallsSayThatTheKernelKnowsNoVLANs(t *testing.T) {
	t.Parallel()
	fake := nltest.NewFake(func(requests []netlink.Message) (answers [][]byte) {
		for _, r := range requests {
			errno := unix.EOPNOTSUPP
			if r.Header.Type == unix.RTM_GETLINK {
				errno = unix.ENODEV
			}
			answers = append(answers, nltest.Error(r, errno, ""))
		}
		return answers
	})
	c, ctx, m, l := On(nl.New(fake)), t.Context(), Membership{ID: 5}, Link{Bridge: 2, Name: "br0.5", ID: 5, MTU: 1500}
	for name, call := range map[string]func() error{
		"Probe":      func() error { return c.Probe(ctx) },
		"Ensure":     func() error { _, err := c.Ensure(ctx, 3, m); return err },
		"Join":       func() error { _, err := c.Join(ctx, 3, Range{5, 5}); return err },
		"Outside":    func() error { _, err := c.Outside(ctx, 3, Range{5, 5}); return err },
		"Leave":      func() error { return c.Leave(ctx, 3, Range{5, 5}) },
		"Check":      func() error { _, err := c.Check(ctx, 3, "veth1", m); return err },
		"EnsureLink": func() error { _, err := c.EnsureLink(ctx, l); return err },
	} {
		err := call()
		expect.Is(t, err, ErrUnsupported, name)
		expect.Is(t, err, unix.EOPNOTSUPP, name)
	}
	expect.Success(t, c.RemoveLink(ctx, l))
}

func FuzzEntries(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		e := entries{}
		expect.That(t, nl.Decode(b, e.decode) != nil || e.String() != "", "VLANs without a text")
	})
}

func FuzzRanges(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		var list, again Ranges
		err := list.UnmarshalText([]byte(text))
		if err != nil {
			expect.Is(t, err, tombolo.ErrInvalid)
			return
		}
		err = again.UnmarshalText([]byte(list.String()))
		if diff := cmp.Diff(list, again); diff != "" || err != nil {
			t.Errorf("%q: %v (-before +after):\n%s", text, err, diff)
		}
	})
}
