// Package nl speaks netlink: one socket, requests in the library's types, many of them in
// one sendmsg, and the kernel's own words in every error.
//
// It is small because the kernel answers rtnetlink and nfnetlink requests before
// sendmsg returns. There is no poller, no goroutine, no time-out and no waiting;
// an answer that is not in the socket then will never be.
//
//	var b nl.Batch
//	m, err := nl.Encode(unix.RTM_NEWLINK, netlink.Create|netlink.Excl, head, func(ae *netlink.AttributeEncoder) { … })
//	b.Add("add link", nl.Name(name), m, err)
//	b.AddGet("get link", …)
//	err = conn.Execute(&b)
package nl
