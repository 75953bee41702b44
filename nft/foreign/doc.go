// Package foreign sees to the firewalls of others: it has iptables let pods pass that
// package nft marks, and names what else stops them.
//
//	c, err := foreign.Dial(nil)           // or foreign.On(firewall.Socket(), nil)
//	ready, err := c.Ready(ctx)            // one look, for each pod
//	changed, err := c.Ensure(ctx)         // the rule, where it is needed
//	list, err := foreign.Obstacles(ctx, nil, foreign.Path{Bridge: "cbr0"})
//	err = c.Remove(ctx)                   // with the last pod
//
// An accept in one table of nf_tables never overrides a drop in another. So nft's chain
// forward marks what pods may have forwarded, and here one rule goes into the chain FORWARD
// of iptables' table filter, where that works over nf_tables: right before the first point
// where every packet is dropped. What is dropped before that stays dropped.
//
// All else is named, with the command that helps (Obstacles): chains of other tables,
// firewalld, legacy iptables. No rules are interpreted beyond a policy, or a rule without a condition, that
// drops everything; what may be so is named as such.
//
// It needs CAP_NET_ADMIN in the user namespace that owns the network namespace.
package foreign
