//go:build !lockorder

package lockorder

// Held is a lock that is held, or waited for. It is not checked.
type Held struct{}

// Wait is called before a lock is waited for.
func Wait(Rank) *Held { return nil }

// Tried is called with a lock that was to be had without a wait.
func Tried(Rank) *Held { return nil }

// WaitAgain is called before a lock is waited for anew, in another mode.
func (*Held) WaitAgain() {}

// Release is called when the lock is given up, by any goroutine.
func (*Held) Release() {}

// Slow is called before something is waited for that may take long.
func Slow(string) {}
