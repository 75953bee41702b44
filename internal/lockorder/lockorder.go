// Package lockorder finds calls that do not wait for locks in their order: two processes that wait for each other's lock
// stop a node, and seldom in a test.
//
// Each kind of lock has a rank. To wait for one while holding another of the same rank or of a higher one is a
// panic, and so is to wait for something slow (a server, another program, a disk) with a lock held that others
// need. A lock that is only tried for may be taken in any order: it is not waited for.
//
// Only programs that are built with the tag lockorder look. "make test" builds them so; in others the calls do nothing.
package lockorder

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
