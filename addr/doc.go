// Package addr reads and writes the addresses of links.
//
//	conn, err := addr.Dial(ns) // nil is the calling thread's namespace
//	defer conn.Close()
//	a := addr.Address{Prefix: netip.MustParsePrefix("2001:db8::1/64"), Link: index, Flags: addr.NoDAD}
//	changed, err := conn.Ensure(ctx, a) // adds it, or does nothing
//	list, err := conn.List(ctx, addr.Filter{Link: index})
//	err = conn.Remove(ctx, a) // what is gone is success
//
// Adding and deleting need CAP_NET_ADMIN in the user namespace that owns the network namespace; listing needs no
// capability. A socket in another namespace needs CAP_SYS_ADMIN. The package works on Linux 6.1 and later; Address
// names the fields that older kernels lack.
//
// The two families differ in the fields by which the kernel tells addresses apart, and in the fields that it can change:
// see Conn.Ensure.
package addr
