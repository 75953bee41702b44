package state

import (
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestFailuresAreCountedByVerbAndCode(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	expect.Failure(t, d.CountFailure("ADD", 100), "counted where there is no state directory")
	must.Succeed(t, os.MkdirAll(d.Path(), 0o700))
	var all sync.WaitGroup
	for _, code := range []uint{100, 11, 100, 4_000_000_000, 999} {
		all.Go(func() {
			for range 25 {
				expect.Success(t, d.CountFailure("ADD", code))
			}
		})
	}
	all.Wait()
	expect.Success(t, d.CountFailure("DEL", 11))
	writeFile(t, d.failuresPath()+"/rubbish", "of an operator")
	got, err := d.Failures()
	want := []Failures{{"ADD", 100, 50}, {"ADD", 11, 25}, {"ADD", 999, 50}, {"DEL", 11, 1}}
	diff := cmp.Diff(want, got)
	expect.That(t, diff == "" && err == nil, "%v, failures (-want +got):\n%s", err, diff)
}

func TestContestedIsKeptAndForgotten(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	want := Contested{At: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC), Times: 4, What: `chain "x"`, By: "nft\n"}
	for range 2 {
		must.Succeed(t, d.SetContested(&want))
		got, err := d.Contested()
		expect.That(t, err == nil && got != nil && diff(want, *got) == "", "%+v, %v; want %+v", got, err, want)
	}
	for range 2 {
		expect.Success(t, d.SetContested(nil))
		got, err := d.Contested()
		expect.That(t, got == nil && err == nil, "%+v, %v", got, err)
	}
	must.Succeed(t, os.WriteFile(d.contestedPath(), []byte("{"), 0o600))
	got, err := d.Contested()
	expect.That(t, err != nil, "damaged: %+v", got)
}

func TestForwardedLinksAreThoseOfGateways(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	expect.Of(d.ForwardedLinks()).Len(t, 0, "before the first epoch")
	lock, epoch, err := d.Enter(t.Context())
	must.Succeed(t, err)
	defer lock.Close()
	gateways := []netip.Prefix{netip.MustParsePrefix("10.22.0.1/16")}
	for _, n := range []Network{
		{Name: "pods", Bridge: "cbr0", Gateways: gateways, Epoch: epoch.Token()},
		{Name: "also", Bridge: "cbr0", Gateways: gateways, Epoch: epoch.Token()},
		{Name: "tagged", Bridge: "br1", Gateways: gateways, VLAN: vlan.Membership{ID: 7}, Epoch: epoch.Token()},
		{Name: "l2", Bridge: "br2", Epoch: epoch.Token()},
		{Name: "lan", Bridge: "br3", Gateways: gateways, Uplink: "eth0", Epoch: epoch.Token()},
		{Name: "old", Bridge: "br4", Gateways: gateways, Epoch: "another"},
	} {
		before := d.NetworksChanged()
		must.Succeed(t, d.SaveNetwork(&n))
		expect.That(t, n.Name != "pods" || before != d.NetworksChanged(), "a new record is no change")
	}
	want := []string{"br1.7", "cbr0"}
	links, err := d.ForwardedLinks()
	expect.That(t, slices.Equal(links, want) && err == nil, "%q, %v; want %q", links, err, want)
	must.Succeed(t, os.WriteFile(d.networksPath()+"/damaged.json", []byte("{"), 0o600))
	if links, err := d.ForwardedLinks(); !slices.Equal(links, want) || err == nil {
		t.Errorf("beside a damaged record: %q, %v; want %q and an error", links, err, want)
	}
}

func TestZonesAreKept(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	for _, want := range []Zones{{}, {Joined: []string{"cbr0", "br1.7"}, Left: []string{"br2"}}, {Left: []string{"br2"}}, {}} {
		must.Succeed(t, d.SetZones(want))
		got, err := d.Zones()
		expect.That(t, diff(want, got) == "" && err == nil, "%+v, %v; want %+v", got, err, want)
	}
}

func TestZonesAreAttendedToByOneProcess(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	expect.That(t, !d.ZonesAttended("cbr0"), "attended to by nobody")
	first := must.Of(d.AttendZones()).Get(t)
	if second, err := d.AttendZones(); err == nil {
		second.Close()
		t.Error("attended to twice")
	}
	must.Succeed(t, d.SetZones(Zones{Left: []string{"br2"}}))
	expect.That(t, d.ZonesAttended("cbr0") && !d.ZonesAttended("br2"),
		"want cbr0 to be attended to, and br2 left alone")
	first.Close()
	// A process that another test has just forked has the file too, until it executes its program.
	must.Until(t, "cbr0 is attended to no more", func() bool { return !d.ZonesAttended("cbr0") })
	again := must.Of(d.AttendZones()).Get(t)
	again.Close()
}
