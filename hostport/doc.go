// Package hostport does what host ports need besides rules. The rules are package nft's
// (nft.Endpoint.Ports), and 127.0.0.1 leads to a pod by bridge.Routing.RouteLocalnet.
//
//	taken, err := hostport.Listeners(ctx, nil, ports...) // before: programs that would receive nothing any more
//	err = firewall.Add(ctx, endpoint)                    // package nft
//	conn, err := hostport.Dial(nil, nil)
//	err = conn.FlushStale(ctx, addresses, ports...)      // flows that began before
//	err = conn.Flush(ctx, addresses, ports...)           // once the rules are gone
//
// It needs CAP_NET_ADMIN in the user namespace that owns the network namespace.
package hostport
