// Package lockorder detects calls that wait for locks in the wrong order. Two processes that wait for each other's
// lock stop a node, and tests rarely hit that by chance.
//
// Each kind of lock has a rank. Waiting for a lock while holding one of the same or a higher rank is a panic. So is
// waiting for something slow (a server, another program, a disk) while holding a lock that others need. A lock that
// is only tried may be taken in any order, since no caller waits for it.
//
// Only programs built with the tag lockorder check this. "make test" builds them so. In other programs the calls do
// nothing.
package lockorder

// Off is the name of an environment variable that switches the checks off. It is for the unit tests of the locks
// themselves, which hold several of them in one goroutine.
const Off = "TOMBOLO_LOCK_ORDER_OFF"

// A Rank is the place of a kind of lock in the order, from outer to inner.
type Rank int

const (
	// Attachment is the lock of an attachment's record.
	Attachment Rank = iota + 1
	// Lease is the lock of a lease's record.
	Lease
	// Remembered is the lock of the lease that a pod's next container will request.
	Remembered
	// State is the lock of a state directory. A holder of this or a later lock waits for nothing slow.
	State
	// Reservations is the lock of a directory of host-local.
	Reservations
	// Uplink is the lock of a NIC.
	Uplink
)
