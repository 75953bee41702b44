package state

import (
	"net/netip"
	"os"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestUpdateWritesOverAReadyRecord(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	a := sample("c1")
	p := pending(t, d, a)
	must.Succeed(t, p.Commit(a))
	a.Addresses[0].Prefix = netip.MustParsePrefix("10.1.0.77/24")
	must.Succeed(t, d.Update(a))
	got := must.Of(d.Load(a.Network, a.Hash())).Get(t)
	expect.NoDiff(t, diff(a, got))
}

func TestUpdateBringsNothingBackToLife(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	a := sample("c1")
	a.State = Ready
	expect.Is(t, d.Update(a), os.ErrNotExist, "update of what is not there")
	expect.Is(t, expect.Err(d.Load(a.Network, a.Hash())), os.ErrNotExist, "afterwards")
}
