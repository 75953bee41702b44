package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/nft/foreign"
	"github.com/tombolo-cni/tombolo/route"
)

// surroundings holds facts about the host that an Inspect reads once. Among them are the host's addresses, its routes
// from DHCP and router advertisements, its policy routing rules, and the records of all networks.
type surroundings struct {
	addresses []addr.Address
	learnt    []route.Route
	rules     []routing.Rule
	networks  []*state.Network
	queues    []string // rules that hand packets to a queue without a program
	strict    bool     // firewalld closes host ports that other programs publish (StrictForwardPorts)
}

// surroundings reads the facts about the host that an Inspect needs.
func (s *session) surroundings(ctx context.Context) (*surroundings, error) {
	networks, _, networksErr := s.Dir.ListNetworks()
	addresses, addressesErr := s.Links.Addresses().List(ctx, addr.Filter{})
	queues, queuesErr := s.deadQueues()
	_, strict, strictErr := s.foreignFirewall("").HasFirewalld(ctx)
	rules, rulesErr := routing.Rules(nl.Of(s.Links.Socket()))
	h := &surroundings{addresses: addresses, rules: rules, networks: networks, queues: queues, strict: strict}

	err := cmp.Or(stateError(networksErr), addressesErr, queuesErr, strictErr, rulesErr)
	for _, f := range []route.Filter{{Family: unix.AF_INET, Protocol: unix.RTPROT_DHCP},
		{Family: unix.AF_INET6, Protocol: unix.RTPROT_DHCP}, {Family: unix.AF_INET6, Protocol: unix.RTPROT_RA}} {
		list, listErr := s.Links.Routes().List(ctx, f)
		h.learnt, err = append(h.learnt, list...), cmp.Or(err, listErr)
	}

	return h, err
}

// deadQueues describes the rules that pass packets to a queue (NFQUEUE) to which no program listens. The kernel drops
// these packets, except for a rule with the flag bypass, which deadQueues skips. A NetworkPolicy engine that died
// leaves such rules.
func (s *session) deadQueues() (texts []string, _ error) {
	listening, err := nftnl.QueueListeners()
	if err != nil {
		return nil, err
	}
	conn := nftnl.Of(s.Firewall.Socket()).Conn
	for _, family := range []uint8{unix.NFPROTO_INET, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6, unix.NFPROTO_BRIDGE} {
		listErr := nftnl.List(conn, "list rules", family, unix.NFT_MSG_GETRULE, func(b []byte) error {
			q, ok := nftnl.QueueOf(b)
			for n := q.First; ok && !q.Bypass && n-q.First < q.Total; n++ {
				if listening[n] {
					continue
				}
				texts = append(texts, fmt.Sprintf("chain %s of table %s %s hands packets to queue %d, by its rule "+
					"with handle %d, and the kernel drops them, since no program listens there; this helps: start "+
					"that program, in a cluster the engine of its NetworkPolicies",
					nftnl.Text(nftnl.Find(b, unix.NFTA_RULE_CHAIN)), nftnl.FamilyName(family),
					nftnl.Text(nftnl.Find(b, unix.NFTA_RULE_TABLE)), n,
					nftnl.Number64(nftnl.Find(b, unix.NFTA_RULE_HANDLE))))
				break
			}
			return nil
		})
		err = cmp.Or(err, listErr)
	}

	return texts, err
}

// addSurroundings adds findings about those settings of the host or of other programs that certainly keep a network's
// pods from working. It notes settings that possibly keep pods from working in report.Others. CHECK does not report
// such settings, since no runtime can change them.
func (report *Inspection) addSurroundings(ctx context.Context, host *surroundings, n *site) error {
	if err := n.find(ctx); err != nil {
		return err
	}

	err := host.addClientFaults(ctx, n)
	if len(n.attachments) == 0 || err != nil {
		return err
	}

	for _, text := range host.queues {
		n.found.advise(tombolo.RemedyConfigure, "%s", text)
	}

	errs := []error{report.addChildLinks(ctx, n)}
	for _, a := range n.attachments {
		found, err := findListeners(ctx, a.ContainerID, endpoint.Ports(a), a.Addresses, false)
		errs = append(errs, err)
		for _, l := range found {
			if isLimited(a) {
				report.note("host port %d leads to container %s, and %s too, which gets only the packets of callers "+
					"that publishFrom excludes", l.Local.Port(), a.ContainerID, l)
				continue
			}
			n.found.advise(tombolo.RemedyConfigure,
				"host port %d leads to container %s, and %s too, which gets none of its packets: %s",
				l.Local.Port(), a.ContainerID, l, listenerAdvice(l))
		}
	}

	if b := n.bridge.Bridge; b != nil && b.PortDelay > 0 {
		n.found.advise(tombolo.RemedyConfigure, "%s", endpoint.SlowPorts(n.rec.Bridge, b.PortDelay))
	}

	if n.gatewayLink.Index != 0 && n.gatewayLink.Up && n.rec.Uplink == "" && len(n.rec.Gateways) > 0 {
		errs = append(errs, report.addGatewayFaults(ctx, host, n))
	}

	errs = append(errs, n.s.lookAtExits(ctx, &n.found))
	paths, err := n.s.reversePaths(ctx, n.rec)
	for _, path := range paths {
		n.found.advise(tombolo.RemedyConfigure, "%s", path)
	}

	list, listErr := n.s.obstacles(ctx, n.rec)
	errs = append(errs, err, listErr)
	for _, o := range list {
		if o.Maybe {
			report.note("%s", o)
		} else {
			n.found.advise(tombolo.RemedyConfigure, "%s", o)
		}
	}

	exists := func(name string) bool {
		l, missing := n.s.Links.Link(ctx, name)
		return !errors.Is(missing, fs.ErrNotExist) && (l == nil || l.Name == name)
	}
	for _, a := range n.attachments {
		for _, text := range endpoint.MissingLinks(strings.Join(a.PublishFrom, ","), exists) {
			report.note("network %s: %s", n.rec.Name, text)
		}
		if a.Unadmitted || host.strict {
			errs = append(errs, report.addOpenings(ctx, n, a))
		}
	}

	return errors.Join(errs...)
}

// isLimited reports whether the attachment's host ports are open to some callers only.
func isLimited(a *state.Attachment) bool {
	return slices.ContainsFunc(a.PublishFrom, func(list string) bool { return list != "all" })
}

// addOpenings notes in report.Others the commands that open an attachment's host ports in the host's firewall.
func (report *Inspection) addOpenings(ctx context.Context, n *site, a *state.Attachment) error {
	span := func(from, count uint16) string {
		if count < 2 {
			return fmt.Sprint(from)
		}
		return fmt.Sprintf("%d-%d", from, from+count-1)
	}

	for _, own := range endpoint.Addresses(a) {
		firewalls, err := n.s.foreignFirewall(n.rec.AdminChain).Openings(ctx, cmp.Or(a.NIC, a.GatewayLink()), own,
			!a.Unadmitted, isLimited(a))
		if err != nil {
			return err
		}

		for _, command := range firewalls {
			for _, p := range endpoint.Ports(a) {
				if p.HostAddr.IsValid() && p.HostAddr.Is4() != own.Is4() {
					continue
				}
				report.note("host port %s of %s is open only where a rule of the host's firewall, which outlives "+
					"the pod, accepts its calls; this helps: %s", endpoint.PortText(p), describe(a),
					command(p.Protocol.String(), span(p.HostPort, p.Count), span(p.PodPort, p.Count)))
			}
		}
	}

	return nil
}

// addClientFaults adds a finding if a DHCP client or router advertisements gave the host addresses or routes on a pod's
// port. It also looks at a bridge that Tombolo made for a network whose gateway is the host, and at the host's link in
// the network's VLAN. By such addresses and routes, a pod could direct the host's traffic.
func (h *surroundings) addClientFaults(ctx context.Context, n *site) error {
	links, err := n.s.Links.Veths(ctx)
	links = slices.DeleteFunc(links, func(l bridge.Link) bool {
		a, ok := endpoint.ParseAlias(l.Alias)
		return !ok || a.Network != endpoint.NetworkToken(n.rec.Name)
	})
	if len(n.rec.Gateways) > 0 && n.rec.Uplink == "" && n.gatewayLink.Index != 0 &&
		n.bridge.Alias == endpoint.BridgeAlias {
		links = append(links, *n.bridge)
		if n.gatewayLink != n.bridge {
			links = append(links, *n.gatewayLink)
		}
	}

	for _, l := range links {
		var list []string
		for _, a := range h.addresses {
			if a.Link == l.Index && a.Flags&unix.IFA_F_PERMANENT == 0 {
				list = append(list, a.Prefix.String())
			}
		}

		for _, r := range h.learnt {
			if r.Link == l.Index {
				r.Link = 0
				list = append(list, r.String())
			}
		}

		if len(list) > 0 {
			n.found.advise(tombolo.RemedyConfigure, "a DHCP client of the host, or a router advertisement, gave %[1]s "+
				"what pods may have sent: %s: keep network managers off it (docs/operating.md, \"Network managers\"), "+
				"and then: ip address flush dev %[1]s dynamic; ip route flush dev %[1]s proto dhcp; "+
				"ip -6 route flush dev %[1]s proto ra", l.Name, strings.Join(list, ", "))
		}
	}

	return err
}

// addGatewayFaults adds findings about faults that other programs cause at the link with the network's gateways, and in
// the routes to and from it.
func (report *Inspection) addGatewayFaults(ctx context.Context, host *surroundings, n *site) error {
	errs := []error{report.addStrangeAddresses(ctx, host, n)}
	if slices.ContainsFunc(n.rec.Gateways, isIPv6) {
		errs = append(errs, report.addDeafLinks(ctx, n.s, host))
	}

	for _, gw := range n.rec.Gateways {
		var pods []netip.Addr
		for _, a := range n.attachments {
			pods = append(pods, endpoint.Addresses(a)...)
		}
		pods = slices.DeleteFunc(pods, func(a netip.Addr) bool { return !gw.Contains(a) })
		if len(pods) > 0 && has(host.addresses, gw) {
			errs = append(errs, host.addRuleFaults(ctx, n, gw, pods))
		}
	}

	return errors.Join(errs...)
}

// addStrangeAddresses finds addresses of the gateways' link outside of all recorded gateways' subnets. Such an address
// directs its subnet to the bridge. If the host has another route to that subnet, such as a route to another node's
// pods, the address is a fault. Otherwise addStrangeAddresses adds a note to report.Others, unless the host's default
// route uses the link: then the address is the host's own. It skips link-local addresses. It also skips addresses with
// a lifetime, which belong to a running program.
func (report *Inspection) addStrangeAddresses(ctx context.Context, host *surroundings, n *site) error {
	routes := n.s.Links.Routes()
	for _, a := range host.addresses {
		known := slices.ContainsFunc(host.networks, func(o *state.Network) bool {
			return o.GatewayLink() == n.gatewayLink.Name && slices.ContainsFunc(o.Gateways, a.Prefix.Overlaps)
		})
		if a.Link != n.gatewayLink.Index || known || a.Prefix.Addr().IsLinkLocalUnicast() ||
			a.Flags&unix.IFA_F_PERMANENT == 0 {
			continue
		}

		subnet, other := a.Prefix.Masked(), ""
		f := route.Filter{Family: nl.FamilyOf(subnet.Addr()), Table: unix.RT_TABLE_MAIN}
		err := routes.Walk(ctx, f, func(r route.Route) {
			if r.Link != n.gatewayLink.Index && r.Dst.Bits() > 0 && r.Dst.Overlaps(subnet) {
				other = ", in place of the route " + r.String()
			}
		})
		if err != nil {
			return err
		}

		text := fmt.Sprintf("bridge %s has the address %s, which no network has on record and which leads %s to the "+
			"bridge%s; unless the address is meant, this helps: ip address del %[2]s dev %[1]s",
			n.gatewayLink.Name, a.Prefix, subnet, other)
		general, _ := routes.Get(ctx, routing.Outside(subnet.Addr()))
		switch {
		case other != "":
			n.found.advise(tombolo.RemedyConfigure, "%s", text)
		case general.Link != n.gatewayLink.Index: // else the host itself uses the link, with its own address
			report.note("%s", text)
		}
	}

	return nil
}

// addDeafLinks notes links that ignore router advertisements because the host forwards IPv6. It notes them only if the
// host has no IPv6 default route.
func (report *Inspection) addDeafLinks(ctx context.Context, s *session, host *surroundings) error {
	if _, err := s.Links.Routes().Get(ctx, routing.Outside(netip.IPv6Unspecified())); !route.NoRoute(err) {
		return err
	}

	for _, a := range host.addresses {
		if !isIPv6(a.Prefix) || !a.Prefix.Addr().IsLinkLocalUnicast() {
			continue
		}

		l, err := s.Links.LinkByIndex(ctx, a.Link)
		if err != nil || l.AcceptRA != 1 || l.Master != 0 || strings.HasPrefix(l.Alias, endpoint.AliasPrefix) {
			continue // the link may be gone
		}
		if forwards, err := sysctl.Read(sysctl.Link("ipv6", l.Name, "forwarding")); err == nil && forwards != "0" {
			report.note("link %[1]s ignores router advertisements, because the host forwards IPv6 "+
				"(net.ipv6.conf.%[1]s.accept_ra is 1), and has no default route of IPv6; if a router is there, with "+
				"its next advertisement this helps: sysctl -w net/ipv6/conf/%[1]s/accept_ra=2", l.Name)
		}
	}

	return nil
}

// addRuleFaults adds findings about policy routing rules that lead pods' packets elsewhere. It asks the kernel for the
// route from each of the host's addresses to a pod of the gateway's subnet. It also asks for the route from the pods to
// other destinations. hostRoutePart finds the settings that direct packets from every address away from the bridge.
func (h *surroundings) addRuleFaults(ctx context.Context, n *site, gw netip.Prefix, pods []netip.Addr) error {
	routes, at := n.s.Links.Routes(), n.gatewayLink
	for _, a := range h.addresses {
		own, pod := a.Prefix.Addr(), pods[0]
		_, ruled := routing.Foreign(h.rules, own, pod, "lo", 0)
		if !ruled || own.Is4() != pod.Is4() || own.IsLoopback() || own.IsLinkLocalUnicast() {
			continue
		}

		r, err := routes.GetFrom(ctx, own, pod, 0)
		way := r.String()
		switch {
		case route.NoRoute(err):
			way = err.Error()
		case err != nil:
			return err
		case r.Link == at.Index:
			continue
		}

		general, _ := routes.Get(ctx, pod)
		if rule, ok := routing.Foreign(h.rules, own, pod, "lo", r.Table); ok && general.Link == at.Index {
			n.found.advise(tombolo.RemedyConfigure, "what the host sends from %s to pods does not go by %s, because "+
				"of the rule %s (%s); this helps: %s", own, at.Name, rule, way, rule.Ahead("to "+gw.Masked().String()))
		}
	}

	for _, pod := range pods {
		outside := routing.Outside(pod)
		rule, ruled := routing.Foreign(h.rules, pod, outside, at.Name, 0)
		if _, err := routes.Get(ctx, outside); !ruled || err != nil {
			continue // no other rule applies, or the host has no route either
		}
		if _, err := routes.GetFrom(ctx, pod, outside, at.Index); route.NoRoute(err) {
			n.found.advise(tombolo.RemedyConfigure, "the host does not send on what the pod %s sends to elsewhere, "+
				"because of the rule %s (%v); unless it is meant for pods, this helps: %s",
				pod, rule, err, rule.Ahead("iif "+at.Name))
			break
		}
	}

	return nil
}

// cutBridges describes other programs' bridges whose ports the host's firewall separates, because br_netfilter passes
// bridged packets to the firewall. With a planned bridge, it also describes the bridges that would be separated once
// br_netfilter is loaded. It skips a bridge that a drop rule names, since the rule's owner intends that. It skips the
// bridges of our networks, where a rule of ours accepts bridged packets.
func (s *session) cutBridges(ctx context.Context, planned string) (texts []string, _ error) {
	setting, err := sysctl.Read("net/bridge/bridge-nf-call-iptables")
	if setting == "0" || err != nil && planned == "" {
		return nil, nil
	}

	cause := "br_netfilter shows what it forwards to the host's firewall"
	if planned != "" {
		cause = `br_netfilter (for "defaultRoute": "host"), once loaded, shows what it forwards to the host's firewall`
	}

	drops := func(name string) ([]foreign.Obstacle, error) {
		return s.foreignFirewall("").Obstacles(ctx, foreign.Path{Bridge: name, Switched: true})
	}
	general, err := drops("any bridge")
	if err != nil || len(general) == 0 {
		return nil, err
	}

	networks, _, err := s.Dir.ListNetworks()
	if err != nil {
		return nil, stateError(err)
	}

	isOurs := func(name string) bool {
		return name == planned || slices.ContainsFunc(networks, func(n *state.Network) bool { return n.Bridge == name })
	}
	bridges, ports := map[int]string{}, map[int][]string{}
	err = link.List(nl.Of(s.Links.Socket()), "list links", "", 0, func(l *link.Info) {
		if l.PortOf == "bridge" {
			ports[l.Master] = append(ports[l.Master], l.Name)
		}
		if l.Kind == "bridge" && !isOurs(l.Name) {
			bridges[l.Index] = l.Name
		}
	})

	for _, index := range slices.Sorted(maps.Keys(bridges)) {
		if err != nil || len(ports[index]) < 2 {
			continue
		}

		var found []foreign.Obstacle
		found, err = drops(bridges[index])
		isMeant := func(o foreign.Obstacle) bool { return !slices.Contains(general, o) }
		if len(found) == 0 || slices.ContainsFunc(found, isMeant) {
			continue
		}

		verb := "drops"
		if found[0].Maybe {
			verb = "may drop"
		}

		texts = append(texts, fmt.Sprintf("bridge %s of another program has the ports %s; %s, and %s %s it; "+
			"unless that is meant, this helps, and bridges of Tombolo keep their own setting: "+
			"sysctl -w net.bridge.bridge-nf-call-iptables=0 net.bridge.bridge-nf-call-ip6tables=0",
			bridges[index], strings.Join(ports[index], ", "), cause, found[0].Chain, verb))
	}

	return texts, err
}
