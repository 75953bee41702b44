//go:build !lockorder

package lockorder

// Acquisition is a lock that the caller holds or waits for. Without the build tag it holds no data.
type Acquisition struct{}

// Wait does nothing in this build, and returns nil. With the tag lockorder it registers a lock, and panics if the
// caller must not wait for it. Call it before the wait.
func Wait(Rank) *Acquisition { return nil }

// Tried does nothing in this build, and returns nil. With the tag lockorder it registers a lock that was taken
// without a wait.
func Tried(Rank) *Acquisition { return nil }

// WaitAgain does nothing in this build. With the tag lockorder it checks whether the caller may wait for the lock
// again, in another mode. Call it before the wait.
func (*Acquisition) WaitAgain() {}

// Release does nothing in this build. With the tag lockorder it unregisters the lock. Call it when the lock is
// released, on any goroutine.
func (*Acquisition) Release() {}

// Slow does nothing in this build. With the tag lockorder it panics if the caller holds a lock of rank State or higher.
// Call it before a wait that may take long.
func Slow(string) {}
