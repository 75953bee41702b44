// Package hostport does what host ports need besides rules. The rules are package nft's
// (nft.Endpoint.Ports), and 127.0.0.1 leads to a pod by bridge.Routing.RouteLocalnet.
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
