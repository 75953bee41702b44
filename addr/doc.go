// Package addr reads and writes the addresses of links.
//
// Adding and deleting needs CAP_NET_ADMIN in the user namespace that owns the
// network namespace; listing needs none. A Config that names a namespace needs
// CAP_SYS_ADMIN to open the socket there. Linux 6.1 and later; Address says which
// fields are newer than the oldest kernels that otherwise do.
//
// The kernel's own rules about what makes two addresses the same differ between
// the families: see Conn.Ensure.
package addr
