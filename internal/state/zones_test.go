package state

import (
	"net/netip"
	"os"
	"reflect"
	"slices"
	"testing"
	"time"
)

func TestForwardedLinksAreThoseOfGateways(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	if links, err := d.ForwardedLinks(); len(links) > 0 || err != nil {
		t.Errorf("before the first epoch: %q, %v", links, err)
	}
	lock, epoch, err := d.Enter(t.Context(), func(EpochStart) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	gateways := []netip.Prefix{netip.MustParsePrefix("10.22.0.1/16")}
	for _, n := range []Network{
		{Name: "pods", Bridge: "cbr0", Gateways: gateways, Epoch: epoch.Token()},
		{Name: "also", Bridge: "cbr0", Gateways: gateways, Epoch: epoch.Token()},
		{Name: "tagged", Bridge: "br1", Gateways: gateways, VLAN: VLAN{ID: 7}, Epoch: epoch.Token()},
		{Name: "l2", Bridge: "br2", Epoch: epoch.Token()},
		{Name: "lan", Bridge: "br3", Gateways: gateways, Uplink: "eth0", Epoch: epoch.Token()},
		{Name: "old", Bridge: "br4", Gateways: gateways, Epoch: "another"},
	} {
		before := d.NetworksChanged()
		if err := d.SaveNetwork(&n); err != nil {
			t.Fatal(err)
		}
		if n.Name == "pods" && before == d.NetworksChanged() {
			t.Error("a new record is no change")
		}
	}
	want := []string{"br1.7", "cbr0"}
	if links, err := d.ForwardedLinks(); !slices.Equal(links, want) || err != nil {
		t.Errorf("%q, %v; want %q", links, err, want)
	}
	if err := os.WriteFile(d.networksPath()+"/damaged.json", []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if links, err := d.ForwardedLinks(); !slices.Equal(links, want) || err == nil {
		t.Errorf("beside a damaged record: %q, %v; want %q and an error", links, err, want)
	}
}

func TestZonesAreKept(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	for _, want := range []Zones{{}, {Joined: []string{"cbr0", "br1.7"}, Left: []string{"br2"}}, {Left: []string{"br2"}}, {}} {
		if err := d.SetZones(want); err != nil {
			t.Fatal(err)
		}
		if got, err := d.Zones(); !reflect.DeepEqual(got, want) || err != nil {
			t.Errorf("%+v, %v; want %+v", got, err, want)
		}
	}
}

func TestZonesAreAttendedToByOneProcess(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	if d.ZonesAttended("cbr0") {
		t.Error("attended to by nobody")
	}
	first, err := d.AttendZones()
	if err != nil {
		t.Fatal(err)
	}
	if second, err := d.AttendZones(); err == nil {
		second.Close()
		t.Error("attended to twice")
	}
	if err := d.SetZones(Zones{Left: []string{"br2"}}); err != nil {
		t.Fatal(err)
	}
	if !d.ZonesAttended("cbr0") || d.ZonesAttended("br2") {
		t.Error("want cbr0 to be attended to, and br2 left alone")
	}
	first.Close()
	// A process that another test has just forked has the file too, until it executes its program.
	for deadline := time.Now().Add(10 * time.Second); d.ZonesAttended("cbr0"); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("attended to by a process that ended")
		}
	}
	again, err := d.AttendZones()
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}

func FuzzDecodeZones(f *testing.F) {
	f.Add(encodeZones(Zones{Joined: []string{"cbr0"}, Left: []string{"br1.7"}}))
	f.Fuzz(func(t *testing.T, data []byte) {
		z := decodeZones(data)
		if back := decodeZones(encodeZones(z)); !reflect.DeepEqual(z, back) {
			t.Errorf("%q: %+v comes back as %+v", data, z, back)
		}
	})
}
