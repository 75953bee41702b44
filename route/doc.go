// Package route reads and writes routes. Fields named Link hold a link's index (net.Interface.Index).
//
//	conn, err := route.Dial(ns) // nil is the calling thread's namespace
//	defer conn.Close()
//	r := route.Route{Gateway: netip.MustParseAddr("10.1.0.1"), Link: index} // without Dst, the default route
//	changed, err := conn.Ensure(ctx, r)
//	way, err := conn.Get(ctx, netip.MustParseAddr("192.0.2.1")) // the route of a packet to this address
//	err = conn.Remove(ctx, r)
//
// Changes need CAP_NET_ADMIN in the user namespace that owns the network namespace; reading needs no capability. A
// socket in another namespace needs CAP_SYS_ADMIN. The package needs Linux 6.1 or later.
//
// Routes added without a Protocol get ProtocolTombolo, which marks them as ours in `ip route` (as "proto 116") and
// for a Filter.
package route
