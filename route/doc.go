// Package route reads and writes routes.
//
//	conn, err := route.Dial(ns) // nil is the calling thread's namespace
//	defer conn.Close()
//	r := route.Route{Gateway: netip.MustParseAddr("10.1.0.1"), Link: index} // without Dst, the default route
//	changed, err := conn.Ensure(ctx, r)
//	way, err := conn.Get(ctx, netip.MustParseAddr("192.0.2.1")) // as the kernel would send to it
//	err = conn.Remove(ctx, r)
//
// Changing them needs CAP_NET_ADMIN in the user namespace that owns the
// network namespace; reading needs none. A socket in another namespace takes
// CAP_SYS_ADMIN. Linux 6.1 and later.
//
// Routes that are added without a Protocol carry ProtocolTombolo, by which they
// are known as ours in `ip route` (as "proto 116") and to a Filter.
package route
