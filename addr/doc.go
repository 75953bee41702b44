// Package addr reads and writes the addresses of links.
//
//	conn, err := addr.Dial(nil)
//	gateway := addr.Address{Prefix: netip.MustParsePrefix("10.1.0.1/24"), Link: index}
//	changed, err := conn.Ensure(gateway)               // adds it, or does nothing
//	list, err := conn.List(addr.Filter{Link: index})
//	err = conn.Remove(gateway)                         // what is gone is success
//
// Adding and deleting needs CAP_NET_ADMIN in the user namespace that owns the
// network namespace; listing needs none. A Config that names a namespace needs
// CAP_SYS_ADMIN to open the socket there. Linux 6.1 and later; Address says which
// fields are newer than the oldest kernels that otherwise do.
//
// The kernel's own rules about what makes two addresses the same differ between
// the families: see Conn.Ensure.
package addr
