package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/share"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/uplink"
	"github.com/tombolo-cni/tombolo/nft"
)

// uplinkPart implements part for the connection of the bridge to the LAN through a NIC of the host. A NIC that is a
// port of the bridge is used as it is. Otherwise the host keeps the NIC, and the bridge shares it (package share).
type uplinkPart struct{}

// foundUplink describes the NIC of a network as a call finds it.
type foundUplink struct {
	nic    *bridge.Link // Index 0 if the host has no such link; nil if the network has no uplink
	shared bool         // the bridge shares the NIC, or would share it: the NIC is no port of the bridge
	ready  bool         // share.Conn.Ready found that the share needs no Ensure
}

// shareOf returns the description of a network's share of its NIC.
func shareOf(rec *state.Network) share.Share {
	return share.Share{
		NIC: rec.Uplink, Bridge: rec.Bridge, Alias: endpoint.ShareAlias, Promiscuous: !rec.MadePromiscuous,
	}
}

// shares returns a connection for the shares of NICs. It uses the session's socket.
func (s *session) shares() *share.Conn { return share.On(s.Links.Socket()) }

// findUplink looks up the network's NIC and, if the bridge shares the NIC, the veth pair of the share. In that case
// n.gatewayLink becomes the NIC, since the host routes through it to the pods.
func (n *site) findUplink(ctx context.Context) error {
	n.share, n.uplink = nil, foundUplink{}
	if n.rec.Uplink == "" {
		return nil
	}

	nic, err := n.s.shares().Find(ctx, shareOf(n.rec))
	if errors.Is(err, fs.ErrNotExist) {
		n.uplink.nic = &bridge.Link{Name: n.rec.Uplink}
		return nil
	}

	if err != nil {
		return err
	}

	n.uplink.nic = nic
	n.uplink.shared = n.bridge.Index == 0 || nic.Master != n.bridge.Index
	if !n.uplink.shared || n.bridge.Index == 0 {
		return nil
	}

	outer, err := n.s.shares().Ready(ctx, shareOf(n.rec), nic)
	if err != nil {
		return err
	}

	name, port := share.Pair(n.rec.Bridge)
	if n.uplink.ready = outer != 0; !n.uplink.ready {
		end, err := n.s.link(ctx, name)
		if err != nil || end.Index == 0 {
			return err
		}
		outer = end.Index
	}

	n.gatewayLink, n.share = nic, &nft.Share{NIC: nic.Name, MAC: nic.MAC, Outer: outer, Port: port}
	return nil
}

// sharedNIC returns the name of the NIC that the bridge shares, or "" if it shares none.
func (n *site) sharedNIC() string {
	if n.share == nil {
		return ""
	}
	return n.share.NIC
}

// followNIC corrects a pod's record if it does not name the NIC that the bridge shares now. The keys of the pod's
// elements contain that name, so followNIC deletes the old elements, and endpointPart adds new ones. While the host has
// no such NIC, the old elements stay.
func (n *site) followNIC(ctx context.Context, a *state.Attachment) error {
	if a.State != state.Ready {
		a.NIC = n.sharedNIC() // the Add in progress records this
	}

	if a.NIC == n.sharedNIC() || n.rec.Uplink != "" && n.uplink.nic.Index == 0 {
		return nil
	}

	err := n.s.withLockedRecord(a.Network, a.Hash(), func(now *state.Attachment) error {
		if err := n.s.Firewall.RemoveOwners(ctx, nft.Owner(a.Hash())); err != nil {
			return err
		}
		now.NIC = n.sharedNIC()
		return n.s.Dir.UpdateLocked(now)
	})
	if errors.Is(err, state.ErrBusy) || errors.Is(err, fs.ErrNotExist) {
		return nil // another call is working on it, or has removed it
	}

	a.NIC = n.sharedNIC()
	return err
}

// disableIPv6Path returns the path of the parameter disable_ipv6 of the network's bridge. It returns "" if the bridge
// is not ours, or if the parameter does not exist.
func (n *site) disableIPv6Path() string {
	path := sysctl.Link("ipv6", n.rec.Bridge, "disable_ipv6")
	if n.bridge.Alias != endpoint.BridgeAlias || !sysctl.Exists(path) {
		return ""
	}
	return path
}

// lookAtParameter adds a finding if the kernel parameter at path differs from want. It does nothing if path is empty or
// cannot be read.
func (n *site) lookAtParameter(path, want string) {
	if have, err := sysctl.Read(path); path != "" && err == nil && have != want {
		differs := tombolo.Difference{Object: "kernel parameters", What: path, Want: want, Have: have}
		n.found.addAll([]tombolo.Difference{differs}, tombolo.RemedyRepair)
	}
}

func (uplinkPart) look(ctx context.Context, n *site) error {
	switch {
	case n.rec.Uplink == "":
		return nil
	case n.uplink.nic.Index == 0:
		n.found.advise(tombolo.RemedyConfigure, "uplink %s: the host has no such link", n.rec.Uplink)
		return nil
	case !n.uplink.shared || n.bridge.Index == 0 || n.quick && n.uplink.ready:
		return nil
	case n.quick:
		n.found.add("uplink %s: bridge %s does not share it as it was made", n.rec.Uplink, n.rec.Bridge)
		return nil
	}

	diffs, err := n.s.shares().Check(ctx, shareOf(n.rec))
	if errors.Is(err, share.ErrUnfit) {
		n.found.advise(tombolo.RemedyConfigure, "%v", err)
		return nil
	}

	n.found.addAll(diffs, tombolo.RemedyRepair)
	n.lookAtParameter(n.disableIPv6Path(), "1")
	return err
}

func (uplinkPart) make(ctx context.Context, n *site) (bool, error) {
	if n.rec.Uplink == "" {
		return false, nil
	}

	if err := n.findGatewayLink(ctx); err != nil {
		return false, err
	}

	if n.uplink.nic.Index == 0 && n.required == nil {
		return false, nil // pods reach each other without it; look reports that it is missing
	}

	if _, err := refuseUplink(ctx, n.s, n.rec); err != nil || !n.uplink.shared {
		return false, err
	}

	_, err := n.s.shares().Ensure(ctx, shareOf(n.rec))
	if path := n.disableIPv6Path(); err == nil && path != "" {
		_, err = sysctl.Ensure(path, "1")
	}

	if err == nil {
		err = n.findGatewayLink(ctx)
	}
	return false, err
}

// recordUplink writes the record of a network with an uplink before any of its objects is created. The record lacks
// the hash of the configuration, so the next Add builds the network again. After a kill, a removal finds the remains
// by the record, and knows whether the NIC was promiscuous before.
func recordUplink(ctx context.Context, s *session, rec *state.Network) error {
	records, _, err := s.Dir.ListNetworks()
	if err != nil || rec.Uplink == "" {
		return stateError(err)
	}

	isOnNIC := func(o *state.Network) bool {
		return o.Uplink == rec.Uplink && o.Bridge == rec.Bridge && o.Epoch == rec.Epoch
	}
	if i := slices.IndexFunc(records, isOnNIC); i >= 0 {
		rec.MadePromiscuous = records[i].MadePromiscuous
	} else {
		n := &site{s: s, rec: rec}
		if err := n.find(ctx); err != nil {
			return err
		}

		// There is no record. If the pair exists, it belongs to an earlier network whose record was lost, and that
		// network made the NIC promiscuous.
		rec.MadePromiscuous = n.share != nil || !n.uplink.nic.Promiscuous && n.uplink.shared
	}

	return saveEarly(s, rec)
}

// saveEarly writes a network's record without the hash of its configuration, so that the next Add builds the network
// again.
func saveEarly(s *session, rec *state.Network) error {
	early := *rec
	early.ConfigHash = ""
	return stateError(s.Dir.SaveNetwork(&early))
}

// refuseUplink returns an error, with advice, if the NIC cannot be the network's uplink. shared is true if the
// bridge shares the NIC or would share it, and false if the NIC is a port of the bridge.
func refuseUplink(ctx context.Context, s *session, rec *state.Network) (shared bool, _ error) {
	nic, err := s.shares().Find(ctx, shareOf(rec))
	l, linkErr := s.link(ctx, rec.Bridge)
	if err := cmp.Or(explainNIC(err, rec.Uplink), linkErr); err != nil {
		return false, err
	}

	if l.Index != 0 && nic.Master == l.Index {
		return false, nil
	}

	if l.Index != 0 && l.Kind != "bridge" || rec.Bridge == rec.Uplink {
		return false, failf(share.ErrUnfit, "uplink %s: %s is no bridge; choose another name for the bridge", nic.Name,
			rec.Bridge)
	}

	if taken, err := s.loadTake(nic.Name); err != nil {
		return false, err
	} else if taken != nil {
		return false, errTaken(taken)
	}

	if nic.Master != 0 {
		master, err := s.Links.LinkByIndex(ctx, nic.Master)
		if err != nil {
			return false, err
		}

		if master.Kind == "bridge" {
			return false,
				failf(share.ErrUnfit,
					"uplink %s is a port of bridge %s already: name that one (\"bridge\": %q), and pods are on the "+
						"LAN by it",
					nic.Name, master.Name, master.Name)
		}

		return false, failf(share.ErrUnfit, "uplink %s is a part of %s (kind %s): name %s as the uplink", nic.Name,
			master.Name, master.Kind, master.Name)
	}

	if !rec.VLAN.IsZero() {
		return false, failf(share.ErrUnfit,
			"uplink %s is shared, and its tagged frames stay the host's: name the VLAN's own interface as the uplink "+
				"(ip link add link %[1]s name %[1]s.%d type vlan id %[2]d), and leave vlan out", nic.Name, max(
				rec.VLAN.ID, 10))
	}

	if err := s.shares().Probe(ctx, nic.Name); err != nil {
		return false, err
	}

	if l.Index != 0 && l.Kind == "bridge" && l.Alias != endpoint.BridgeAlias && !l.Unfinished() {
		return true, refuseHostsBridge(ctx, s, nic, l)
	}

	return true, refuseOtherShare(s, rec)
}

// refuseHostsBridge returns an error if another program's bridge has an address of the host that is not link-local.
// Such a bridge belongs to a different network than the NIC.
func refuseHostsBridge(ctx context.Context, s *session, nic, l *bridge.Link) error {
	have, err := s.Links.Addresses().List(ctx, addr.Filter{Link: l.Index})
	for _, a := range have {
		if !a.Prefix.Addr().IsLinkLocalUnicast() {
			return failf(share.ErrUnfit,
				"uplink %s: bridge %s is not Tombolo's, has the host's address %s, and %s is no port of it: "+
					"name another bridge, which Tombolo makes, or have your system make %[1]s a port of %[2]s",
				nic.Name, l.Name, a.Prefix, nic.Name)
		}
	}

	return err
}

// refuseOtherShare returns an error if another network shares the NIC with a different bridge, or another NIC with
// the bridge.
func refuseOtherShare(s *session, rec *state.Network) error {
	others, err := s.otherNetworks(rec.Name)
	for _, o := range others {
		if o.Epoch != s.Epoch.Token() || o.Uplink == "" || (o.Uplink == rec.Uplink) == (o.Bridge == rec.Bridge) {
			continue
		}
		return failf(ErrConflict,
			"bridge %s with uplink %s: network %q has bridge %s with uplink %s: a bridge shares one "+
				"NIC, and a NIC is shared by one bridge",
			rec.Bridge, rec.Uplink, o.Name, o.Bridge, o.Uplink)
	}

	return err
}

// removeShare removes the share of a network's NIC, unless another network on the bridge needs it.
func removeShare(ctx context.Context, s *session, rec *state.Network) error {
	if rec.Uplink == "" {
		return nil
	}
	others, err := sharers(s, rec)
	if err != nil || slices.ContainsFunc(others, func(o *state.Network) bool { return o.Uplink != "" }) {
		return err
	}
	return errors.Join(s.Firewall.RemoveShare(ctx, rec.Bridge), s.shares().Remove(ctx, shareOf(rec)))
}

// checkNIC returns an error if nic cannot be the name of a link.
func checkNIC(nic string) error {
	if !ident.IsLinkName(nic) {
		return failf(ErrInvalid, "uplink %q cannot name a link", nic)
	}
	return nil
}

// Uplinks provides the operations on the host's NICs that connect bridges to a LAN.
type Uplinks struct{ node *Node }

// Uplinks returns access to the NICs that are shared or taken over, or that could be.
func (n *Node) Uplinks() Uplinks { return Uplinks{n} }

// PlanShare describes the objects that the first Add of a network with this NIC and bridge would create, one a line.
// The warnings describe limitations that may surprise the operator. PlanShare returns an error if the NIC cannot be
// shared. It changes nothing.
func (u Uplinks) PlanShare(ctx context.Context, nic, bridgeName string) (lines, warnings []string, _ error) {
	if err := checkNIC(nic); err != nil {
		return nil, nil, err
	}

	s, err := u.node.openKnown()
	if err != nil {
		return nil, nil, err
	}
	defer s.close()
	if s.Epoch, err = s.Dir.Epoch(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, stateError(err)
	}
	shared, err := refuseUplink(ctx, s, &state.Network{Uplink: nic, Bridge: bridgeName})
	cut, cutErr := s.cutBridges(ctx, bridgeName)
	if err := cmp.Or(err, cutErr); err != nil {
		return nil, nil, err
	}

	if !shared {
		used := fmt.Sprintf("%s is a port of bridge %s, which is used as it is: nothing to make", nic, bridgeName)
		return []string{used}, cut, nil
	}

	err = u.node.tryShare(ctx)
	_, router, forwardsErr := s.Links.Forwards(ctx)
	if err := cmp.Or(err, forwardsErr); err != nil {
		return nil, nil, err
	}

	outer, port := share.Pair(bridgeName)
	lines = []string{
		"make bridge " + bridgeName + ", on which the host has no address and answers no ARP",
		"make the veth pair " + outer + " and " + port + ", and " + port + " a port of " + bridgeName,
		"attach a BPF program to " + port + ", which sends what pods send to the host, out of " + nic + ", or to both",
		"forward frames for pods from " + nic + " to " + outer + ", in table netdev tombolo",
		"make " + nic + " promiscuous; its addresses, routes and manager stay as they are",
	}
	if !router.IPv4 || !router.IPv6 {
		lines = append(lines,
			`only for pods with published ports, or with "defaultRoute": "host": let the host, which is no router, `+
				`forward for pods alone `+
				"(net.ipv4.conf.*.forwarding, net.ipv6.conf.*."+forceForwarding+")")
	}

	warnings, err = s.describeChildren(ctx, nic)
	return lines, append(warnings, cut...), err
}

// tryShare checks that the kernel supports shares: it creates one in a new network namespace, and deletes the
// namespace. The error is the kernel's refusal.
func (n *Node) tryShare(ctx context.Context) error {
	ns, err := netns.New()
	if err != nil {
		return err
	}
	defer ns.Close()
	cfg := n.cfg
	cfg.NetNS = ns
	s, err := openSession(cfg)
	if err != nil {
		return err
	}
	defer s.close()

	// A veth stands for the NIC.
	var b nl.Batch
	link.Request{Name: "nic", Peer: &link.Request{Name: "wire"}}.Create(&b, "add link", "nic")
	if err := nl.Of(s.Links.Socket()).Execute(&b); err != nil {
		return err
	}

	network := &site{s: s, rec: &state.Network{Name: "try", Bridge: "br0", Uplink: "nic"}}
	for _, p := range []part{bridgePart{}, uplinkPart{}, firewallPart{}} {
		if _, err = p.make(ctx, network); err != nil {
			break
		}
	}

	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, fs.ErrNotExist) {
		err = failf(share.ErrUnfit,
			"this kernel takes no rules at a NIC's hooks, by which frames reach pods (%w): it needs Linux 5.16 with "+
				"CONFIG_NETFILTER_EGRESS, and the modules nf_tables, nft_fwd_netdev and nft_dup_netdev", err)
	}

	return err
}

// describeChildren describes for the operator which frames the macvlan, macvtap, ipvlan and ipvtap links of this
// namespace on top of a shared NIC do not get. It returns one text for each link.
func (s *session) describeChildren(ctx context.Context, nic string) (list []string, _ error) {
	nicLink, err := s.link(ctx, nic)
	if err != nil {
		return nil, err
	}

	err = link.List(nl.Of(s.Links.Socket()), "list links", "", 0, func(l *link.Info) {
		if uplink.IsChild(l.Kind) && l.Lower == nicLink.Index && !l.Elsewhere {
			list = append(list, fmt.Sprintf("%s %s rests on %s: pods get its frames, but it does not get frames that "+
				"pods send to it alone", l.Kind, l.Name, nic))
		}
	})

	return list, err
}

// UplinkReport describes a NIC that is shared or taken over.
type UplinkReport struct {
	NIC    string `json:"nic"`
	Bridge string `json:"bridge"`
	// State is "shared", or the progress of `uplink take`: "taken", "taking" or "restoring". State and Bridge are empty
	// if the record of the takeover cannot be read.
	State string `json:"state"`
	// Networks lists the bridge's networks with this uplink.
	Networks []string `json:"networks,omitempty"`
	// Differences lists the faults, and the error if the search for faults failed.
	Differences []string `json:"differences"`
}

// List returns a report on each NIC that is shared or taken over. If nic is not empty, it reports on that NIC only.
// It takes no lock and changes nothing.
func (u Uplinks) List(ctx context.Context, nic string) ([]UplinkReport, error) {
	s, err := u.node.openKnown()
	if err != nil {
		return nil, err
	}
	defer s.close()
	list, _, err := s.takeReports(ctx)
	records, _, recordsErr := s.Dir.ListNetworks()
	if err := cmp.Or(err, stateError(recordsErr)); err != nil {
		return nil, err
	}

	for _, rec := range records {
		if rec.Uplink == "" {
			continue
		}

		n := &site{s: s, rec: rec}
		err := n.find(ctx)
		known := slices.IndexFunc(list,
			func(r UplinkReport) bool { return r.NIC == rec.Uplink && r.Bridge == rec.Bridge })
		switch {
		case known >= 0:
			list[known].Networks = append(list[known].Networks, rec.Name)
		case err == nil && n.share == nil:
			// The bridge does not share the NIC yet, or the NIC is a port of the bridge: report nothing.
		default:
			if err == nil {
				err = uplinkPart{}.look(ctx, n)
			}
			report := UplinkReport{NIC: rec.Uplink, Bridge: rec.Bridge, State: "shared", Networks: []string{rec.Name},
				Differences: n.found.texts()}
			if err != nil {
				report.Differences = append(report.Differences, err.Error())
			}
			list = append(list, report)
		}
	}

	return slices.DeleteFunc(list, func(r UplinkReport) bool { return nic != "" && r.NIC != nic }), nil
}

// addChildLinks notes in report.Others the limitations that sharing causes for macvlan and ipvlan links on the same
// NIC. If the network shares no NIC, it notes nothing.
func (report *Inspection) addChildLinks(ctx context.Context, n *site) error {
	if !n.uplink.shared || n.uplink.nic.Index == 0 {
		return nil
	}
	texts, err := n.s.describeChildren(ctx, n.uplink.nic.Name)
	report.Others = append(report.Others, texts...) // Inspect drops texts that several networks cause
	return err
}
