// Package lease keeps the records of DHCP leases, and is all that the plugin and the
// keeper have in common: the directory is the protocol between them. ADD gets a lease
// and writes its record, the keeper sees it and renews, DEL releases the lease and
// removes the record. Either may start first, die, or be of another version.
//
// # The directory
//
//	<hash>.json          one lease; <hash> is Record.Hash
//	<hash>.lock          its lock: never replaced, and removed only under the lock
//	.tmp-<hash>          a record being written, or left by a crash
//	keeper.lock          held by the keeper while it runs, with its heartbeat
//
// It belongs on a disk that survives a boot (DefaultDir), so that a lease can be
// released, or asked for again, when its pod is gone. A record is written to another
// file, fsynced and renamed, and the directory is fsynced: after a power cut there is the
// old one or the new.
//
// # Order of use
//
// A process that writes or removes a record holds its lock (Dir.Lock, Dir.TryLock), and Held.Replace
// writes only over the very record that was read: a renewal never revives a lease that a
// DEL has removed meanwhile. Reading needs no lock. An ADD holds the lock from before
// its record says Adding until it says Bound; so a record that says Adding while its lock
// is free was left by a process that died.
//
// # The host's own lease
//
// The DHCP client of a NIC that becomes a port of a bridge receives nothing. Adopt writes a
// record of the lease that it had, with Record.Host set, and HandBack removes it; the
// keeper renews the lease in between, on the bridge. Such a record is of format version
// 2: an older keeper would take it for that of a pod which is gone, and leaves alone what
// it cannot read. HostTrouble tells operators what is wrong with it.
//
// # Needs
//
// No capability beyond write access to the directory, and a local file system, for
// flock(2) and open file description locks (Linux 3.15). Directory 0700, files 0600.
package lease
