// Package state keeps Tombolo's records on a node: which attachments there are, what each network was built from,
// and to which epoch of the node all of them belong. The kernel stays the truth; these files say what was meant.
//
//	epoch                              the epoch that the state belongs to
//	networks/<network>.json            one network
//	attachments/<network>/<hash>.json  one attachment; <hash> is [ident.Hash]
//	uplinks/<nic>.json                 one NIC that was taken over, or is being
//	uplinks/<nic>.lock                 locked by the call that works on that NIC
//	lock                               locked by every call, never replaced
//	failures/<verb>.<code>             calls that failed, a byte for each
//	contested.json                     what another program undoes again and again
//	.tmp-*                             being written, or left by a crash
//
// It is made at first use, directories 0700 and files 0600, on a local file system that has
// O_TMPFILE (tmpfs, ext4, xfs, btrfs, overlay); NFS does not keep flock(2) and fcntl(2) locks
// apart. It belongs in /run: nothing in it is fsynced, since after a power cut no pod is left to
// own it. Where it outlives a boot all the same, [Dir.Enter] drops what is out of date.
//
// The files are JSON with a version. An attachment's file has one document a
// line and the last whole line counts, so a crash in the middle of a write
// leaves the state before it. Files are bounded, and damage is an error that names the file and
// matches [ErrDamaged].
//
// A verb calls [Dir.Enter] and holds the shared lock that it returns for as long as it works on the kernel. Work
// for one process alone, such as building a network, goes through [Lock.Ensure] or [Lock.Upgrade].
package state
