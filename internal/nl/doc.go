// Package nl sends netlink requests: over one socket, with the library's message types, many requests in one sendmsg,
// and with the kernel's own text in every error.
//
// It is small because the kernel answers rtnetlink and nfnetlink requests before sendmsg returns. So it needs no
// poller, no goroutine, no time-out and no waiting: an answer that is not in the socket by then will never come.
//
//	var b nl.Batch
//	m, err := nl.Encode(unix.RTM_NEWLINK, netlink.Create|netlink.Excl, head, func(ae *netlink.AttributeEncoder) { … })
//	b.Add("add link", nl.Name(name), m, err)
//	b.AddGet("get link", …)
//	err = conn.Execute(&b)
package nl
