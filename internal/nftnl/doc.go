// Package nftnl speaks nf_tables over a connection of package nl: transactions, single
// requests, listings and comments. Messages and attributes are mdlayher/netlink's, and
// the expressions of rules google/nftables'. That module's own Conn is not used: it has no
// exclusive elements, no generation, no comments of chains and no fwd, opens its own
// socket, and cannot put a transaction of several tables together.
//
// Attributes are lists of netlink.Attribute, as in google/nftables, and not written by an
// AttributeEncoder: an element, which is what an ADD sends, takes 17 allocations by that
// one, and 5 by a list.
package nftnl
