package route

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
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
		m, err := r.Message(unix.RTM_NEWROUTE, netlink.Create|netlink.Excl)
		if err != nil {
			must.That(t, r.From.IsValid() || len(data) >= 1<<15, "%+v cannot be asked for", r)
			return
		}
		nltest.MustKeepUnknown(t, data, m.Data, unix.SizeofRtMsg)
		again, _, err := decode(m.Data)
		must.Succeed(t, err)
		want := r.normal()
		want.Protocol = r.Protocol // Message leaves 0 as it is
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
