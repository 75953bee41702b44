// Package addr reads and writes the addresses of links.
//
//	const index = 1 // of the loopback interface, in every namespace
//	conn, err := addr.Dial(ns) // nil is the calling thread's namespace
//	defer conn.Close()
//	a := addr.Address{Prefix: netip.MustParsePrefix("2001:db8::1/64"), Link: index, Flags: addr.NoDAD}
//	changed, err := conn.Ensure(ctx, a) // adds it, or does nothing
//	list, err := conn.List(ctx, addr.Filter{Link: index})
//	err = conn.Remove(ctx, a) // no error if it does not exist
//
// Adding and deleting need CAP_NET_ADMIN in the user namespace that owns the network namespace; listing needs no
// capability. A socket in another namespace needs CAP_SYS_ADMIN. The package needs Linux 6.1 or later.
//
// A link can have an IPv6 address only once, but an IPv4 address once for each prefix length and peer's network.
package addr
