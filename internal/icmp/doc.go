// Package icmp sends echo requests and receives their answers (RFC 792 for IPv4, RFC 4443 section 4 for IPv6). It
// uses raw sockets that it opens in a network namespace. It needs no ping binary and no net.ipv4.ping_group_range.
//
// It needs CAP_SYS_ADMIN to enter the namespace, and CAP_NET_RAW in the user namespace that owns the namespace.
package icmp
