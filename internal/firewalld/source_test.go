package firewalld

import (
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"

	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/internal/sources"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// fake is a firewalld on a bus of its own, that answers as a test wants.
type fake struct {
	conn *dbus.Conn
	bus  string

	mu     sync.Mutex
	zones  active
	calls  map[string]int
	refuse map[string]*dbus.Error // by methods
	silent chan struct{}          // not nil: getActiveZones waits for it
}

func newFake(t *testing.T) *fake {
	t.Helper()
	dir, err := os.MkdirTemp("", "f") // short: a socket's address has room for 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	f := &fake{bus: "unix:path=" + filepath.Join(dir, "bus"), zones: active{}, calls: map[string]int{}, refuse: map[string]*dbus.Error{}}
	config := `<busconfig><type>session</type><listen>` + f.bus + `</listen><auth>EXTERNAL</auth><policy context="default">
		<allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/></policy></busconfig>`
	if err := os.WriteFile(filepath.Join(dir, "conf"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	daemon := exec.Command("dbus-daemon", "--config-file="+filepath.Join(dir, "conf"), "--nofork", "--nopidfile")
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { daemon.Process.Kill(); daemon.Wait() })
	until(t, "there is a bus", func() bool {
		f.conn, err = dbus.Connect(f.bus)
		return err == nil
	})
	t.Cleanup(func() { f.conn.Close() })
	for at, methods := range map[dbus.ObjectPath]map[string]map[string]any{
		path: {
			name + ".zone": {"getActiveZones": f.getActiveZones, "addSource": f.addSource, "removeSource": f.removeSource},
			name:           {"getDefaultZone": func() (string, *dbus.Error) { return "public", nil }},
		},
		configPath: {name + ".config": {"getZoneOfSource": func(string) (string, *dbus.Error) { return "", f.called("getZoneOfSource") }}},
	} {
		for of, table := range methods {
			if err := f.conn.ExportMethodTable(table, at, of); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := f.conn.RequestName(name, 0); err != nil {
		t.Fatal(err)
	}
	return f
}

// called counts a call, and says what it is refused with.
func (f *fake) called(method string) *dbus.Error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls[method]++
	return f.refuse[method]
}

func (f *fake) getActiveZones() (active, *dbus.Error) {
	err := f.called("getActiveZones")
	f.mu.Lock()
	silent := f.silent
	f.mu.Unlock()
	if silent != nil {
		<-silent
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	now := active{"": {"sources": {""}}, "odd": {}, "public": {"interfaces": {"eth0"}}}
	for zone, has := range f.zones {
		now[zone] = map[string][]string{"sources": slices.Clone(has["sources"])}
	}
	return now, err
}

func (f *fake) addSource(zone, source string) (string, *dbus.Error) {
	if err := f.called("addSource"); err != nil {
		return "", err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.zones.add(zone, source)
	return zone, nil
}

func (f *fake) removeSource(zone, source string) (string, *dbus.Error) {
	if err := f.called("removeSource"); err != nil {
		return "", err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.zones[zone]["sources"] = slices.DeleteFunc(f.zones[zone]["sources"], func(s string) bool { return s == source })
	return zone, nil
}

func (f *fake) has(zone string, want ...string) func() bool {
	return func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return slices.Equal(slices.Sorted(slices.Values(f.zones[zone]["sources"])), want)
	}
}

// set changes how it answers.
func (f *fake) set(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it is not so that %s", what)
		}
	}
}

// asking is an attachment on record.
type asking struct {
	dir  *state.Dir
	hash string
	text string
}

func newAsking(t *testing.T) *asking {
	t.Helper()
	d, err := state.Open(t.TempDir() + "/state")
	if err != nil {
		t.Fatal(err)
	}
	a := &state.Attachment{State: state.Ready, Network: "net", ContainerID: "c1", IfName: "eth0", Other: true}
	pending, err := d.Others().Create(a)
	if err == nil {
		err = pending.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return &asking{d, a.Hash(), sources.Text("net", "pods", []netip.Addr{netip.MustParseAddr("10.5.0.2"), netip.MustParseAddr("fd05::2")})}
}

// keep runs a keeper, as of a tombolod, until the test ends or it is stopped, and waits until it attends.
func (a *asking) keep(t *testing.T, f *fake) (log *nstest.Output, stop func()) {
	t.Helper()
	log = &nstest.Output{}
	k := newKeeper(&Config{State: a.dir, Address: f.bus, Log: slog.New(slog.NewTextHandler(log, nil))})
	k.patience, k.again, k.pause = 200*time.Millisecond, time.Millisecond, 10*time.Millisecond
	stop = run(t, k)
	until(t, "it is attended to", sources.Of(a.dir).Attended)
	return log, stop
}

var both = []string{"10.5.0.2/32", "fd05::2/128"}

func TestWhatAKilledTombolodHasBegunIsFinishedOrUndone(t *testing.T) {
	t.Parallel()
	f, a := newFake(t), newAsking(t)
	d := sources.Of(a.dir)
	_, stop := a.keep(t, f)
	if err := d.Ask(t.Context(), a.hash, a.text); err != nil || !f.has("pods", both...)() {
		t.Fatalf("it has %v, %v", f.zones, err)
	}
	stop()
	// Killed when half of it was in, and not noted as done.
	entries, err := d.List()
	if err != nil || len(entries) != 1 {
		t.Fatal(entries, err)
	}
	if err := d.Begin(entries[0]); err != nil {
		t.Fatal(err)
	}
	f.set(func() { f.zones["pods"]["sources"] = both[:1] })
	_, stop = a.keep(t, f)
	until(t, "the rest is put in", f.has("pods", both...))
	until(t, "that is noted", func() bool { is, _, _ := d.Has(a.hash, a.text); return is })
	// firewalld forgets it all, and says that it was reloaded.
	f.set(func() { f.zones = active{} })
	if err := f.conn.Emit(path, name+".Reloaded"); err != nil {
		t.Fatal(err)
	}
	until(t, "it is put in again", f.has("pods", both...))
	stop()
	// The pod ends while nobody is there.
	if err := d.Leave(t.Context(), a.hash, ""); err != nil {
		t.Error(err)
	}
	a.keep(t, f)
	until(t, "it is taken out", f.has("pods"))
	until(t, "nothing is left", func() bool { list, err := d.List(); return len(list) == 0 && err == nil })
}

// TestSignalsOfAnybodyCostOneLookASecond has a stranger on the bus send one signal after the other.
func TestSignalsOfAnybodyCostOneLookASecond(t *testing.T) {
	t.Parallel()
	f, a := newFake(t), newAsking(t)
	stranger, err := dbus.Connect(f.bus)
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	a.keep(t, f)
	if err := sources.Of(a.dir).Ask(t.Context(), a.hash, a.text); err != nil {
		t.Fatal(err)
	}
	var names []string
	if err := stranger.BusObject().Call(busName+".ListNames", 0).Store(&names); err != nil {
		t.Fatal(err)
	}
	kept := slices.IndexFunc(names, func(n string) bool {
		return n[0] == ':' && n != f.conn.Names()[0] && n != stranger.Names()[0]
	})
	signal := &dbus.Message{Type: dbus.TypeSignal, Headers: map[dbus.HeaderField]dbus.Variant{
		dbus.FieldDestination: dbus.MakeVariant(names[kept]), dbus.FieldPath: dbus.MakeVariant(path),
		dbus.FieldInterface: dbus.MakeVariant(name), dbus.FieldMember: dbus.MakeVariant("Reloaded"),
	}}
	looks := func() (n int) {
		f.set(func() { n = f.calls["getActiveZones"] })
		return n
	}
	before, begun := looks(), time.Now()
	for looks() < before+6 {
		stranger.Send(signal, nil)
		if err := stranger.BusObject().Call(busName+".GetId", 0).Err; err != nil { // the bus is done with it
			t.Fatal(err)
		}
	}
	// An attachment that came has it look as well.
	if most := 4 + time.Since(begun)/time.Second; time.Duration(looks()-before) > most {
		t.Errorf("%d looks, want %d at most", looks()-before, most)
	}
}

func TestAFirewalldThatMisbehavesIsToldOfAndTriedAgain(t *testing.T) {
	t.Parallel()
	broken := &dbus.Error{Name: name + ".Exception", Body: []any{"\x1b[2J\n" + strings.Repeat("BROKEN ", 1<<15)}}
	for what, tt := range map[string]struct {
		worsen func(*fake)
		want   string // of the error of an ADD
	}{
		"it refuses":               {func(f *fake) { f.refuse["addSource"] = broken }, "firewalld refuses: ?[2J?BROKEN"},
		"it gives no reason":       {func(f *fake) { f.refuse["addSource"] = &dbus.Error{Name: name + ".Exception", Body: []any{""}} }, "it gives no reason"},
		"it gives what is no text": {func(f *fake) { f.refuse["addSource"] = &dbus.Error{Name: "a.b", Body: []any{uint32(7)}} }, "a.b"},
		"it ends before it answers": {func(f *fake) {
			f.refuse["addSource"] = &dbus.Error{Name: busName + ".Error.NoReply", Body: []any{"gone"}}
		}, "no tombolod attends"},
		"it does not tell its zones":     {func(f *fake) { f.refuse["getActiveZones"] = broken }, "no tombolod attends"},
		"it never answers for its zones": {func(f *fake) { f.silent = make(chan struct{}) }, "no tombolod attends"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			f, a := newFake(t), newAsking(t)
			log, _ := a.keep(t, f)
			f.set(func() { tt.worsen(f) })
			d := sources.Of(a.dir)
			err := d.Ask(t.Context(), a.hash, a.text)
			if err == nil || !strings.Contains(err.Error(), tt.want) || len(err.Error()) > 300 || strings.Contains(err.Error(), "\n") {
				t.Errorf("ADD: %.600v", err)
			}
			before := 0
			f.set(func() { before = f.calls["addSource"] })
			f.set(func() {
				if f.silent != nil {
					close(f.silent)
				}
				f.silent = nil
				clear(f.refuse)
			})
			if before > 20 {
				t.Errorf("it was asked %d times", before)
			}
			until(t, "it is attended to", d.Attended)
			if err := d.Ask(t.Context(), a.hash, a.text); err != nil || !f.has("pods", both...)() {
				t.Errorf("once it behaves: %v; log: %.2000s", err, log)
			}
			f.set(func() { f.refuse["removeSource"] = broken })
			if err := a.dir.Others().Remove("net", a.hash); err != nil {
				t.Fatal(err)
			}
			until(t, "it is asked", func() bool { f.mu.Lock(); defer f.mu.Unlock(); return f.calls["removeSource"] > 0 })
			f.set(func() { clear(f.refuse) })
			if err := d.Leave(t.Context(), a.hash, ""); err != nil || !f.has("pods")() {
				t.Errorf("it has %v, %v", f.zones, err)
			}
		})
	}
}
