//go:build lockorder

package lockorder

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
)

// String returns the name of the kind of lock.
func (r Rank) String() string {
	return [...]string{Attachment: "attachment", Lease: "lease", Remembered: "remembered lease", State: "state",
		Reservations: "reservations"}[r]
}

// table lists the locks that each goroutine holds or waits for. The check works because a call of the plugin runs on
// one goroutine.
var table struct {
	sync.Mutex
	held map[string][]*Acquisition
}

// Acquisition is a lock that the caller holds or waits for. The methods of a nil Acquisition do nothing.
type Acquisition struct {
	rank Rank
	who  string
}

// Wait registers a lock, and panics if the caller must not wait for it. Call it before the wait.
func Wait(r Rank) *Acquisition { return enter(r, true) }

// Tried registers a lock that was taken without a wait.
func Tried(r Rank) *Acquisition { return enter(r, false) }

func enter(r Rank, waits bool) *Acquisition {
	if os.Getenv(Off) != "" {
		return nil
	}

	h := &Acquisition{rank: r, who: goroutine()}
	table.Lock()
	defer table.Unlock()
	if waits {
		check(h, r)
	}

	if table.held == nil {
		table.held = map[string][]*Acquisition{}
	}

	table.held[h.who] = append(table.held[h.who], h)
	return h
}

// WaitAgain panics if the caller must not wait for the lock h again, in another mode. Call it before the wait.
func (h *Acquisition) WaitAgain() {
	if h == nil {
		return
	}
	table.Lock()
	defer table.Unlock()
	check(h, h.rank)
}

// Release unregisters the lock. Call it when the lock is released, on any goroutine.
func (h *Acquisition) Release() {
	if h == nil {
		return
	}
	table.Lock()
	defer table.Unlock()
	if table.held[h.who] = slices.DeleteFunc(table.held[h.who],
		func(other *Acquisition) bool { return other == h }); len(table.held[h.who]) == 0 {
		delete(table.held, h.who)
	}
}

// Slow panics if the caller holds a lock of rank State or higher. Call it before a wait that may take long. what
// describes the wait.
func Slow(what string) {
	table.Lock()
	defer table.Unlock()
	for _, other := range table.held[goroutine()] {
		if other.rank >= State {
			panic(fmt.Sprintf("lock order: waits for %s with the lock of %s held", what, other.rank))
		}
	}
}

func check(h *Acquisition, r Rank) {
	for _, other := range table.held[h.who] {
		if other != h && other.rank >= r {
			panic(fmt.Sprintf("lock order: waits for the lock of %s with that of %s held", r, other.rank))
		}
	}
}

// goroutine returns the number of the calling goroutine. Go shows this number only in stack traces.
func goroutine() string {
	buf := make([]byte, 64)
	fields := bytes.Fields(buf[:runtime.Stack(buf, false)])
	return string(fields[1])
}
