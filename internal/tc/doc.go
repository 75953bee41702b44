// Package tc encodes and decodes the messages of traffic control that Tombolo needs: qdiscs and filters of a link,
// over rtnetlink (include/uapi/linux/{rtnetlink,pkt_sched,pkt_cls}.h).
//
//	l := tc.Device{Name: "veth0", Index: 7}
//	l.AddClsact(&batch)
//	l.GetQdisc(&batch, tc.Root, &qdisc)
//	err := tc.Look(ctx, conn, &batch)
//
// Three packages use it: bandwidth limits the traffic of ports, localnet protects the host's 127.0.0.0/8, and share
// connects a bridge to a shared NIC.
package tc
