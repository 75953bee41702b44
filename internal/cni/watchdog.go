package cni

import (
	"sync"
	"time"

	"github.com/tombolo-cni/tombolo/network"
)

// lastGrace is left to a call that has used up its deadline and the time to undo, and is
// about to say so.
const lastGrace = time.Second

// watchdog ends the process where a call goes on past its deadline and the time to undo it.
// Contexts end what the call waits for by itself; a file system that does not answer, it
// has no other way to leave. What such a call leaves is found by DEL, as what one leaves
// that was killed.
type watchdog struct {
	exit  func(int)
	timer *time.Timer

	mu         sync.Mutex
	cniVersion string // to say it in
	stateDir   string // to count it in
	ended      bool   // somebody has begun to say how the call ended
	spoken     bool   // and it is the call itself
}

// watch starts the call's watchdog, for as long as its configuration has not said what its
// deadline is. Without a way to end the process there is none.
func (c *call) watch() {
	if c.Exit == nil {
		return
	}
	w := &watchdog{exit: c.Exit}
	c.watchdog = w
	w.timer = time.AfterFunc(defaultDeadline+network.UndoTimeout+lastGrace, func() { c.bite(w) })
}

// bite ends the process. A call that hangs while it says how it ended has been heard, or
// nobody listens.
func (c *call) bite(w *watchdog) {
	w.mu.Lock()
	first, cniVersion, stateDir := !w.ended, w.cniVersion, w.stateDir
	w.ended = true
	w.mu.Unlock()
	if first {
		c.printError(cniVersion, newError(codeTryAgainLater, "%s hung past its deadline and the %s to undo it: a file system, a disk or a device that it needs does not answer. What it has made is left for DEL", c.verb, network.UndoTimeout))
		counted := make(chan struct{})
		go func() { c.countFailure(stateDir, codeTryAgainLater); close(counted) }()
		select {
		case <-counted:
		case <-time.After(lastGrace): // its disk may be what hangs
		}
	}
	w.exit(1)
}

// until gives the call its own deadline, from now on.
func (w *watchdog) until(after time.Duration, cniVersion, stateDir string) {
	if w == nil {
		return
	}
	w.mu.Lock()
	w.cniVersion, w.stateDir = cniVersion, stateDir
	w.mu.Unlock()
	w.timer.Reset(after + network.UndoTimeout + lastGrace)
}

// speak is called before the call says how it ended. Where the watchdog has begun to, the
// process is about to end, and speak does not return.
func (w *watchdog) speak() {
	if w == nil {
		return
	}
	w.mu.Lock()
	bitten := w.ended && !w.spoken
	w.ended, w.spoken = true, true
	w.mu.Unlock()
	if bitten {
		select {}
	}
}

// stop is called when the call has said all.
func (w *watchdog) stop() {
	if w != nil {
		w.timer.Stop()
	}
}
