// Package bandwidth limits the traffic of a pod in both directions. The limits apply at the pod's port, which is the
// host's end of its veth pair.
//
//	conn := bandwidth.On(links.Socket()) // links is a bridge.Conn
//	ifb := bandwidth.IFBName(port)
//	target := bandwidth.Target{Port: port, IFB: ifb, Owner: "example:", Alias: "example:container-1"}
//	ingress, egress := bandwidth.Limit{Rate: 10e6}, bandwidth.Limit{Rate: 5e6} // bits per second
//	limits := bandwidth.Shape{Ingress: ingress, Egress: egress}
//	changed, err := conn.Ensure(ctx, target, limits)
//	differences, err := conn.Check(ctx, target, limits)
//	err = conn.Remove(ctx, target)
//
// Packets to the pod leave the host through the port. They wait in a token bucket filter (tbf), which is the port's
// root qdisc. Packets from the pod enter the host through the port, where they cannot wait. So a filter at the port
// redirects them to an intermediate functional block (ifb), a link whose root qdisc is a tbf. Afterwards the ifb
// returns them to the port. The bridge, and firewall rules in the families bridge and inet, do not notice this. But a
// chain of the family netdev at the port's ingress does not see these packets at all.
//
//	pod ── port ── bridge        ingress of the pod: port, root: tbf
//	        │ ↑                  egress of the pod:  port, clsact: u32, mirred → ifb
//	        ifb                                      ifb, root: tbf
//
// A tbf on the pod's end would need no ifb, but a process with CAP_NET_ADMIN in the pod could delete it. The queue is
// long enough for 15 ms of the rate, and for at least eight frames. See Effective for the burst. Our filters have the
// priority 0x746f, and our tbf qdiscs the handle 746f:.
//
// # Needs
//
// The package needs CAP_NET_ADMIN in the port's network namespace, and Linux 6.1 or later with sch_tbf. Limits for
// egress also need ifb, sch_ingress, cls_u32 and act_mirred. The kernel loads these modules by itself if it is
// permitted to. Errors from the kernel are, or wrap, a *tombolo.OpError.
package bandwidth
