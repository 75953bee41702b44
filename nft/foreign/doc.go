// Package foreign handles the firewalls of other programs. Ensure makes iptables accept the packets of pods that
// package nft marks. Obstacles lists parts of other firewalls that still drop such packets, or may drop them.
//
//	conn := foreign.On(firewall.Socket(), nil) // firewall is an nft.Conn
//	changed, err := conn.Ensure(ctx)
//	obstacles, err := conn.Obstacles(ctx, foreign.Path{Bridge: "cbr0"})
//
// In nf_tables, an accept in one table never overrides a drop in another table. So the chain forward of package nft
// only marks the packets that may be forwarded. If iptables uses nf_tables, Ensure adds rules that accept marked
// packets to the chain FORWARD of its table filter. The rules stand right before the first rule that drops every
// packet, so earlier drops still apply. Ensure does not change legacy iptables, which Obstacles examines too. Ensure
// and Obstacles look only for policies that drop, and for rules that drop everything without a condition.
//
// The package needs CAP_NET_ADMIN in the user namespace that owns the network namespace.
package foreign
