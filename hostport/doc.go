// Package hostport finds sockets of the host that conflict with published ports. It also deletes conntrack flows of UDP
// whose address translation is outdated. Package nft publishes the ports (nft.Endpoint.Ports). Ports at 127.0.0.1 also
// need bridge.Routing.RouteLocalnet.
//
//	taken, err := hostport.Listeners(ctx, host, port) // sockets that would lose packets to the pod
//	conn, err := hostport.Dial(host, nil)
//	err = firewall.Add(ctx, pod) // package nft
//	err = conn.FlushStale(ctx, pod.Addrs, port) // deletes flows that began earlier
//	err = firewall.Remove(ctx, pod)
//	err = conn.Flush(ctx, pod.Addrs, port)
//
// The package needs CAP_NET_ADMIN in the user namespace that owns the network namespace.
package hostport
