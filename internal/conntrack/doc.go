// Package conntrack lists and deletes flows: what the kernel remembers of packets
// that it has tracked, and the address translation that it goes on applying to them.
//
// NAT rules see the first packet of a flow only. A client that keeps sending
// datagrams from one port keeps its flow alive, and with it whatever was decided when
// it began: that nothing was to be translated, since no pod had published the port
// yet, or that it goes to a pod that is gone. So the new pod receives nothing from
// that client until the flow is deleted:
//
//	port := conntrack.Publication{Proto: unix.IPPROTO_UDP, Host: hostPort, Pod: podPort}
//	n, err := conn.Flush(ctx, port.Stale(isLocal)) // after the rules are in place
//	n, err := conn.Flush(ctx, port.Flows())        // after they are gone
//
// The kernel picks the flows (CTA_FILTER, Linux 5.8), so that a node with 200,000 of
// them sends the few that matter; what it cannot compare, or compares wrongly, is
// compared here: see Filter. A flow is deleted by its tuple and its number
// (CTA_ID), so that one which began meanwhile with the same tuple stays.
//
// It needs CAP_NET_ADMIN in the user namespace that owns the network namespace, and
// Linux 6.1 or later with nf_conntrack_netlink (CONFIG_NF_CT_NETLINK). The messages
// are those of include/uapi/linux/netfilter/nfnetlink_conntrack.h.
package conntrack
