package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/icmp"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/route"
)

// exchange calls the function send, which sends a request from the pod to an address. If an answer comes, or the
// other end refuses the connection, exchange adds tried to the list of completed tests and returns nil. Otherwise it
// returns a Finding that tells where the request or its answer was lost. A Finding without a Remedy means that the
// request left the host, and that no answer reached the host. If the test itself fails, exchange records the error by
// fail and returns nil. It also returns nil, without adding tried, if the request was lost because the next hop's MAC
// was unknown, and the next hop answers when it is probed again (unresolved).
func (e *examination) exchange(
	ctx context.Context, tried string, to netip.Addr, p probe, send func() error,
) *Finding {
	var sendErr error
	t, err := e.follow(ctx, p, func() { sendErr = send() })

	// The kernel sends no request for a MAC right after one has failed. So try again.
	if err == nil && p.isQuestion && !t.left {
		t, err = e.follow(ctx, p, func() { sendErr = send() })
	}

	if err := cmp.Or(ctx.Err(), err); err != nil {
		e.fail(err)
		return nil
	}

	isDropped := t.to.drop != nil || t.from.drop != nil
	if sendErr == nil || errors.Is(sendErr, unix.ECONNREFUSED) && t.back && !isDropped {
		e.try("%s", tried)
		return nil
	}

	r, err := e.inPod.Get(ctx, to)
	hop := cmp.Or(r.Gateway, to)
	switch {
	case p.isQuestion:
	case err != nil:
		return finding(StepRoute, e.setRoute(err), "the pod has no route to %s: %v", to, err)
	case r.Link != e.index:
		look := "see why: " + e.inside("ip route get "+to.String())
		return finding(StepRoute, look, "the pod does not send it by %s", e.at.IfName)
	case !isResolved(e.socket, e.index, hop):
		return e.unresolved(ctx, hop, hop.String())
	}

	return e.lost(ctx, to, t, sendErr)
}

// unresolved pings a neighbour from the pod. It finds out where the kernel's request for the neighbour's MAC, or the
// answer, is lost. It returns nil if the answer comes, or if exchange recorded an error.
func (e *examination) unresolved(ctx context.Context, a netip.Addr, name string) *Finding {
	const untilAsked = wait * 3 / 2 // longer than a second, after which the kernel repeats its request
	f := e.exchange(ctx, name+" by "+protocolOf(a), a, neighbourProbe(a), func() error {
		return icmp.Ping(ctx, e.pod, a, icmp.Echo{Wait: untilAsked})
	})
	if f != nil {
		f = finding(StepGateway, f.Remedy, "%s does not answer by %s: %s", name, protocolOf(a), f.Evidence)
	}
	return f
}

// isResolved reports whether the kernel has a neighbour entry with a MAC for an address.
func isResolved(c *nl.Conn, link int, a netip.Addr) bool {
	n, err := routing.Find(c, link, a)
	return err == nil && len(n.MAC) > 0
}

// name returns the name of the host's link with the given index, or "link N" if it cannot be read.
func (e *examination) name(ctx context.Context, link int) string {
	if l, err := e.links.LinkByIndex(ctx, link); err == nil {
		return l.Name
	}
	return fmt.Sprintf("link %d", link)
}

// inside returns a shell command that runs the given command in the pod's network namespace.
func (e *examination) inside(command string) string {
	return "nsenter --net=" + e.at.Path + " " + command
}

// lost finds out from a trail where a request to an address, or its answer, was lost. sendErr is the error of sending
// or of waiting for the answer in the pod. lost returns nil if stuck recorded an error.
func (e *examination) lost(ctx context.Context, to netip.Addr, t *trail, sendErr error) *Finding {
	port, ifName := e.port.Name, e.at.IfName
	isLocal := e.isOwn(ctx, to)
	switch {
	case !t.left:
		look := "sh -c 'ip rule; ip route get %s; nft list ruleset; tc filter show dev %s egress'"
		return finding(StepRoute, "see in the pod: "+e.inside(fmt.Sprintf(look, to, ifName)),
			"it does not leave the pod's interface %s for the port %s (%v)", ifName, port, sendErr)
	case t.to.drop != nil:
		return e.droppedBy(t.to.drop, "what the pod sends to "+to.String(), "iifname")
	case t.to.queue != nil:
		return e.queuedBy(t.to.queue, "what the pod sends to "+to.String())
	case !t.arrived && t.sent == nil && t.to.chain == "":
		look := "ip link show dev %s; tc filter show dev %[1]s ingress; nft list ruleset netdev; ebtables-legacy -L"
		return finding(StepLink, "see what filters the port: "+fmt.Sprintf(look, port),
			"it leaves the pod's interface %s and does not get to the bridge %s", ifName, e.link.Name)
	case t.isQuestion && !isLocal && t.came == nil:
		return e.unanswered(ctx, to, t)
	case t.sent == nil && !(isLocal && t.arrived):
		return e.stuck(ctx, t, e.own, to, e.link.Index)
	case !isLocal && t.came == nil:
		note := ""
		if src := t.sent.src; src.IsValid() && src != e.own {
			note = " as " + src.String()
		}
		return finding(StepBeyond, "", "it leaves the host by %s%s, and no answer comes back to the host",
			e.name(ctx, t.sent.link), note)
	case t.from.drop != nil:
		return e.droppedBy(t.from.drop, "the answer of "+to.String()+" to the pod", "oifname")
	case t.from.queue != nil:
		return e.queuedBy(t.from.queue, "the answer of "+to.String()+" to the pod")
	case isLocal && !t.returned:
		return e.stuck(ctx, t, e.own, to, e.link.Index)
	case !t.returned:
		return e.stuck(ctx, t, to, e.own, t.came.link)
	case !t.back:
		return finding(StepLink, fmt.Sprintf("see what filters it: tc filter show dev %s egress", port),
			"the answer comes to the bridge %s and does not leave it by the port %s", e.link.Name, port)
	}

	look := "sh -c 'nft list ruleset; tc filter show dev %s ingress; sysctl net.ipv4.conf.%[1]s.rp_filter'"
	return finding(StepLink, "see the pod's own firewall and filters: "+e.inside(fmt.Sprintf(look, ifName)),
		"the answer comes to the pod's interface %s, and the pod does not take it", ifName)
}

// unanswered returns a finding about a neighbour that does not answer a request for its MAC, although the request came
// to the bridge. It pings the neighbour from the host, to find out whether only pods get no answer.
func (e *examination) unanswered(ctx context.Context, to netip.Addr, t *trail) *Finding {
	where := "on the bridge " + e.bridge.Name
	if t.sent != nil {
		// The bridge floods an ARP request to all ports. Name the link only if it is not another pod's port.
		l, err := e.links.LinkByIndex(ctx, t.sent.link)
		if err == nil && !strings.HasPrefix(l.Alias, endpoint.AliasPrefix) {
			where = "beyond " + l.Name + ", by which it leaves the host,"
		}
	}

	f := finding(StepGateway, fmt.Sprintf("see whether %s is up and in this network, or correct the address", to),
		"nothing %s answers for it", where)
	_ = icmp.Ping(ctx, e.host, to, icmp.Echo{Wait: wait})
	r, err := e.onHost.Get(ctx, to)
	if err == nil && e.opt.Uplinks[e.at.Network] != "" && isResolved(e.hostSocket, r.Link, to) {
		f.Evidence += ", and the host gets an answer"
		f.Remedy = "see " + endpoint.OneMAC
	}
	return f
}

// stuck returns a finding about a lost packet. The packet from src to dst came to the host by a link, and the host
// neither forwarded nor answered it. Call stuck only after the trace has shown that no rule of nf_tables drops or
// queues the packet. If the lookup of the packet's route fails, stuck records the error by fail and returns nil.
func (e *examination) stuck(ctx context.Context, t *trail, src, dst netip.Addr, link int) *Finding {
	name := e.name(ctx, link)
	what, passed := "it comes to the host by "+name, t.to
	if src != e.own {
		what, passed = "the answer comes to the host by "+name, t.from
	}

	hook, ended := strings.CutSuffix(passed.chain, end)
	switch {
	case t.request.ethertype == unix.ETH_P_ARP:
		return finding(StepGateway, "see nft list ruleset arp; arptables-legacy -L; sysctl net.ipv4.conf."+name+
			".arp_ignore net.ipv4.conf.all.arp_ignore", "%s, and the host does not answer", what)
	case hook == "" && src != e.own:
		return finding(StepFirewall, fmt.Sprintf("see what filters it: ip link show dev %s; tc filter show dev "+
			"%[1]s ingress; nft list ruleset netdev", name), "%s, and the host does not take it", what)
	case hook == "" || hook == "bridge":
		return finding(StepGateway, "see whether the pod knows the MAC of "+name+": "+e.inside("ip neigh"),
			"%s, and the host does not take it", what)
	case !ended:
		f := finding(StepFirewall, "see what cannot be traced: iptables-legacy-save; ip6tables-legacy-save; "+
			"sysctl net.netfilter.nf_conntrack_count net.netfilter.nf_conntrack_max",
			"%s and is lost in the hook %s, by no rule of nf_tables", what, hook)
		for _, o := range e.obstacles {
			if o.Legacy && hook == "forward" {
				f.Evidence, f.Remedy = fmt.Sprintf("%s: %s %s it", f.Evidence, o.Chain, o.Effect), o.Remedy
			}
		}
		return f
	case hook == "input":
		return finding(StepFirewall, fmt.Sprintf("see where the answer goes: ip route get %s from %s; ip rule; "+
			"sysctl net.ipv4.icmp_echo_ignore_all net.ipv6.icmp.echo_ignore_all", src, dst),
			"%s and is taken, and the host sends no answer by %s", what, name)
	}

	r, err := e.onHost.GetFrom(ctx, src, dst, link)
	out, hop := e.name(ctx, r.Link), cmp.Or(r.Gateway, dst)
	switch {
	case route.NoRoute(err) || errors.Is(err, unix.EXDEV):
		return e.unrouted(ctx, src, dst, name, what, err)
	case err != nil:
		e.fail(err)
		return nil
	case hook != "postrouting":
		return finding(StepForwarding, fmt.Sprintf("see ip route get %s from %s iif %s", dst, src, name),
			"%s and is lost before it is forwarded", what)
	case !isResolved(e.hostSocket, r.Link, hop):
		return finding(StepBeyond, fmt.Sprintf("see whether %s is up and on the network of %s, or correct the route: "+
			"ip route get %s", hop, out, dst),
			"%s, and cannot be sent on, since %s does not answer by %s on %s", what, hop, protocolOf(hop), out)
	}

	return finding(StepBeyond, "see its filters: tc filter show dev "+out+" egress; nft list ruleset netdev",
		"%s, passes the firewall and is not sent by %s", what, out)
}

// unrouted returns a finding about a packet from src to dst that the kernel does not route, for the error in cause. It
// looks for a reverse path filter, a link that does not forward, a routing rule or a refusing route as the reason. The
// packet came in by the named link, and the argument what describes it.
func (e *examination) unrouted(
	ctx context.Context, src, dst netip.Addr, link, what string, cause error,
) *Finding {
	// Regard EINVAL like EXDEV as a sign of the reverse path filter, since newer kernels return EINVAL for it. A
	// blackhole route causes EINVAL too.
	if src.Is4() && (errors.Is(cause, unix.EXDEV) || errors.Is(cause, unix.EINVAL)) {
		own, _ := sysctl.Read(sysctl.Link("ipv4", link, "rp_filter"))
		all, _ := sysctl.Read(sysctl.Link("ipv4", "all", "rp_filter"))
		back, _ := e.onHost.Get(ctx, src)
		if max(own, all) == "1" && e.name(ctx, back.Link) != link {
			return finding(StepForwarding, "sysctl -w net/ipv4/conf/"+link+"/rp_filter=2", "%s, whose reverse path "+
				"filter drops it (net.ipv4.conf.%s.rp_filter), since the route to %s is another", what, link, src)
		}
	}

	// The kernel finds no route for IPv4 packets of a link that does not forward.
	if on, _ := sysctl.Read(sysctl.Link("ipv4", link, "forwarding")); src.Is4() && on == "0" {
		value, _ := sysctl.Read("net/ipv4/ip_forward")
		if value == "0" {
			value = sysctl.OwnForwarding // as Tombolo sets it on a host that is no router
		}
		return finding(StepForwarding, "sysctl -w net/ipv4/conf/"+link+"/forwarding="+value, "%s, a link that does "+
			"not forward (net.ipv4.conf.%s.forwarding is 0)", what, link)
	}

	f := finding(StepForwarding, routed, "%s, and the host has no route to %s for it: %v", what, dst, cause)
	rules, err := routing.Rules(e.hostSocket)
	e.fail(err)
	if rule, ok := routing.Foreign(rules, src, dst, link, 0); ok {
		f.Evidence, f.Remedy = f.Evidence+", because of the rule "+rule.String(), rule.Ahead("iif "+link)
		return f
	}

	refusing := route.Route{}
	main := route.Filter{Family: nl.FamilyOf(dst), Table: unix.RT_TABLE_MAIN}
	e.fail(e.onHost.Walk(ctx, main, func(r route.Route) {
		if refuses(r) && r.Dst.Contains(dst) && r.Dst.Bits() >= refusing.Dst.Bits() {
			refusing = r
		}
	}))
	if refusing.Dst.IsValid() {
		f.Evidence += ", because of the route " + refusing.String()
	}

	if refusing.Protocol == unix.RTPROT_BOOT || refusing.Protocol == unix.RTPROT_STATIC { // no daemon added it
		const remedy = "unless the route is intended: ip route del %s %s table %d"
		f.Remedy = fmt.Sprintf(remedy, refusing.Type, refusing.Dst, refusing.Table)
	}

	return f
}

// refuses reports whether the route is unreachable, blackhole or prohibit.
func refuses(r route.Route) bool {
	return r.Type == unix.RTN_UNREACHABLE || r.Type == unix.RTN_BLACKHOLE || r.Type == unix.RTN_PROHIBIT
}

// protocolOf returns the name of the protocol that resolves an address to a MAC.
func protocolOf(a netip.Addr) string {
	return map[bool]string{true: "ARP", false: "neighbour discovery"}[a.Is4()]
}
