//go:build lockorder

package lockorder

import (
	"fmt"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

func panics(fn func()) (said string) {
	defer func() {
		if r := recover(); r != nil {
			said = fmt.Sprint(r)
		}
	}()
	fn()
	return ""
}

func TestOrder(t *testing.T) {
	for _, tt := range []struct {
		name   string
		held   Rank
		do     func() *Acquisition
		panics string
	}{
		{"outer to inner", Lease, func() *Acquisition { return Wait(State) }, ""},
		{"the next rank", Attachment, func() *Acquisition { return Wait(Lease) }, ""},
		{"inner to outer", State, func() *Acquisition { return Wait(Lease) }, "waits for the lock of lease with that of state held"},
		{"two of a kind", Lease, func() *Acquisition { return Wait(Lease) }, "waits for the lock of lease with that of lease held"},
		{"tried for only", State, func() *Acquisition { return Tried(Lease) }, ""},
		{"slow with the state's", State, func() *Acquisition { Slow("a server"); return nil }, "waits for a server with the lock of state held"},
		{"slow with the reservations'", Reservations, func() *Acquisition { Slow("a server"); return nil }, "with the lock of reservations held"},
		{"slow with a lease's", Lease, func() *Acquisition { Slow("a server"); return nil }, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			outer := Wait(tt.held)
			defer outer.Release()
			var inner *Acquisition
			said := panics(func() { inner = tt.do() })
			inner.Release()
			expect.That(t, (said == "") == (tt.panics == "") && strings.Contains(said, tt.panics),
				"panic %q, want %q", said, tt.panics)
		})
	}
	expect.That(t, len(table.held) == 0, "held after all: %v", table.held)
}

func TestWhatIsTakenAgainMindsTheOthersAlone(t *testing.T) {
	state := Wait(State)
	defer state.Release()
	expect.Equal(t, panics(state.WaitAgain), "")
	reservations := Wait(Reservations)
	defer reservations.Release()
	expect.Contains(t, panics(state.WaitAgain), "reservations held", "panic")
}

func TestOthersLocksAreTheirs(t *testing.T) {
	state := Wait(State)
	done := make(chan string)
	go func() { done <- panics(func() { Wait(Lease).Release() }) }()
	expect.Equal(t, <-done, "")
	// Given up by another than took it.
	go func() { state.Release(); done <- "" }()
	<-done
	expect.Equal(t, panics(func() { Wait(Lease).Release() }), "")
}
