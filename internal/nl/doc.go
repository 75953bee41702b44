// Package nl sends netlink requests and reads their answers, and receives announcements. It can send many requests in
// one sendmsg. Its errors contain the kernel's own text, if there is one. Messages are types of mdlayher/netlink.
//
//	var b nl.Batch
//	m, err := nl.Encode(unix.RTM_NEWLINK, netlink.Create|netlink.Excl, head, func(ae *netlink.AttributeEncoder) { … })
//	b.Add("add link", nl.Name(name), m, err)
//	b.AddGet("get link", …)
//	err = conn.Execute(&b)
//
// The kernel answers rtnetlink and nfnetlink requests before sendmsg returns. So a request needs no poller, no
// goroutine and no timeout. An answer that is not in the socket when sendmsg returns will never come. Only the later
// parts of a listing come afterwards: the kernel writes each part when the process reads an earlier one.
package nl
