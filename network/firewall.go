package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// firewallPart implements part for the network's rules in our own nf_tables tables. The elements in the tables' sets
// belong to the pods (endpoint.go).
type firewallPart struct{}

func (firewallPart) look(ctx context.Context, n *site) error {
	if n.quick && n.bridge.Index == 0 {
		return nil // bridgePart reports the missing bridge
	}

	if n.closed == nil {
		if _, err := n.lookAtForwarding(ctx, n.neededRouting()); err != nil {
			return err
		}
	}

	rules := n.firewallNetwork()
	return n.lookAtRules("the rules of network "+n.rec.Name,
		func() (bool, error) { return n.s.Firewall.Ready(ctx, rules) },
		func() ([]tombolo.Difference, error) { return n.s.Firewall.Check(ctx, rules) })
}

// lookAtRules compares rules, and adds the differences to n.found. what names the rules. With n.quick it first calls
// ready. If ready reports true, it adds nothing. Otherwise it calls check for the single differences. For an Add it
// skips check and adds only one general difference, since the Add then builds the network anyway.
func (n *site) lookAtRules(what string, ready func() (bool, error), check func() ([]tombolo.Difference, error)) error {
	if n.quick {
		if ok, err := ready(); ok || err != nil {
			return err
		}
	}

	var diffs []tombolo.Difference
	var err error
	if n.required == nil || !n.quick {
		diffs, err = check()
	}

	n.found.addAll(diffs, tombolo.RemedyRepair)
	if n.quick && err == nil && len(diffs) == 0 {
		n.found.add("%s were touched", what)
	}

	return err
}

func (firewallPart) make(ctx context.Context, n *site) (bool, error) {
	return n.s.Firewall.Prepare(ctx, n.firewallNetwork())
}

// declareMended adds the sentinel elements, which mark the firewall's sets as complete. If a set is new or was emptied,
// declareMended first adds the elements of the repaired pods again. It also writes the facts about the host (setHost).
func declareMended(ctx context.Context, s *session, sites ...*site) error {
	var back []nft.Endpoint // endpoints of all networks, since networks share sets
	for _, n := range sites {
		back = append(back, n.restored...)
	}

	for _, n := range sites {
		if _, err := s.Firewall.Ensure(ctx, n.firewallNetwork(), back...); err != nil {
			return fmt.Errorf("network %s: %w", n.rec.Name, err)
		}
	}

	if len(sites) == 0 {
		return nil // there are no rules
	}

	// Another program may have flushed the facts about the host too, so write them again.
	return s.setHost(ctx)
}

// refuseUnfiltered returns an error if the network has egress policies that cannot be enforced on its bridge.
func refuseUnfiltered(rec *state.Network) error {
	if rec.Egress == "" && !rec.PodEgress {
		return nil
	}

	if rec.NFCall == nil || !*rec.NFCall {
		return failf(ErrInvalid,
			"network %q: egressPolicy needs bridgeNFCall, without which pods reach each other past the host's "+
				"firewall: set it to true", rec.Name)
	}

	if err := bridge.ProbeNetfilter(); err != nil {
		return fmt.Errorf("egressPolicy: %w", err)
	}

	return nil
}

// refuseOthers returns an error if another network with pods has another packet mark, or another egress policy on the
// same bridge. All networks share the rules that contain the mark.
func refuseOthers(s *session, rec *state.Network) error {
	others, err := s.otherNetworks(rec.Name)
	for _, o := range others {
		otherEgress := o.Bridge == rec.Bridge && o.Egress != rec.Egress
		if (o.Mark == 0 || o.Mark == rec.Mark) && !otherEgress {
			continue
		}

		attachments, err := s.attachments(o.Name)
		if err != nil {
			return err
		}

		if len(attachments) > 0 && otherEgress {
			return failf(ErrConflict,
				"egressPolicy %q: network %q, which has pods on bridge %s too, has %q: give both the same, or "+
					"another bridge", rec.Egress, o.Name, o.Bridge, o.Egress)
		}

		if len(attachments) > 0 {
			return failf(ErrConflict,
				"forwardMark %#x: network %q, which has pods, uses %#x, and all networks of a node share one: give "+
					"both the same", rec.Mark, o.Name, o.Mark)
		}
	}

	return err
}

// firewallNetwork returns the firewall's description of the network, from the network's record and the state of its
// bridge.
func (n *site) firewallNetwork() nft.Network {
	rec, l := n.rec, n.bridge
	nw := nft.Network{
		Name: rec.Name, Bridge: rec.GatewayLink(), Prefixes: rec.Subnets,
		Masquerade: rec.Masquerade, NonMasquerade: rec.NonMasquerade,
		Policy: max(rec.Policy,
			rec.ChainedPolicy), Guard: rec.Guards(), PortSNAT: rec.PortSNAT, Groups: true, LAN: rec.DefaultRoute != "",
		Gateway: rec.DefaultRoute == "" && len(rec.Gateways) > 0, Closed: n.closed, Share: n.share,
		Internal: rec.Internal, NFCall: callsFirewall(l), PodEgress: rec.PodEgress,
		Egress:      endpoint.WithResolvers(rec.Egress, rec.Resolvers),
		DropReports: rec.SLAAC || slices.ContainsFunc(rec.Subnets, isIPv6),
	}
	if rec.VLAN.ID != 0 {
		nw.VLANOf = rec.Bridge
	}

	if !l.Promiscuous || l.Bridge == nil { // another link may have the name
		return nw
	}

	// On a promiscuous bridge, only packets that pass the firewall while they are bridged arrive twice. A Dedup rule
	// for other packets would drop the only copy.
	for _, gw := range rec.Gateways {
		if passesFirewall(l.Bridge, gw.Addr().Is4()) {
			nw.Dedup = append(nw.Dedup, nft.Dedup{BridgeMAC: l.MAC, Gateway: gw.Addr(), Subnet: gw.Masked()})
		}
	}

	return nw
}

// passesFirewall reports whether packets that a bridge forwards pass the host's firewall: IPv4 packets if ipv4 is
// true, else IPv6 packets. Either an attribute of the bridge or a parameter of the calling thread's namespace turns
// this on.
func passesFirewall(b *bridge.BridgeState, ipv4 bool) bool {
	own, path := b.NFCallIPTables, "net/bridge/bridge-nf-call-iptables"
	if !ipv4 {
		own, path = b.NFCallIP6Tables, "net/bridge/bridge-nf-call-ip6tables"
	}
	all, err := sysctl.Read(path)

	// If the sysctl does not exist, br_netfilter is not loaded, and the bridge's attribute has no effect.
	return err == nil && (own || all == "1")
}

// callsFirewall reports whether the bridge's attributes make bridged packets of both families pass the firewall, and
// br_netfilter is loaded.
func callsFirewall(l *bridge.Link) bool {
	return l.Bridge != nil && l.Bridge.NFCallIPTables && l.Bridge.NFCallIP6Tables && bridge.ProbeNetfilter() == nil
}

// hostPart implements part for the facts about the host in the firewall's rules, which all networks share
// (nft.Conn.SetHost). Uplinks are the bridges and veth links that lead to the host's own network (bridge.Conn.Uplinks).
// Service addresses are the addresses of the link kube-ipvs0. kube-proxy in IPVS mode keeps the addresses of all
// services there. The kernel takes them for the host's own, so host ports without a hostIP must leave them alone.
type hostPart struct{}

// look compares the service addresses in the firewall with the addresses of the link kube-ipvs0, and adds a finding if
// they differ. It leaves the uplinks to lookAtExits, since comparing them takes a list of all links.
func (hostPart) look(ctx context.Context, n *site) error {
	if n.bridge.Index == 0 || n.quick && !slices.ContainsFunc(n.pods(), endpoint.PublishesIPv4) {
		return nil
	}

	services, err := n.s.services(ctx)
	if err != nil || n.quick && len(services) == 0 {
		return err
	}

	_, known, err := n.s.Firewall.Host(ctx)
	slices.SortFunc(known, netip.Addr.Compare)
	if err == nil && !slices.Equal(known, services) {
		n.found.advise(tombolo.RemedyRepair,
			"host ports without a hostIP spare other addresses than those of %s", link.ServiceLink)
	}
	return nl.PassAbsent(err) // firewallPart reports a missing table
}

func (hostPart) make(ctx context.Context, n *site) (bool, error) { return false, n.s.setHost(ctx) }

// setHost updates the facts about the host in the firewall's rules: its uplinks and service addresses (see hostPart),
// and the links that tombolod added to firewalld's zone trusted. Without rules it does nothing.
func (s *session) setHost(ctx context.Context) error {
	uplinks, err := s.uplinks(ctx)
	services, servicesErr := s.services(ctx)
	trusted, trustedErr := s.trusted(ctx)
	if err := errors.Join(err, servicesErr, trustedErr); err != nil {
		return err
	}

	return nl.PassAbsent(s.Firewall.SetHost(ctx, uplinks, trusted, services))
}

// trusted lists the links that tombolod added to firewalld's zone trusted. Without rules of firewalld it returns
// none.
func (s *session) trusted(ctx context.Context) ([]string, error) {
	zones, err := s.Dir.Zones()
	if err != nil || len(zones.Joined) == 0 {
		return nil, err
	}
	is, _, err := s.foreignFirewall("").HasFirewalld(ctx)
	if !is {
		return nil, err
	}
	return zones.Joined, err
}

// uplinks returns the names of the host's uplinks (bridge.Conn.Uplinks), without the bridges of our networks.
func (s *session) uplinks(ctx context.Context) ([]string, error) {
	records, _, err := s.Dir.ListNetworks()
	if err != nil {
		return nil, err
	}
	return s.Links.Uplinks(ctx, convertAll(records, func(rec *state.Network) string { return rec.Bridge })...)
}

// lookAtExits adds a finding for each uplink of the host that the rules do not contain. It needs several lists from
// the kernel, which would take too long for Add and Check.
func (s *session) lookAtExits(ctx context.Context, found *findings) error {
	known, _, err := s.Firewall.Host(ctx)
	if err != nil {
		return nl.PassAbsent(err) // firewallPart reports a missing table
	}

	names, err := s.uplinks(ctx)
	for _, name := range names {
		if !slices.Contains(known, name) {
			found.advise(tombolo.RemedyRepair,
				"%s, an uplink of the host, is missing in set uplinks of table inet tombolo", name)
		}
	}

	return err
}

// services returns the sorted addresses of kube-ipvs0, without link-local ones.
func (s *session) services(ctx context.Context) (list []netip.Addr, _ error) {
	l, err := s.link(ctx, link.ServiceLink)
	if err != nil || l.Index == 0 {
		return nil, err
	}

	addresses, err := s.Links.Addresses().List(ctx, addr.Filter{Link: l.Index})
	for _, a := range addresses {
		if own := a.Prefix.Addr(); !own.IsLinkLocalUnicast() {
			list = append(list, own)
		}
	}

	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list), err
}

// admissionPart implements part for our rules in iptables' chain FORWARD, which make the host's own firewall accept the
// pods' packets. All networks share these rules.
type admissionPart struct{}

func (admissionPart) look(ctx context.Context, n *site) error {
	conn := n.s.foreignFirewall(n.rec.AdminChain)
	return n.lookAtRules("the rules in FORWARD", func() (bool, error) { return conn.Ready(ctx) },
		func() ([]tombolo.Difference, error) { return conn.Check(ctx) })
}

func (admissionPart) make(ctx context.Context, n *site) (bool, error) {
	_, err := n.s.foreignFirewall(n.rec.AdminChain).Ensure(ctx)
	return false, err
}

// refuseCertainObstacles returns an error if firewall settings of other programs certainly stop the pods' packets.
// firewalld is true if there are such settings, and all are firewalld's.
func refuseCertainObstacles(ctx context.Context, s *session, rec *state.Network) (firewalld bool, _ error) {
	list, err := s.obstacles(ctx, rec)
	firewalld = true
	var texts []string
	for _, o := range list {
		if !o.Maybe {
			texts = append(texts, o.String())
			firewalld = firewalld && o.Firewalld
		}
	}

	if len(texts) == 0 || err != nil {
		return false, err
	}

	return firewalld, failf(ErrObstructed, "%s", strings.Join(texts, "; "))
}

// refuseObstacles returns an error if firewall settings of other programs stop the pods' packets, and tombolod cannot
// change them. tombolod adds a gateway's bridge to firewalld's zone trusted once the network is on record. zonePending
// is true if all of these settings are firewalld's, and tombolod has yet to add the bridge.
func refuseObstacles(ctx context.Context, s *session, rec *state.Network, gateway bool) (zonePending bool, _ error) {
	firewalld, err := refuseCertainObstacles(ctx, s, rec)
	if firewalld && gateway && rec.Uplink == "" && s.Dir.ZonesAttended(rec.GatewayLink()) {
		return true, nil
	}
	return false, err
}

// awaitZone waits, for at most 8 s, until tombolod has configured firewalld for the network's pods. If firewalld still
// stops the packets then, it returns an error. firewalld takes some 0.1 s, and longer with many rules. During the wait,
// the record lacks the hash of the configuration. So if this ADD fails, the next ADD builds the network again, and
// waits too.
func awaitZone(ctx context.Context, s *session, rec *state.Network) error {
	err := saveEarly(s, rec)
	if err != nil {
		return err
	}

	_ = poll(ctx, 20*time.Millisecond, 8*time.Second, func() (done bool, _ error) {
		var firewalld bool
		firewalld, err = refuseCertainObstacles(ctx, s, rec)
		return !firewalld || !s.Dir.ZonesAttended(rec.GatewayLink()), nil
	})
	return err
}

// foreignFirewall returns a connection to other programs' firewalls, over the session's nf_tables socket.
func (s *session) foreignFirewall(adminChain string) *foreign.Conn {
	return foreign.On(s.Firewall.Socket(), &foreign.Config{Mark: s.Mark, AdminChain: adminChain})
}

// obstacles lists the parts of other programs' firewalls that drop or may drop packets of a network's pods, and that
// we do not change. It returns none if the pods' router is on the LAN and bridged packets skip the firewall: then no
// rule of the host sees the pods' packets.
func (s *session) obstacles(ctx context.Context, rec *state.Network) ([]foreign.Obstacle, error) {
	if rec.DefaultRoute == string(ExitRouter) && !filtersBridged(rec, true) && !filtersBridged(rec, false) {
		return nil, nil
	}

	name := rec.GatewayLink()
	if rec.DefaultRoute == exitHost {
		nic, err := s.sharedNIC(ctx, rec)
		if err != nil {
			return nil, err
		}
		name = cmp.Or(nic, name)
	}

	return s.foreignFirewall(rec.AdminChain).Obstacles(ctx, foreign.Path{Bridge: name, Prefixes: rec.Subnets})
}

// sharedNIC returns the name of the NIC that the network's bridge shares or will share, or "" if there is none.
func (s *session) sharedNIC(ctx context.Context, rec *state.Network) (string, error) {
	if rec.Uplink == "" {
		return "", nil
	}

	nic, err := s.shares().Find(ctx, shareOf(rec))
	if err != nil || nic.Master != 0 {
		return "", nl.PassAbsent(err) // uplinkPart reports a missing NIC
	}
	return nic.Name, nil
}

// filtersBridged reports whether packets that the network's bridge forwards pass the host's firewall: IPv4 packets if
// ipv4 is true, else IPv6 packets. A nil NFCall counts as on only with default routes through the host.
func filtersBridged(rec *state.Network, ipv4 bool) bool {
	own := rec.NFCall == nil && rec.DefaultRoute == exitHost || rec.NFCall != nil && *rec.NFCall
	return passesFirewall(&bridge.BridgeState{NFCallIPTables: own, NFCallIP6Tables: own}, ipv4)
}

// reversePaths describes the rules that drop packets from pods at a shared NIC because of their reverse path. Such a
// rule compares the incoming link, which is the bridge, with the route back, which leads through the NIC. It returns
// none if the network shares no NIC, or bridged packets do not pass the firewall.
func (s *session) reversePaths(ctx context.Context, rec *state.Network) ([]string, error) {
	var families []uint8
	if filtersBridged(rec, true) {
		families = append(families, unix.NFPROTO_IPV4)
	}

	hasIPv6 := rec.SLAAC || slices.ContainsFunc(rec.Subnets, isIPv6)
	if hasIPv6 && filtersBridged(rec, false) {
		families = append(families, unix.NFPROTO_IPV6)
	}

	if len(families) == 0 {
		return nil, nil
	}

	if nic, err := s.sharedNIC(ctx, rec); err != nil || nic == "" {
		return nil, err
	}

	return s.foreignFirewall("").ReversePaths(ctx, rec.Bridge, families...)
}

// Admit sets an ingress policy for the network of an attached pod. The stricter of this policy and Network.Policy
// applies. If adminChain is not empty, Admit also makes iptables call this chain of the operator first, if iptables
// works over nf_tables (foreign.Config). If there is no record of the attachment, or its Add is not complete, the
// error matches ErrNotAttached. Admit need not make other firewalls accept the pod's packets, since the pod's Add has
// done so.
func (c Change) Admit(ctx context.Context, policy nft.Policy, adminChain string) error {
	a, err := c.node.loadAttachment(c.key)
	if err != nil {
		return err
	}

	return c.node.withEntered(ctx, func(s *session) error {
		_, err := prepareForHostPorts(ctx, s, a, func(nw *state.Network) bool {
			changes := nw.ChainedPolicy != policy || nw.AdminChain != adminChain
			nw.ChainedPolicy, nw.AdminChain = policy, adminChain
			return changes
		})
		return err
	})
}
