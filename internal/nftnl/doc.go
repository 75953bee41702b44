// Package nftnl sends nf_tables requests over a connection of package nl: transactions, single requests, listings and
// comments. Messages and attributes are types of mdlayher/netlink, and the expressions of rules are types of
// google/nftables. The Conn of google/nftables is not used. It has no exclusive elements, no generation, no comments
// of chains and no fwd. It also opens its own socket, and supports no transaction over several tables.
//
// Attributes are lists of netlink.Attribute, as in google/nftables. An AttributeEncoder would need 17 allocations for
// a set element, which each ADD sends. A list needs 5.
package nftnl
