// Package tc has the messages of traffic control, as far as Tombolo needs them: qdiscs
// and filters of a link, over rtnetlink (include/uapi/linux/{rtnetlink,pkt_sched,pkt_cls}.h).
//
//	l := tc.Link{Name: "veth0", Index: 7}
//	l.AddClsact(&batch)
//	l.GetQdisc(&batch, tc.Root, &qdisc)
//	err := tc.Look(ctx, conn, &batch)
//
// What to make of them is for package bandwidth, which limits the traffic of ports, and
// package localnet, which keeps others from the host's 127.0.0.0/8.
package tc
