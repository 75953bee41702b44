package addr

import (
	"errors"
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

// FuzzAddress reads what might be an address, and if it is one, asks for it and
// reads that: nothing that can be asked for gets lost. The seeds are what kernels
// sent.
func FuzzAddress(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		a, err := decode(data)
		if err != nil {
			must.That(t, errors.Is(err, nl.ErrMalformed), "%v is not %v", err, nl.ErrMalformed)
			return
		}
		_ = a.String()
		m, err := a.Message(unix.RTM_NEWADDR, netlink.Create|netlink.Excl)
		if err != nil {
			must.That(t, len(a.Label) >= 65000, "%v", err)
			return
		}
		nltest.MustKeepUnknown(t, data, m.Data, unix.SizeofIfAddrmsg)
		again := must.Of(decode(m.Data)).Get(t)
		a.Flags, a.Scope = a.requestFlags(), a.scope()
		if !a.is4() {
			a.Label, a.Broadcast = "", again.Broadcast
		}
		if a.Valid != nil && (a.Preferred == nil || *a.Preferred > *a.Valid) {
			a.Preferred = a.Valid
		}
		expect.NoDiff(t, cmp.Diff(a, again, cmpopts.EquateComparable(a.Prefix, a.Peer)), "read and asked for")
		d := a.compare(&again)
		expect.That(t, d == same || !a.is4() && a.Flags&unix.IFA_F_NODAD == 0, "difference %d from itself", d)
	})
}
