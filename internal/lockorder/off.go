//go:build !lockorder

package lockorder

// Held is a lock that is held or waited for. Without the tag it is not checked.
type Held struct{}

// Wait is called before a wait for a lock.
func Wait(Rank) *Held { return nil }

// Tried is called after a lock was taken without a wait.
func Tried(Rank) *Held { return nil }

// WaitAgain is called before another wait for the same lock, in another mode.
func (*Held) WaitAgain() {}

// Release is called when the lock is released, by any goroutine.
func (*Held) Release() {}

// Slow is called before a wait that may take long.
func Slow(string) {}
