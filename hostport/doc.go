// Package hostport handles sockets and flows of host ports. The rules of host ports are in package nft
// (nft.Endpoint.Ports), and bridge.Routing.RouteLocalnet makes 127.0.0.1 lead to a pod.
//
//	taken, err := hostport.Listeners(ctx, host, port) // programs that would hear nothing any more
//	conn, err := hostport.Dial(host, nil)
//	err = firewall.Add(ctx, pod) // package nft
//	err = conn.FlushStale(ctx, pod.Addrs, port) // flows that began before
//	err = firewall.Remove(ctx, pod)
//	err = conn.Flush(ctx, pod.Addrs, port)
//
// It needs CAP_NET_ADMIN in the user namespace that owns the network namespace.
package hostport
