// Package foreign deals with the firewalls of other programs. Ensure makes iptables accept the packets of pods that
// package nft marks. Obstacles lists everything else that stops them.
//
//	conn := foreign.On(firewall.Socket(), nil) // of an nft.Conn
//	changed, err := conn.Ensure(ctx)
//	obstacles, err := conn.Obstacles(ctx, foreign.Path{Bridge: "cbr0"})
//
// In nf_tables, an accept in one table never overrides a drop in another. So the chain forward of package nft marks
// the packets that pods may have forwarded. If iptables works over nf_tables, Ensure adds rules to the chain FORWARD
// of its table filter: right before the first rule that drops every packet. Earlier drops stay in force. The package
// interprets only policies and rules without conditions that drop everything.
//
// It needs CAP_NET_ADMIN in the user namespace that owns the network namespace.
package foreign
