// Package sockdiag says which sockets of the host would receive what is sent to a
// port: a pod that publishes the port would take it away from them.
//
//	taken, err := conn.Listeners(ctx, []sockdiag.Want{{Proto: unix.IPPROTO_TCP, Port: 8080}})
//	for _, s := range taken {
//		fmt.Println(s.InUse()) // 127.0.0.1:8080/tcp is in use by nginx (pid 4711)
//	}
//
// These sockets count:
//   - TCP and SCTP that listen. Connections do not, nor what is bound and does not
//     listen.
//   - UDP that is bound and not connected, which is all that a server looks like to
//     the kernel. A client's looks the same if it sends without connecting, at
//     whichever port the kernel picked for it. It counts too: it cannot be told from
//     a server, and the port of a pod should be none of net.ipv4.ip_local_port_range
//     anyway. Connected ones do not count: they receive from their peer only, and go on doing
//     so, since NAT rules see the first packet of a flow only.
//   - Those of the kernel itself (VXLAN, WireGuard), which no process has.
//
// Those bound to a multicast address or to 255.255.255.255 do not count: nothing that
// is sent to an address of the host reaches them. What a process binds after the look
// is not seen, and nothing can keep it from doing so.
//
// The kernel picks by state, and by the port where one is wanted (NETLINK_SOCK_DIAG), so that
// a node with 10,000 connections sends the few sockets that listen. Where it has no module for a protocol (tcp_diag,
// udp_diag, sctp_diag), and cannot load it, no socket is found.
//
// Looking needs no capability, but CAP_SYS_ADMIN in another namespace; the name of
// the process needs that of root (CAP_SYS_PTRACE). Linux 6.1 or later. The messages
// are those of include/uapi/linux/inet_diag.h.
package sockdiag
