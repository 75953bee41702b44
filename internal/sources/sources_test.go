package sources

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/internal/state"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// attachment is one on record, and the directory.
func attachment(t *testing.T) (*Dir, *state.Attachment, string) {
	t.Helper()
	d, err := state.Open(t.TempDir() + "/state")
	if err != nil {
		t.Fatal(err)
	}
	a := &state.Attachment{State: state.Ready, Network: "net", ContainerID: "c1", IfName: "eth0", Other: true}
	pending, err := d.Others().Create(a)
	if err != nil {
		t.Fatal(err)
	}
	if err := pending.Close(); err != nil {
		t.Fatal(err)
	}
	return Of(d), a, Text("net", "trusted", addresses)
}

var addresses = []netip.Addr{netip.MustParseAddr("10.5.0.2"), netip.MustParseAddr("fd05::2")}

var longAgo = time.Now().Add(-time.Hour)

// attend attends to zones as tombolod does, until the test ends.
func attend(t *testing.T, d *Dir, look func()) {
	t.Helper()
	lock, err := d.state.AttendZones()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for seen := int64(-1); ctx.Err() == nil; time.Sleep(time.Millisecond) {
			if now := d.Changed(nil); now != seen {
				seen = now
				look()
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-ended; lock.Close() })
}

func one(t *testing.T, d *Dir) *Entry {
	t.Helper()
	list, err := d.List()
	if err != nil || len(list) != 1 {
		t.Fatalf("%d entries, %v", len(list), err)
	}
	return list[0]
}

func TestAnAnswerIsToOneRequest(t *testing.T) {
	t.Parallel()
	d, a, text := attachment(t)
	hash := a.Hash()
	if err := d.Ask(t.Context(), hash, text); !errors.Is(err, ErrUnattended) {
		t.Errorf("with nobody there: %v", err)
	}
	e := one(t, d)
	if !slices.Equal(e.Wants.Addresses, addresses) || !e.Wants.In("trusted", addresses[1]) || e.Wants.In("drop", addresses[1]) || e.Has != nil {
		t.Errorf("asked for %+v, %+v", e.Wants, e.Has)
	}
	if err := d.Finish(e, "it cannot be"); err != nil {
		t.Fatal(err)
	}
	if e := one(t, d); !e.Refused("it cannot be") || e.IsDone() {
		t.Errorf("answered %+v", e.Has)
	}
	if is, why, err := d.Has(hash, text); is || why != "refused: it cannot be" || err != nil {
		t.Errorf("has: %t, %q, %v", is, why, err)
	}
	outcome := ""
	attend(t, d, func() {
		for _, e := range must(d.List()) {
			if e.Wants != nil && !e.IsDone() && !e.Refused(outcome) {
				must(0, d.Begin(e))
				must(0, d.Finish(e, outcome))
			}
			if e.Wants == nil {
				must(0, d.Forget(e))
			}
		}
	})
	// What was answered before is to another request, of the same words.
	if err := d.Ask(t.Context(), hash, text); err != nil {
		t.Error(err)
	}
	if is, _, err := d.Has(hash, text); !is || err != nil {
		t.Errorf("has: %t, %v", is, err)
	}
	if is, _, _ := d.Has(hash, Text("net", "drop", addresses)); is {
		t.Error("it has another zone")
	}
	for range 2 {
		if err := d.Leave(t.Context(), hash, ""); err != nil {
			t.Error(err)
		}
	}
	if left, _ := file.ReadDir(d.path); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	// Of what never asked, the addresses of the text leave.
	if err := d.Leave(t.Context(), hash, text); err != nil {
		t.Error(err)
	}
	if left, _ := file.ReadDir(d.path); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestARefusalEndsTheWait(t *testing.T) {
	t.Parallel()
	d, a, text := attachment(t)
	attend(t, d, func() {
		for _, e := range must(d.List()) {
			if e.Wants != nil && !e.Refused("INVALID_ZONE") {
				must(0, d.Finish(e, "INVALID_ZONE"))
			}
		}
	})
	if err := d.Ask(t.Context(), a.Hash(), text); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), ": INVALID_ZONE") {
		t.Errorf("refused: %v", err)
	}
}

func TestARequestWithoutARecordIsNone(t *testing.T) {
	t.Parallel()
	d, a, text := attachment(t)
	if err := d.Ask(t.Context(), a.Hash(), text); !errors.Is(err, ErrUnattended) {
		t.Fatal(err)
	}
	e := one(t, d)
	before := d.Changed([]*Entry{e})
	if err := d.Begin(e); err != nil {
		t.Fatal(err)
	}
	if err := d.state.Others().Remove(a.Network, a.Hash()); err != nil {
		t.Fatal(err)
	}
	if d.Changed([]*Entry{e}) == before {
		t.Error("nothing has changed")
	}
	e = one(t, d)
	if e.Wants != nil || e.Has == nil || e.Has.Done {
		t.Errorf("it is %+v", e)
	}
	if err := d.Forget(e); err != nil {
		t.Fatal(err)
	}
	// A request of just now may be that of an ADD of the same name.
	if _, err := os.Stat(d.path + "/" + a.Hash()); err != nil {
		t.Error(err)
	}
	for _, name := range []string{a.Hash(), ".left"} {
		if err := os.WriteFile(d.path+"/"+name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(d.path+"/"+name, longAgo, longAgo); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Forget(one(t, d)); err != nil {
		t.Fatal(err)
	}
	if left, _ := file.ReadDir(d.path); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestZonesOfWhichNamesThereMayBe(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]bool{"trusted": true, "nm-shared": true, "libvirt_1/x": true, "": false, "a b": false, "a\n": false, "ä": false, strings.Repeat("x", 65): false} {
		if IsZone(name) != want {
			t.Errorf("%q: %t", name, !want)
		}
	}
}

// FuzzDecodeAnswer holds the decoder of both files to what it says: an error is ErrDamaged, and
// what is read names addresses and a zone.
func FuzzDecodeAnswer(f *testing.F) {
	f.Add("done\nnet trusted\n10.5.0.2\nfd05::2\nx9\n")
	f.Fuzz(func(t *testing.T, text string) {
		a, err := decodeAnswer(text)
		if err != nil {
			if !errors.Is(err, file.ErrDamaged) {
				t.Errorf("%q: %v", text, err)
			}
			return
		}
		outcome, _, _ := strings.Cut(text, "\n")
		again, err := decodeAnswer(outcome + "\n" + Text(a.Network, a.Zone, a.Addresses))
		if err != nil || !IsZone(a.Zone) {
			t.Fatalf("%q, %v", a.Zone, err)
		}
		again.text = a.text
		if !reflect.DeepEqual(a, again) {
			t.Errorf("%+v comes back as %+v", a, again)
		}
	})
}
