package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/route"
)

// loss is where a probe, or its answer, was lost.
type loss struct {
	step             Step
	evidence, remedy string
	beyond           bool // it left the host, and no answer came there
}

// sightings returns those on a link, or on all links but the pod's own side if link is 0.
func (e *examination) sightings(t *trail, link int, out, answer bool) (list []sighting) {
	for _, s := range t.host {
		elsewhere := link == 0 && s.link != e.port.Index && s.link != e.link.Index && s.link != e.bridge.Index && s.link != e.shaper
		if s.out == out && s.answer == answer && (s.link == link || elsewhere) {
			list = append(list, s)
		}
	}
	return list
}

func (e *examination) name(ctx context.Context, link int) string {
	if l, err := e.links.LinkByIndex(ctx, link); err == nil {
		return l.Name
	}
	return fmt.Sprintf("link %d", link)
}

// inside begins the command that works in the pod's network namespace.
func (e *examination) inside() string { return "nsenter --net=" + e.at.Path + " " }

// lost finds out where a probe to an address, or its answer, was lost, by what follow recorded. sendErr is what the
// kernel said when the pod sent.
func (e *examination) lost(ctx context.Context, own, to netip.Addr, t *trail, sendErr error) (loss, error) {
	port, ifName := e.port.Name, e.at.IfName
	isLocal := e.isOwn(ctx, to)
	sent := e.sightings(t, 0, true, false)
	arrived := len(e.sightings(t, e.link.Index, false, false))+len(e.sightings(t, e.bridge.Index, false, false)) > 0
	switch {
	case !slices.ContainsFunc(t.pod, func(s sighting) bool { return s.out && !s.answer }):
		evidence := fmt.Sprintf("it does not leave the pod's interface %s", ifName)
		if sendErr != nil {
			evidence += fmt.Sprintf(" (%v)", sendErr)
		}
		if errors.Is(sendErr, unix.ENOBUFS) {
			return loss{StepGateway, evidence, "a table of neighbours is full: sysctl net.ipv4.neigh.default.gc_thresh3 net.ipv6.neigh.default.gc_thresh3", false}, nil
		}
		return loss{StepRoute, evidence, fmt.Sprintf("see in the pod its routes, its firewall and its filters: %ssh -c 'ip rule; ip route get %s; nft list ruleset; tc filter show dev %s egress'", e.inside(), to, ifName), false}, nil
	case len(e.sightings(t, e.port.Index, false, false)) == 0:
		return loss{StepLink, fmt.Sprintf("it leaves the pod's interface %s and does not come in by the port %s", ifName, port), "see whether an XDP program drops it: ip link show dev " + port, false}, nil
	case t.dropped[false] != nil:
		return e.droppedBy(t, false, to)
	case (arrived || len(sent) > 0) && t.isQuestion && !isLocal && len(e.sightings(t, 0, false, true)) == 0:
		return loss{StepGateway, fmt.Sprintf("nothing on the bridge %s answers for it", e.bridge.Name), fmt.Sprintf("see whether %s is up, on this network and in its VLAN; if it is another address, correct the configuration", to), false}, nil
	case !arrived && len(sent) == 0 && !t.passed[false][beganPrerouting]: // br_netfilter calls that hook at the port
		return loss{StepLink, fmt.Sprintf("it comes in by the port %s and does not get to the bridge %s", port, e.link.Name),
			fmt.Sprintf("see the filters of the port, and rules for bridges that cannot be traced: tc filter show dev %s ingress; nft list ruleset netdev; ebtables-legacy -L", port), false}, nil
	case len(sent) == 0 && !isLocal, !arrived && len(sent) == 0:
		return e.stuck(ctx, own, to, e.link.Index, t, false)
	}

	var came []sighting
	from := "the host"
	if isLocal {
		came = e.sightings(t, e.port.Index, true, true)
		if wrong := e.sightings(t, 0, true, true); len(came) == 0 && len(wrong) > 0 {
			name := e.name(ctx, wrong[0].link)
			return loss{StepForwarding, fmt.Sprintf("the host answers, and sends the answer out by %s", name), fmt.Sprintf("see why: ip route get %s from %s; ip rule", own, to), false}, nil
		}
		if len(came) == 0 && t.dropped[true] == nil {
			return e.stuck(ctx, own, to, e.link.Index, t, true)
		}
	} else if came = e.sightings(t, 0, false, true); len(came) == 0 {
		as := ""
		if src := sent[0].src; src.IsValid() && src != own {
			as = " as " + src.String()
		}
		return loss{StepBeyond, fmt.Sprintf("it leaves the host by %s%s, and no answer comes back to the host", e.name(ctx, sent[0].link), as), "", true}, nil
	} else {
		from = e.name(ctx, came[0].link)
	}

	switch {
	case t.dropped[true] != nil:
		return e.droppedBy(t, true, to)
	case len(e.sightings(t, e.port.Index, true, true)) == 0:
		return e.stuck(ctx, to, own, came[0].link, t, false)
	case !slices.ContainsFunc(t.pod, func(s sighting) bool { return !s.out && s.answer }):
		return loss{StepLink, fmt.Sprintf("the answer from %s goes out by the port %s and does not come to the pod's interface %s", from, port, ifName),
			fmt.Sprintf("see whether filters drop it: tc filter show dev %s egress; %sip link show dev %s", port, e.inside(), ifName), false}, nil
	}
	return loss{StepLink, fmt.Sprintf("the answer comes to the pod's interface %s, and the pod does not take it", ifName),
		fmt.Sprintf("see the pod's own firewall and filters: %ssh -c 'nft list ruleset; tc filter show dev %s ingress; sysctl net.ipv4.conf.%s.rp_filter'", e.inside(), ifName, ifName), false}, nil
}

// droppedBy names the rule of nf_tables that drops a probe or its answer.
func (e *examination) droppedBy(t *trail, answer bool, to netip.Addr) (loss, error) {
	r := t.dropped[answer]
	at := r.at()
	what := "what the pod sends to " + to.String()
	if answer {
		what = "the answer of " + to.String() + " to the pod"
	}
	if r.handle == 0 {
		return loss{StepFirewall, fmt.Sprintf("%s drops, by its policy, %s", at, what), e.remedy(r, at, answer), false}, nil
	}
	number, err := r.number()
	return loss{StepFirewall, fmt.Sprintf("%s drops or rejects, by its rule number %d with handle %d, %s", at, number, r.handle, what), e.remedy(r, at, answer), false}, err
}

// stuck finds out what on the host keeps a packet from src to dst, which came in by a link, from leaving the host, or
// the host from answering if it is for the host. No rule of nf_tables drops it.
func (e *examination) stuck(ctx context.Context, src, dst netip.Addr, link int, t *trail, isForHost bool) (loss, error) {
	name := e.name(ctx, link)
	isAnswer := src != e.own
	passed := t.passed[isAnswer]
	what := fmt.Sprintf("it comes to the host by %s", name)
	if isAnswer {
		what = fmt.Sprintf("the answer comes to the host by %s", name)
	}
	untraced := func(hook string) (loss, error) {
		l := loss{StepFirewall, fmt.Sprintf("%s and is lost in the hook %s, by no rule of nf_tables", what, hook), "see the rules that cannot be traced: iptables-legacy-save; ip6tables-legacy-save", false}
		for _, o := range e.obstacles {
			if o.Legacy && hook == "forward" {
				l.evidence, l.remedy = l.evidence+": "+o.Chain+" "+o.Effect+" it", o.Remedy
			}
		}
		count, _ := sysctl.Read("net/netfilter/nf_conntrack_count")
		most, _ := sysctl.Read("net/netfilter/nf_conntrack_max")
		if hook == "prerouting" && count != "" && len(count) >= len(most) && count >= most {
			l.evidence, l.remedy = l.evidence+": connection tracking is full, with "+count+" entries", "sysctl -w net/netfilter/nf_conntrack_max=TWICE_AS_MANY"
		}
		return l, nil
	}
	switch {
	case t.request.ethertype == unix.ETH_P_ARP:
		return loss{StepGateway, what + ", and the host does not answer", "see nft list ruleset arp; arptables-legacy -L; sysctl net.ipv4.conf.all.arp_ignore net.ipv4.conf." + name + ".arp_ignore", false}, nil
	case !passed[beganPrerouting]:
		return loss{StepGateway, what + ", and the host does not take it", "see whether the pod knows the MAC of " + name + ": " + e.inside() + "ip neigh", false}, nil
	case !passed[passedPrerouting]:
		return untraced("prerouting")
	case isForHost && passed[passedInput]:
		return loss{StepFirewall, "the host takes it and sends no answer", "see sysctl net.ipv4.icmp_echo_ignore_all net.ipv6.icmp.echo_ignore_all, and whether a rule of the hook output drops the answer", false}, nil
	case passed[beganInput]:
		return untraced("input")
	case passed[passedPostrouting]:
		return e.unsent(ctx, src, dst, link, what)
	case passed[passedForward]:
		return untraced("postrouting")
	case passed[beganForward]:
		return untraced("forward")
	}
	_, err := e.onHost.GetFrom(ctx, src, dst, link)
	return e.unrouted(ctx, src, dst, name, what, err)
}

// unrouted explains why the kernel has no way for a packet.
func (e *examination) unrouted(ctx context.Context, src, dst netip.Addr, name, what string, err error) (loss, error) {
	if err == nil || !route.NoRoute(err) && !errors.Is(err, unix.EXDEV) {
		return loss{StepForwarding, what + " and is lost before it is forwarded", fmt.Sprintf("see ip route get %s from %s iif %s", dst, src, name), false}, err
	}
	l := loss{StepForwarding, fmt.Sprintf("%s, which does not forward it: %v", what, err), routed, false}
	back, _ := e.onHost.Get(ctx, src)
	filter, _ := sysctl.Read(sysctl.Link("ipv4", name, "rp_filter"))
	all, _ := sysctl.Read(sysctl.Link("ipv4", "all", "rp_filter"))
	// Newer kernels report EINVAL for what a filter drops, as for a blackhole.
	if (errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EINVAL)) && max(filter, all) == "1" && src.Is4() && e.name(ctx, back.Link) != name {
		l.evidence = fmt.Sprintf("%s, whose reverse path filter drops it (net.ipv4.conf.%s.rp_filter), since the way to %s is another", what, name, src)
		l.remedy = "sysctl -w net/ipv4/conf/" + name + "/rp_filter=2"
		return l, nil
	}
	rules, rulesErr := routing.Rules(e.hostSocket)
	if rule, ok := routing.Foreign(rules, src, dst, name, 0); ok {
		l.evidence, l.remedy = l.evidence+", because of the rule "+rule.String(), rule.Ahead("iif "+name)
		return l, rulesErr
	}
	refusing := route.Route{}
	listErr := e.onHost.Walk(ctx, route.Filter{Family: nl.FamilyOf(dst)}, func(r route.Route) {
		refuses := r.Type == unix.RTN_UNREACHABLE || r.Type == unix.RTN_BLACKHOLE || r.Type == unix.RTN_PROHIBIT
		if refuses && r.Dst.Contains(dst) && r.Dst.Bits() >= refusing.Dst.Bits() {
			refusing = r
		}
	})
	if refusing.Dst.IsValid() {
		l.evidence += ", because of the route " + refusing.String()
	}
	if refusing.Protocol == unix.RTPROT_BOOT || refusing.Protocol == unix.RTPROT_STATIC { // else a routing engine's
		l.remedy = fmt.Sprintf("unless it is meant: ip route del %s %s table %d", refusing.Type, refusing.Dst, refusing.Table)
	}
	return l, errors.Join(rulesErr, listErr)
}

// unsent explains why a packet passed the firewall and did not leave.
func (e *examination) unsent(ctx context.Context, src, dst netip.Addr, link int, what string) (loss, error) {
	r, err := e.onHost.GetFrom(ctx, src, dst, link)
	if err != nil {
		return e.unrouted(ctx, src, dst, e.name(ctx, link), what, err)
	}
	hop, out := dst, e.name(ctx, r.Link)
	if r.Gateway.IsValid() {
		hop = r.Gateway
	}
	if n, err := routing.Find(e.hostSocket, r.Link, hop); err != nil || len(n.MAC) == 0 {
		return loss{StepBeyond, fmt.Sprintf("%s, and cannot be sent on, since %s does not answer by %s on %s", what, hop, protocolOf(hop), out), fmt.Sprintf("see whether %s is up and on the network of %s, or correct the route: ip route get %s", hop, out, dst), false}, nil
	}
	return loss{StepBeyond, fmt.Sprintf("%s, passes the firewall and is not sent by %s", what, out), fmt.Sprintf("see the filters of %s: tc filter show dev %s egress; nft list ruleset netdev", out, out), false}, nil
}
