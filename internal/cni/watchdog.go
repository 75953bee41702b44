package cni

import (
	"sync/atomic"
	"time"

	"github.com/tombolo-cni/tombolo/network"
)

// lastGrace is left to a call that has used up its deadline and the time to undo, and is about to say so.
const lastGrace = time.Second

// watchdog ends the process where a call goes on past its deadline and the time to undo it. Contexts end its other
// waits, but not one for a file system that does not answer. DEL finds what such a call leaves, as it does after a
// kill.
type watchdog struct {
	timer *time.Timer
	of    atomic.Pointer[Common] // the configuration, once it is read
	said  atomic.Bool            // the call, or the watchdog, has begun to say how the call ended
}

// watch starts the call's watchdog, for as long as its configuration has not said what its
// deadline is.
func (c *call) watch() {
	w := &watchdog{}
	w.of.Store(&Common{})
	w.timer = time.AfterFunc(defaultDeadline+network.UndoTimeout+lastGrace, func() { c.bite(w) })
	c.watchdog = w
}

// bite ends the process. A call that hangs while it prints how it ended has been read, or has no reader.
func (c *call) bite(w *watchdog) {
	if of := w.of.Load(); w.said.CompareAndSwap(false, true) {
		c.printError(of.CNIVersion, newError(codeTryAgainLater, "%s hung past its deadline and the %s to undo it: stdin does not end, or a file system, a disk or a device does not answer. DEL takes down what it has made", c.verb, network.UndoTimeout))
		go c.countFailure(of.stateDir(), codeTryAgainLater)
		time.Sleep(lastGrace) // its disk may be what hangs
	}
	c.Exit(1)
}

// until gives the call its own deadline, from now on.
func (w *watchdog) until(of *Common) {
	w.of.Store(of)
	w.timer.Reset(of.deadline() + network.UndoTimeout + lastGrace)
}

// speak is called before the call says how it ended. Where the watchdog has begun to, the
// process is about to end, and speak does not return.
func (w *watchdog) speak() {
	if !w.said.CompareAndSwap(false, true) {
		select {}
	}
}
