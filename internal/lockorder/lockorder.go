// Package lockorder detects calls that wait for locks in the wrong order. Two processes that wait for each other's
// lock would stop a node, and tests rarely cause this by chance.
//
// Each kind of lock has a rank. A caller must not wait for a lock while it holds one of the same or a higher rank.
// While it holds a lock of rank State or higher, it must not wait for anything slow, such as a server, another program
// or a disk. If a caller breaks a rule, the package panics. A lock that is taken without waiting (by a try) may come in
// any order.
//
// The package checks this only in programs built with the tag lockorder, as `make test` builds them. In other
// programs its functions do nothing.
package lockorder

// Off is the name of an environment variable that switches the checks off. It is for the locks' own unit tests, which
// hold several locks in one goroutine.
const Off = "TOMBOLO_LOCK_ORDER_OFF"

// Rank is the position of a kind of lock in the order. A caller that needs several locks takes the lock with the lowest
// rank first.
type Rank int

const (
	// Attachment is the lock of an attachment's record.
	Attachment Rank = iota + 1
	// Lease is the lock of a lease's record.
	Lease
	// Remembered is the lock of a lease's record in the state Sticky. Such a record is for a pod's next container,
	// which will request the same lease.
	Remembered
	// State is the lock of a state directory. A holder of this lock, or of a lock with a higher rank, must not wait for
	// anything slow.
	State
	// Reservations is the lock of a directory of host-local's reservations.
	Reservations
)
