// Package lease stores the records of DHCP leases. The plugin and the keeper, tombolod, communicate about leases by
// these records. ADD gets a lease and writes its record, and the keeper sees the record and renews the lease. DEL
// releases the lease and removes the record, unless the client is sticky (see Client.Sticky). Plugin and keeper may
// start in any order, die at any time, and differ in version.
//
//	<hash>.json  one lease; <hash> is Record.Hash
//	<hash>.lock  the record's lock: never replaced, and removed only under the lock
//	keeper.lock  held by the keeper while it runs, with its heartbeat
//	.tmp-<hash>  a record being written, or left by a crash
//
// The directory belongs on a disk that survives a boot (DefaultDir). So a lease can be released, or requested again,
// after a boot. A new record is fsynced before it replaces the old one, and the directory is fsynced afterwards. Only
// a record in the state Adding is not fsynced.
//
// A process that writes or removes a record holds its lock (Store.Lock). LockedRecord.Replace writes only over the very
// record that was read, so a renewal never revives a lease that a DEL has removed. Reading needs no lock. An ADD takes
// the lock before it writes the state Adding, and holds it until it has written Bound. So if the state is Adding and
// the lock is free, the ADD has died.
package lease
