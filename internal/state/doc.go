// Package state reads and writes Tombolo's records on a node: the attachments of pods, the networks that were built,
// and the node's epoch. An epoch is one boot of the node (see [Epoch]). Records are the intended state, and the kernel
// has the actual one.
//
//	epoch                              the epoch that the records belong to
//	networks/<network>.json            one network
//	attachments/<network>/<hash>.json  one attachment; <hash> is [ident.Hash]
//	uplinks/<nic>.json                 one NIC whose takeover has begun or is complete
//	lock                               the lock of the directory (see [Lock]), never replaced
//	failures/<verb>.<code>             calls that failed, one byte for each
//	contested.json                     the firewall repairs that another program undoes again and again
//	firewalld                          the links in firewalld's zones, with a file firewalld.lock
//	.tmp-*                             files being written, or left by a crash
//
// The first lock or record creates the directory. Directories have mode 0700 and files 0600. The file system must be
// local and support O_TMPFILE (tmpfs, ext4, xfs, btrfs, overlay). NFS is unsuitable, since there flock(2) and fcntl(2)
// locks conflict with each other. The directory belongs in /run. Nothing in it is fsynced, since no pod survives a
// power cut. If the directory survives a reboot, [Dir.Enter] drops the outdated records of attachments and networks.
//
// The records are JSON with a version number. An attachment's file has one document a line, and the last whole line
// counts. So after a crash in the middle of a write, the previous line still counts. The size of each record is
// limited. An error about a damaged record matches [ErrDamaged].
//
// A verb of CNI calls [Dir.Enter], and holds the shared lock that Enter returns as long as it works on the kernel.
// Work that only one process may do, such as building a network, goes through [Lock.Ensure] or [Lock.Upgrade].
package state
