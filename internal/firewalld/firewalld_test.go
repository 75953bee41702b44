package firewalld

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// While firewalld restarts, the bus answers in its place: that is no refusal of firewalld's.
func TestTheBusDoesNotAnswerForFirewalld(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]bool{
		busName + ".Error.NoReply": false, busName + ".Error.ServiceUnknown": false, busName + ".Error.NameHasNoOwner": false,
		busName + ".Error.AccessDenied": true, "org.fedoraproject.FirewallD1.Exception": true,
	} {
		expect.Equal(t, isAnswer(fmt.Errorf("call: %w", dbus.Error{Name: name})), want, "%s: answered", name)
	}
}

func TestWhatAnOperatorChoseIsLeftAlone(t *testing.T) {
	t.Parallel()
	type facts struct {
		running, permanent string
		ours, wanted, sure bool
	}
	for name, tt := range map[string]struct {
		facts
		want act
	}{
		"in no zone": {facts{"", "", false, true, true}, join},
		"where a network manager puts what it knows not":   {facts{"public", "", false, true, true}, move},
		"in the default zone, and to stay there":           {facts{"public", "public", false, true, true}, leaveAlone},
		"in another zone":                                  {facts{"drop", "", false, true, true}, leaveAlone},
		"in another zone since":                            {facts{"drop", "", true, true, true}, leaveAlone},
		"to be in another zone after a reload":             {facts{"", "drop", false, true, true}, leaveAlone},
		"by our doing":                                     {facts{"trusted", "", true, true, true}, stay},
		"by our doing, and permanently elsewhere":          {facts{"trusted", "drop", true, true, true}, yield},
		"by our doing, then by the operator's as well":     {facts{"trusted", "trusted", true, true, true}, forget},
		"by the operator's doing":                          {facts{"trusted", "", false, true, true}, forget},
		"by our doing, and its network is gone":            {facts{"trusted", "", true, false, true}, leave},
		"by our doing, and its network may be gone":        {facts{"trusted", "", true, false, false}, stay},
		"its network is gone, and the operator wants it":   {facts{"trusted", "trusted", true, false, true}, forget},
		"its network is gone, and it is in another zone":   {facts{"drop", "", true, false, true}, forget},
		"its network is gone, and firewalld began anew":    {facts{"", "", true, false, true}, forget},
		"firewalld began anew":                             {facts{"", "", true, true, true}, join},
		"firewalld began anew, and some record is damaged": {facts{"", "", true, true, false}, join},
	} {
		expect.Equal(t, decide(zones{tt.running, tt.permanent, "public"}, tt.ours, tt.wanted, tt.sure), tt.want, "%s", name)
	}
}

func TestAddressesOfBuses(t *testing.T) {
	t.Parallel()
	expect.Says(t, expect.Err(dialSocket(t.Context(), "tcp:host=127.0.0.1,port=1", time.Second)), SystemBus, "another transport")
	expect.Is(t, expect.Err(dialSocket(t.Context(), "unix:path=/nowhere,guid=12", time.Second)), ErrNoBus, "nobody listens")
}

// Godbus panics at the first of these.
func TestMessagesThatNobodyHasBusinessToSendAreIgnored(t *testing.T) {
	t.Parallel()
	message := func(kind dbus.Type, member string, body ...any) *dbus.Message {
		return &dbus.Message{Type: kind, Body: body, Headers: map[dbus.HeaderField]dbus.Variant{dbus.FieldMember: dbus.MakeVariant(member)}}
	}
	for name, m := range map[string]*dbus.Message{
		"a lost name that is none":        message(dbus.TypeSignal, "NameLost"),
		"an acquired name that is none":   message(dbus.TypeSignal, "NameAcquired", uint32(7)),
		"a call":                          message(dbus.TypeMethodCall, "Introspect"),
		"a call that looks like a signal": message(dbus.TypeMethodCall, "Reloaded", "x"),
	} {
		if ignoreCalls(m); m.Type != 0 {
			t.Errorf("%s is not ignored", name)
		}
	}
	for _, m := range []*dbus.Message{message(dbus.TypeSignal, "NameLost", ":1.7"), message(dbus.TypeSignal, "Reloaded"), message(dbus.TypeMethodReply, "")} {
		if ignoreCalls(m); m.Type == 0 {
			t.Errorf("%v is ignored", m)
		}
	}
}

// zonesOn returns a Zones at a bus.
func zonesOn(t *testing.T, ctx context.Context, dir *state.Dir, address string) *Zones {
	t.Helper()
	return New(ctx, &Config{State: dir, Address: address, Tell: func(context.Context) error { return nil }, Log: slog.New(slog.DiscardHandler)})
}

// hold looks at a bus again and again until the test ends, or it is stopped, which returns the faults.
func hold(t *testing.T, address string) (stop func() (faults []error)) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	z := zonesOn(t, ctx, must.Of(state.Open(t.TempDir())).Get(t), address)
	z.timeout = 50 * time.Millisecond
	ended := make(chan []error, 1)
	go func() {
		var faults []error
		for ctx.Err() == nil {
			if err := z.Look(ctx); !errors.Is(err, ErrNoBus) && ctx.Err() == nil {
				faults = append(faults, err)
			}
		}
		z.Close()
		ended <- faults
	}()
	t.Cleanup(cancel)
	return func() []error { cancel(); return <-ended }
}

func listen(t *testing.T) (address string, _ net.Listener) {
	t.Helper()
	dir, err := os.MkdirTemp("", "b") // short: a socket's address has room for 107 bytes
	must.Succeed(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	l := must.Of(net.Listen("unix", filepath.Join(dir, "bus"))).Get(t)
	t.Cleanup(func() { l.Close() })
	return "unix:path=" + l.Addr().String(), l
}

// speech is what a bus says: at once, and when the connection is authenticated.
type speech struct{ first, then string }

func (s speech) to(c net.Conn, t *testing.T) bool {
	t.Helper()
	if _, err := c.Write([]byte(s.first)); err != nil {
		t.Log(err)
	}
	for r := bufio.NewReader(c); s.then != ""; {
		line, err := r.ReadString('\n')
		if err != nil {
			return false
		}
		if line == "BEGIN\r\n" {
			break
		}
	}
	_, err := c.Write([]byte(s.then))
	return err == nil || s.then == ""
}

// Each of these is a bus that a connection is begun with, given up, and begun with again.
func TestABusThatMisbehavesIsGivenUpAndTriedAgain(t *testing.T) {
	t.Parallel()
	const letsIn = "REJECTED EXTERNAL\r\nOK 0123456789abcdef0123456789abcdef\r\n"
	for name, says := range map[string]speech{
		"it says nothing":             {},
		"it closes":                   {first: "close"},
		"it knows no mechanism":       {first: "REJECTED\r\n"},
		"it says nonsense":            {first: strings.Repeat("\x00\xff", 5000) + "\r\n"},
		"it ends lines too early":     {first: "\r\n\r\n\r\n"},
		"it lets in, and is silent":   {first: letsIn},
		"it lets in, and is nonsense": {letsIn, strings.Repeat("l\x02\x00\x01\xff\xff\xff\xff", 500)},
		"it announces no name":        {letsIn, noName(t)},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			address, l := listen(t)
			stop := hold(t, address)
			for said := 0; said < 3; {
				c := must.Of(l.Accept()).Get(t)
				defer c.Close()
				if says.first == "close" {
					c.Close()
				} else if !says.to(c, t) {
					continue // it was given up before
				}
				said++
			}
			expect.That(t, len(stop()) > 0, "nothing is told")
		})
	}
}

// noName is a signal NameLost from the bus that does not say which.
func noName(t *testing.T) string {
	t.Helper()
	var b bytes.Buffer
	m := &dbus.Message{Type: dbus.TypeSignal, Headers: map[dbus.HeaderField]dbus.Variant{
		dbus.FieldPath: dbus.MakeVariant(busPath), dbus.FieldInterface: dbus.MakeVariant(busName),
		dbus.FieldMember: dbus.MakeVariant("NameLost"), dbus.FieldSender: dbus.MakeVariant(busName),
	}}
	must.Succeed(t, m.EncodeTo(&b, binary.LittleEndian))
	return b.String()
}

func TestWithoutABusNothingIsTold(t *testing.T) {
	t.Parallel()
	stop := hold(t, "unix:path="+t.TempDir()+"/none")
	time.Sleep(20 * time.Millisecond) // for some attempts; too few would pass as well
	expect.Equal(t, len(stop()), 0, "faults")
}
