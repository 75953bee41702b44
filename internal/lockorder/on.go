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

// String returns the name of the lock.
func (r Rank) String() string {
	return [...]string{Attachment: "attachment", Lease: "lease", Remembered: "remembered lease", State: "state",
		Reservations: "reservations", Uplink: "uplink"}[r]
}

// table lists the locks that each goroutine holds. A call runs on one goroutine.
var table struct {
	sync.Mutex
	held map[string][]*Held
}

// Held is a lock that is held or waited for. Nil is no lock.
type Held struct {
	rank Rank
	who  string
}

// Wait is called before a wait for a lock.
func Wait(r Rank) *Held { return enter(r, true) }

// Tried is called after a lock was taken without a wait.
func Tried(r Rank) *Held { return enter(r, false) }

func enter(r Rank, waits bool) *Held {
	if os.Getenv(Off) != "" {
		return nil
	}

	h := &Held{rank: r, who: goroutine()}
	table.Lock()
	defer table.Unlock()
	if waits {
		check(h, r)
	}

	if table.held == nil {
		table.held = map[string][]*Held{}
	}

	table.held[h.who] = append(table.held[h.who], h)
	return h
}

// WaitAgain is called before another wait for the same lock, in another mode.
func (h *Held) WaitAgain() {
	if h == nil {
		return
	}
	table.Lock()
	defer table.Unlock()
	check(h, h.rank)
}

// Release is called when the lock is released, by any goroutine.
func (h *Held) Release() {
	if h == nil {
		return
	}
	table.Lock()
	defer table.Unlock()
	if table.held[h.who] = slices.DeleteFunc(table.held[h.who],
		func(other *Held) bool { return other == h }); len(table.held[h.who]) == 0 {
		delete(table.held, h.who)
	}
}

// Slow is called before a wait that may take long.
func Slow(what string) {
	table.Lock()
	defer table.Unlock()
	for _, other := range table.held[goroutine()] {
		if other.rank >= State {
			panic(fmt.Sprintf("lock order: waits for %s with the lock of %s held", what, other.rank))
		}
	}
}

func check(h *Held, r Rank) {
	for _, other := range table.held[h.who] {
		if other != h && other.rank >= r {
			panic(fmt.Sprintf("lock order: waits for the lock of %s with that of %s held", r, other.rank))
		}
	}
}

// goroutine returns the number of the calling goroutine, which only its stack trace shows.
func goroutine() string {
	buf := make([]byte, 64)
	fields := bytes.Fields(buf[:runtime.Stack(buf, false)])
	return string(fields[1])
}
