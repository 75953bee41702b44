// Package foreign sees to the firewalls of others: it has iptables let pods pass that
// package nft marks (Ensure), and names what else stops them (Obstacles).
//
//	c := foreign.On(firewall.Socket(), nil) // of an nft.Conn
//	changed, err := c.Ensure(ctx)           // one rule in iptables' chain FORWARD
//	list, err := c.Obstacles(ctx, foreign.Path{Bridge: "cbr0"})
//	err = c.Remove(ctx)
//
// An accept in one table of nf_tables never overrides a drop in another. So nft's chain forward marks what pods may
// have forwarded, and here one rule goes into the chain FORWARD of iptables' table filter, where that works over
// nf_tables: right before the first point where every packet is dropped. Packets that are dropped before that stay
// dropped. No rules are interpreted beyond a policy, or a rule without a condition, that drops everything.
//
// It needs CAP_NET_ADMIN in the user namespace that owns the network namespace.
package foreign
