// Package ipam gives addresses to attachments and takes them back: host-local
// and static in this process, any other type by running the plugin of that
// name.
//
// # The directory of host-local
//
// Its state is the directory that the reference plugin of the same name keeps
// (containernetworking/plugins, v1.9.1), byte for byte, so that a node can
// change from one to the other and back while pods run. In <dataDir>/<network>
// there are
//
//	10.1.0.7            a reservation: "<container>\r\n<interface>"
//	last_reserved_ip.0  the address that range set 0 gave last
//	lock                locked with flock by whoever changes anything here
//	.tombolo-epoch      ours: in which life of the node all this was last used
//
// A reservation is made with O_EXCL and written while the lock is held. Two
// things follow. An address in use is one that has a file, whatever is in it. And
// a file that is empty or cut short, seen by one who holds the lock, is what a
// creator left that died; its address is free.
//
// An ADD reads the lock, the marker, last_reserved_ip and the file of its
// candidate, and never the directory, as long as one of the next few addresses in
// turn is free. A DEL that is told the addresses reads their files only. So the
// cost of both does not grow with the pods. A search through all reservations is
// left to DEL without a hint, GC, STATUS, and an ADD that met several taken
// addresses in a row.
//
// What is not of this format (names that are no address, contents that are no
// reservation, directories, what cannot be read) is reported through
// Request.Warn, counts as taken if it has the name of an address, and is never
// deleted.
//
// # Lives of the node
//
// See [Epoch] for what happens to reservations when the node restarts, or when
// the directory is deleted under running pods.
//
// # Needs and errors
//
// The package needs write access to the directory and no capability. Its errors
// are [*Error], or several of these joined, the most important one first: they
// hold the CNI error object, and match the sentinels of this package.
package ipam
