package nstest

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// OnOneCPU runs fn on a thread that is kept on one processor. What it sends over a veth
// pair is worked on in the order in which it was sent: each processor has a queue of its
// own for that.
func OnOneCPU(fn func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return err
	}
	for cpu := 0; one.Count() == 0; cpu++ {
		if before.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return err
	}
	defer unix.SchedSetaffinity(0, &before)
	return fn()
}
