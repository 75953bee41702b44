package routing

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
)

// The targets read what might be an object, and a neighbour that is one is asked for, and read again: nothing that can
// be asked for gets lost. The seeds are what kernels sent.

func FuzzRule(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		r, known, err := decodeRule(data)
		if err != nil {
			must.That(t, errors.Is(err, nl.ErrMalformed), "%v is not %v", err, nl.ErrMalformed)
			return
		}
		if !known {
			return
		}
		_ = r.String()
	})
}

func FuzzNeighbour(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		n, known, err := decodeNeighbour(data)
		if err != nil {
			must.That(t, errors.Is(err, nl.ErrMalformed), "%v is not %v", err, nl.ErrMalformed)
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
		nltest.MustKeepUnknown(t, data, m.Data, unix.SizeofNdMsg)
		again, _, err := decodeNeighbour(m.Data)
		must.Succeed(t, err)
		if n.State == 0 {
			n.State = Permanent
		}
		expect.NoDiff(t, cmp.Diff(n, again, cmpopts.EquateComparable(n.Addr), cmpopts.EquateEmpty()), "read and asked for")
	})
}
