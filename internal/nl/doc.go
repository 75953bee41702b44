// Package nl speaks netlink: one socket, requests built in place, many of them in
// one sendmsg, and the kernel's own words in every error.
//
// It is small because the kernel answers rtnetlink and nfnetlink requests before
// sendmsg returns. There is no poller, no goroutine, no time-out and no waiting;
// an answer that is not in the socket then will never be.
//
//	var b nl.Batch
//	b.Request("add link", nl.Name(name), unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, func(e *nl.Encoder) { … })
//	b.Get("get link", …)
//	err := conn.Execute(&b)
package nl
