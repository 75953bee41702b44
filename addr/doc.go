// Package addr reads and writes the addresses of links.
//
//	conn, err := addr.Dial(nil)
//	gateway := addr.Address{Prefix: netip.MustParsePrefix("10.1.0.1/24"), Link: index}
//	changed, err := conn.Ensure(ctx, gateway) // adds it, or does nothing
//	list, err := conn.List(ctx, addr.Filter{Link: index})
//	err = conn.Remove(ctx, gateway) // no error if it is gone
//
// Adding and deleting needs CAP_NET_ADMIN in the user namespace that owns the
// network namespace; listing needs none. A socket in another namespace takes CAP_SYS_ADMIN. Linux 6.1 and later; Address says which
// fields are newer than the oldest kernels that otherwise do.
//
// The kernel's own rules about what makes two addresses the same differ between
// the families: see Conn.Ensure.
package addr
