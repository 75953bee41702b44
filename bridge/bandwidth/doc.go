// Package bandwidth limits the traffic of one pod at its port, the host's end of its veth
// pair, in both directions, over rtnetlink:
//
//	conn := bandwidth.On(links.Socket()) // of a bridge.Conn
//	target := bandwidth.Target{Port: port, IFB: bandwidth.IFBName(port), Owner: "example:", Alias: "example:container-1"}
//	limits := bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 10e6}, Egress: bandwidth.Limit{Rate: 5e6}} // bits a second
//	changed, err := conn.Ensure(ctx, target, limits)
//	differences, err := conn.Check(ctx, target, limits)
//	err = conn.Remove(ctx, target)
//
// Packets to the pod leave the host by the port, and wait in a token bucket filter (tbf) that is the port's root
// qdisc. Packets from the pod enter the host by the port, where they cannot wait: a filter there hands it to a link
// of its own, an intermediate functional block (ifb), which has the tbf and gives it back to the port afterwards.
// The bridge, and the firewall in its families bridge and inet, see it as if nothing had been; a chain of family
// netdev at the port's ingress does not see it at all.
//
//	pod ── port ── bridge        ingress of the pod: port, root: tbf
//	        │ ↑                  egress of the pod:  port, clsact: u32, mirred → ifb
//	        ifb                                      ifb, root: tbf
//
// A tbf on the pod's end would need no ifb, but a process with CAP_NET_ADMIN in the pod could delete it. The queue is
// 15 ms of the rate, or eight frames if that is more; see Effective for the burst. The filter's priority and the
// qdiscs' handle are 0x746f, by which we know ours.
//
// # Needs
//
// CAP_NET_ADMIN in the port's namespace. Linux 6.1 and later, with sch_tbf and, to
// shape egress, ifb, sch_ingress, cls_u32 and act_mirred: the kernel loads modules
// of these names by itself where it may. Errors are *tombolo.OpError, or wrap one.
package bandwidth
