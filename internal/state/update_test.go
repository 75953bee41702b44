package state

import (
	"errors"
	"net/netip"
	"os"
	"testing"
)

func TestUpdateWritesOverAReadyRecord(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	a := sample("c1")
	p := pending(t, d, a)
	if err := p.Commit(a); err != nil {
		t.Fatal(err)
	}
	a.Addresses[0].Prefix = netip.MustParsePrefix("10.1.0.77/24")
	if err := d.Update(a); err != nil {
		t.Fatal(err)
	}
	got, err := d.Load(a.Network, a.Hash())
	if err != nil {
		t.Fatal(err)
	}
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
