package firewalld

import (
	"context"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// fakeFirewalld answers for zones, and counts how often it is asked for them.
func fakeFirewalld(t *testing.T) (bus string, own *dbus.Conn, asked *atomic.Int64) {
	t.Helper()
	dir, err := os.MkdirTemp("", "f") // short: a socket's address has room for 107 bytes
	must.Succeed(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	bus = "unix:path=" + filepath.Join(dir, "bus")
	config := `<busconfig><type>session</type><listen>` + bus + `</listen><auth>EXTERNAL</auth><policy context="default">
		<allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/></policy></busconfig>`
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "conf"), []byte(config), 0o600))
	daemon := exec.Command("dbus-daemon", "--config-file="+filepath.Join(dir, "conf"), "--nofork", "--nopidfile")
	must.Succeed(t, daemon.Start())
	t.Cleanup(func() { daemon.Process.Kill(); daemon.Wait() })
	must.Until(t, "there is a bus", func() bool { own, err = dbus.Connect(bus); return err == nil })
	t.Cleanup(func() { own.Close() })
	asked = &atomic.Int64{}
	trusted := func(string) (string, *dbus.Error) { asked.Add(1); return zone, nil }
	none := func(string) (string, *dbus.Error) { return "", nil }
	standard := func() (string, *dbus.Error) { return "public", nil }
	for _, err := range []error{
		own.ExportMethodTable(map[string]any{zoneOf: trusted}, path, name+".zone"),
		own.ExportMethodTable(map[string]any{"getDefaultZone": standard}, path, name),
		own.ExportMethodTable(map[string]any{zoneOf: none}, configPath, name+".config"),
	} {
		must.Succeed(t, err)
	}
	must.Succeed(t, expect.Err(own.RequestName(name, 0)))
	return bus, own, asked
}

// TestSignalsOfAnybodyCostOneLookASecond has a stranger on the bus send one signal after the other.
func TestSignalsOfAnybodyCostOneLookASecond(t *testing.T) {
	t.Parallel()
	bus, own, asked := fakeFirewalld(t)
	dir, err := state.Open(t.TempDir() + "/state")
	must.Succeed(t, err)
	lock, epoch, err := dir.Enter(t.Context())
	must.Succeed(t, err)
	record := &state.Network{Name: "net", Epoch: epoch.Token(), Bridge: "cbr0", Gateways: []netip.Prefix{netip.MustParsePrefix("10.22.0.1/16")}}
	must.Succeed(t, dir.SaveNetwork(record))
	lock.Close()
	must.Succeed(t, dir.SetZones(state.Zones{Joined: []string{"cbr0"}}))
	stranger := must.Of(dbus.Connect(bus)).Get(t)
	defer stranger.Close()
	ctx, cancel := context.WithCancel(t.Context())
	z, ended := zonesOn(t, ctx, dir, bus), make(chan struct{})
	go func() {
		defer close(ended)
		for err := error(nil); err == nil; _, err = z.Next() {
			if err := z.Look(ctx); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		}
		z.Close()
	}()
	t.Cleanup(func() { cancel(); <-ended })
	must.Until(t, "it has looked", func() bool { return asked.Load() > 0 })
	var names []string
	must.Succeed(t, stranger.BusObject().Call(busName+".ListNames", 0).Store(&names))
	kept := slices.IndexFunc(names, func(n string) bool {
		return n[0] == ':' && n != own.Names()[0] && n != stranger.Names()[0]
	})
	signal := &dbus.Message{Type: dbus.TypeSignal, Headers: map[dbus.HeaderField]dbus.Variant{
		dbus.FieldDestination: dbus.MakeVariant(names[kept]), dbus.FieldPath: dbus.MakeVariant(path),
		dbus.FieldInterface: dbus.MakeVariant(name), dbus.FieldMember: dbus.MakeVariant("Reloaded"),
	}}
	before, begun := asked.Load(), time.Now()
	for asked.Load() < before+6 {
		stranger.Send(signal, nil)
		if err := stranger.BusObject().Call(busName+".GetId", 0).Err; err != nil { // the bus is done with it
			t.Fatal(err)
		}
	}
	if most := 4 + time.Since(begun)/time.Second; time.Duration(asked.Load()-before) > most {
		t.Errorf("%d looks, want %d at most", asked.Load()-before, most)
	}
}
