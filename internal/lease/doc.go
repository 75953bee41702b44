// Package lease keeps the records of DHCP leases, and is all that the plugin and the
// keeper have in common: the directory is the protocol between them. ADD gets a lease
// and writes its record, the keeper sees it and renews, DEL releases the lease and
// removes the record. Either may start first, die, or be of another version.
//
//	<hash>.json  one lease; <hash> is Record.Hash
//	<hash>.lock  its lock: never replaced, and removed only under the lock
//	keeper.lock  held by the keeper while it runs, with its heartbeat
//	.tmp-<hash>  a record being written, or left by a crash
//
// It belongs on a disk that survives a boot (DefaultDir), so that a lease can be
// released, or asked for again, when its pod is gone. A record is fsynced before it takes the place
// of the one before, and so is the directory after.
//
// A process that writes or removes a record holds its lock (Dir.Lock, Dir.TryLock), and Held.Replace
// writes only over the very record that was read: a renewal never revives a lease that a
// DEL has removed meanwhile. Reading needs no lock. An ADD holds the lock from before
// its record says Adding until it says Bound; so a record that says Adding while its lock
// is free was left by a process that died.
package lease
