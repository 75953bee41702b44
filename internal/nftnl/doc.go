// Package nftnl sends nf_tables requests through a connection of package nl: transactions, single requests and
// listings. It uses the message and attribute types of mdlayher/netlink, and the rule expressions of google/nftables.
//
// It does not use the Conn of google/nftables. That Conn supports no exclusive creation of elements, no comments of
// chains, and not the expression fwd. It also opens a socket of its own, so it cannot share the socket of package nl.
//
// Attributes are lists of netlink.Attribute, as in google/nftables. For a set element, which an ADD sends, an
// AttributeEncoder would make 17 allocations. A list makes 5.
package nftnl
