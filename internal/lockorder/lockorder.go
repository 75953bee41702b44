// Package lockorder has tests find out where locks are not waited for in their order:
// two processes that wait for each other's lock stop a node, and seldom in a test.
//
// Each kind of lock has a rank. To wait for one while holding another of the same rank or of a higher one is a
// panic, and so is to wait for something slow (a server, another program, a disk) with a lock held that others
// need. A lock that is only tried for may be taken in any order: it is not waited for.
//
// It panics only where the environment has Variable, which tests set.
package lockorder

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
)

// Variable is set in the environment of tests, to anything.
const Variable = "TOMBOLO_TEST_LOCK_ORDER"

// A Rank is the place of a kind of lock in the order, outer to inner.
type Rank int

const (
	// Attachment is the lock of an attachment's record.
	Attachment Rank = iota + 1
	// Lease is the lock of a lease's record.
	Lease
	// Remembered is that of the lease that a pod's next container is to have.
	Remembered
	// State is the lock of a state directory. From here on, nothing slow is waited for.
	State
	// Reservations is the lock of a directory of host-local.
	Reservations
	// Uplink is the lock of a NIC.
	Uplink
)

// String names the lock.
func (r Rank) String() string {
	return [...]string{Attachment: "attachment", Lease: "lease", Remembered: "remembered lease", State: "state", Reservations: "reservations", Uplink: "uplink"}[r]
}

// table is which goroutine holds what, since a call is one goroutine. It is filled in tests alone.
var table struct {
	sync.Mutex
	held map[string][]*Held
}

// Held is a lock that is held, or waited for. Nil is one that is not checked.
type Held struct {
	rank Rank
	who  string
}

// Wait is called before a lock is waited for.
func Wait(r Rank) *Held { return enter(r, true) }

// Tried is called with a lock that was to be had without a wait.
func Tried(r Rank) *Held { return enter(r, false) }

func enter(r Rank, waits bool) *Held {
	if os.Getenv(Variable) == "" {
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

// WaitAgain is called before a lock is waited for anew, in another mode.
func (h *Held) WaitAgain() {
	if h == nil {
		return
	}
	table.Lock()
	defer table.Unlock()
	check(h, h.rank)
}

// Release is called when the lock is given up, by whichever goroutine.
func (h *Held) Release() {
	if h == nil {
		return
	}
	table.Lock()
	defer table.Unlock()
	if table.held[h.who] = slices.DeleteFunc(table.held[h.who], func(other *Held) bool { return other == h }); len(table.held[h.who]) == 0 {
		delete(table.held, h.who)
	}
}

// Slow is called before something is waited for that may take long.
func Slow(what string) {
	if os.Getenv(Variable) == "" {
		return
	}
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

// goroutine gives the number of the calling goroutine, which nothing but its trace tells.
func goroutine() string {
	buf := make([]byte, 64)
	fields := bytes.Fields(buf[:runtime.Stack(buf, false)])
	return string(fields[1])
}
