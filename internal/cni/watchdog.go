package cni

import (
	"sync/atomic"
	"time"

	"github.com/tombolo-cni/tombolo/network"
)

// lastGrace is the time that a call has to print its result or error, after its deadline and network.UndoTimeout have
// passed. abort allows as much time to count the failure.
const lastGrace = time.Second

// watchdog calls Plugin.Exit if a call continues after its deadline and the time for its undo. It is needed because a
// context cannot end a read of stdin, or a system call on a file system that does not answer. DEL later removes the
// remains of such a call, as after a kill.
type watchdog struct {
	timer   *time.Timer
	conf    atomic.Pointer[Common] // the configuration, once it is read
	claimed atomic.Bool            // the call, or the watchdog, has begun to print the result or error
}

// startWatchdog starts the call's watchdog. The default deadline applies until the configuration is read.
func (c *call) startWatchdog() {
	w := &watchdog{}
	w.conf.Store(&Common{})
	w.timer = time.AfterFunc(defaultDeadline+network.UndoTimeout+lastGrace, func() { c.abort(w) })
	c.watchdog = w
}

// abort prints an error, counts the failure, and calls Plugin.Exit. If the call has begun to print, abort only calls
// Exit: the call's reader has the output already, or there is no reader.
func (c *call) abort(w *watchdog) {
	if conf := w.conf.Load(); w.claimed.CompareAndSwap(false, true) {
		c.printError(conf.CNIVersion, newError(codeTryAgainLater,
			"%s hung past its deadline and the %s to undo it: stdin does not end, or a file system, a disk or a "+
				"device does not answer. DEL takes down what it has made", c.verb, network.UndoTimeout))
		go c.countFailure(conf.stateDir(), codeTryAgainLater)
		time.Sleep(lastGrace) // do not wait longer: the disk with the counter may hang
	}
	c.Exit(1)
}

// restart starts the watchdog's timer anew, with the deadline in the configuration instead of the default.
func (w *watchdog) restart(conf *Common) {
	w.conf.Store(conf)
	w.timer.Reset(conf.deadline() + network.UndoTimeout + lastGrace)
}

// claim prevents the watchdog from printing. The call must call claim before it prints its result or error. If the
// watchdog is already printing, it is about to call Plugin.Exit, and claim does not return.
func (w *watchdog) claim() {
	if !w.claimed.CompareAndSwap(false, true) {
		select {}
	}
}
