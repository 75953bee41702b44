// Package addr reads and writes the addresses of links.
//
//	conn, err := addr.Dial(ns) // nil is the calling thread's namespace
//	defer conn.Close()
//	a := addr.Address{Prefix: netip.MustParsePrefix("2001:db8::1/64"), Link: index, Flags: addr.NoDAD}
//	changed, err := conn.Ensure(ctx, a) // adds it, or does nothing
//	list, err := conn.List(ctx, addr.Filter{Link: index})
//	err = conn.Remove(ctx, a) // what is gone is success
//
// Adding and deleting needs CAP_NET_ADMIN in the user namespace that owns the
// network namespace; listing needs none. A socket in another namespace takes CAP_SYS_ADMIN. Linux 6.1 and later; Address says which
// fields are newer than the oldest kernels that otherwise do.
//
// The kernel's own rules about what makes two addresses the same differ between
// the families: see Conn.Ensure.
package addr
