package state

import (
	"errors"
	"net/netip"
	"os"
	"testing"

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
	got, err := d.Load(a.Network, a.Hash())
	must.Succeed(t, err)
	if d := diff(a, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestUpdateBringsNothingBackToLife(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	a := sample("c1")
	a.State = Ready
	if err := d.Update(a); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("update of what is not there: %v", err)
	}
	if _, err := d.Load(a.Network, a.Hash()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("afterwards: %v", err)
	}
}
