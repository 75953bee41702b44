// Package ipam assigns addresses to attachments. An attachment is one interface of a container in one network.
// [HostLocal] takes addresses from ranges; another [Allocator] may have another source.
//
//	ranges := []ipam.RangeSet{{Ranges: []ipam.Range{{Subnet: netip.MustParsePrefix("10.1.0.0/24")}}}}
//	addresses, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: dir, Ranges: ranges})
//	owner := ipam.Owner{ContainerID: "web-1", IfName: "eth0"}
//	allocation, err := addresses.Add(ctx, owner) // 10.1.0.2/24 via 10.1.0.1
//	err = addresses.Check(ctx, owner, allocation.Addresses)
//	err = addresses.Del(ctx, owner, nil)
//	err = addresses.Collect(ctx, owners) // the owners that still exist
//
// # The directory of HostLocal
//
// HostLocal keeps its reservations in the same directory and format as the reference plugin host-local
// (containernetworking/plugins, v1.9.1). So a node can change from one to the other and back while pods run. Only the
// reservation of a live address whose file was lost has a form of its own, "tombolo:<hash>\r\n", which the reference
// plugin takes for that of an unknown container. The directory <Dir>/<Network> contains
//
//	10.1.0.7            a reservation: "<container>\r\n<interface>"
//	last_reserved_ip.0  the address that range set 0 assigned last
//	lock                locked with flock by a process that changes anything here
//	.tombolo-epoch      ours: a marker with the node's epoch when the directory was last used
//	.tombolo-kept       ours: addresses that names keep, see [HostLocal.Keep]
//
// A reservation is created with O_EXCL and written while the lock is held. Two things follow. An address with a file is
// in use, even if the file is still empty. But if a process that holds the lock finds an empty file, the file's creator
// died, and the address is free.
//
// Add takes the lock, reads the marker and last_reserved_ip, and creates the file of the next address. It does not list
// the directory as long as one of the next few addresses in turn is free. A Del with a hint reads only the files of
// these addresses and .tombolo-kept. So the cost of both does not grow with the number of pods. These calls list the
// directory: Del without a hint, Collect, Status, Pools, and a Check that got no address of some range set. An Add
// lists it after several taken or kept addresses in a row, with Config.Search, and as the first one after a boot.
//
// HostLocal never deletes an entry of another format. The name of such an entry is no address, its content is no
// reservation, or it is no readable file. If its name is an address, that address counts as taken.
//
// # Epochs
//
// [Epoch] describes what happens to reservations when the node restarts, or when the directory is deleted while pods
// run. An allocator learns of the node's epoch by [HostLocal.Bind].
//
// # Needs and errors
//
// The package needs write access to the directory and no capability. An error matches an error variable of this
// package, tombolo.ErrInvalid, or an error of the operating system.
package ipam
