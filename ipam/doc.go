// Package ipam gives addresses to attachments and takes them back: [HostLocal] out of
// ranges, and any other [Allocator] as it likes.
//
//	ranges := []ipam.RangeSet{{Ranges: []ipam.Range{{Subnet: netip.MustParsePrefix("10.1.0.0/24")}}}}
//	addresses, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: dir, Ranges: ranges})
//	owner := ipam.Owner{ContainerID: "web-1", IfName: "eth0"}
//	given, err := addresses.Add(ctx, owner) // 10.1.0.2/24 via 10.1.0.1
//	err = addresses.Check(ctx, owner, given.Addresses)
//	err = addresses.Del(ctx, owner, nil)
//	err = addresses.Collect(ctx, owners) // of those that are still there
//
// # The directory of HostLocal
//
// Its state is the directory that the reference plugin host-local keeps
// (containernetworking/plugins, v1.9.1), byte for byte, so that a node can
// change from one to the other and back while pods run. In <Dir>/<Network>
// there are
//
//	10.1.0.7            a reservation: "<container>\r\n<interface>"
//	last_reserved_ip.0  the address that range set 0 gave last
//	lock                locked with flock by a process that changes anything here
//	.tombolo-epoch      ours: in which epoch of the node all this was last used
//
// A reservation is made with O_EXCL and written while the lock is held. Two things follow. An address in use is one
// that has a file, with any content. And a file that is empty, seen by a process that holds the lock, was left by a
// process that died; its address is free.
//
// Add reads the lock, the marker, last_reserved_ip and the file of its
// candidate, and never the directory, as long as one of the next few addresses in
// turn is free. A Del that is told the addresses reads their files only. So the
// cost of both does not grow with the pods. A search through all reservations is
// left to Del without a hint, Collect, Status, and an Add that met several taken
// addresses in a row.
//
// An entry that is not of this format (its name is no address, its content is no reservation, it is a directory, or
// cannot be read) counts as taken if it has the name of an address, and is never deleted.
//
// # Epochs
//
// See [Epoch] for what happens to reservations when the node restarts, or when
// the directory is deleted under running pods. An allocator knows of that by
// [HostLocal.Bind].
//
// # Needs and errors
//
// The package needs write access to the directory and no capability. Its errors
// match the sentinels of this package; where several are joined, the most important one
// comes first.
package ipam
