package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"reflect"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

// A part is one object or setting that the pods of a network share on the node. removeNetwork removes the parts that no
// other network needs.
type part interface {
	// look compares the object or setting with the network's record, and adds the differences to n.found. It changes
	// nothing. If n.quick is set, as for an Add, it requests single objects only, so its cost does not depend on the
	// number of pods.
	look(ctx context.Context, n *site) error
	// make creates or repairs the object or setting, under the state directory's exclusive lock. It reports whether
	// anything was missing that other networks share. After an interruption, the next make completes the work.
	make(ctx context.Context, n *site) (changed bool, err error)
}

// parts returns all objects and settings of a network, in the order of their creation.
func parts() []part {
	return []part{
		bridgePart{}, uplinkPart{}, vlanPart{}, nextHopPart{}, forwardingPart{}, gatewayPart{},
		firewallPart{}, hostPart{}, loopbackPart{}, admissionPart{},
	}
}

// site holds the state of one network on the node, as a call has found or created it.
type site struct {
	s           *session
	rec         *state.Network
	attachments []*state.Attachment
	required    *requirement // the requirements of the call, such as an Add; nil for a repair
	quick       bool         // look only for things that an Add would notice

	// bridge has Index 0 if the bridge does not exist. gatewayLink is the link through which the host routes to the
	// pods. It is the bridge, the host's link in the network's VLAN, or the NIC that the bridge shares.
	bridge, gatewayLink *bridge.Link
	share               *nft.Share // the connection to a LAN by a NIC that is no port of the bridge, or nil
	uplink              foundUplink
	found               findings
	closed              []nft.Closed // the families that the host forwards for pods only; nil until lookAtForwarding
	// needsCompletion means that little is missing: host ports are not reachable at 127.0.0.1, or the record's pools
	// differ from the requested ones. complete repairs both.
	needsCompletion bool
	restored        []nft.Endpoint // the endpoints of the pods that reattach repaired
}

// pods returns the network's attachments, and n.required.Pod if it is set.
func (n *site) pods() []*state.Attachment {
	if n.required == nil || n.required.Pod == nil {
		return n.attachments
	}
	return append(slices.Clip(n.attachments), n.required.Pod)
}

// find looks up the bridge, the link with the gateways, and the uplink in the kernel.
func (n *site) find(ctx context.Context) error {
	var err error
	if n.bridge, err = n.s.link(ctx, n.rec.Bridge); err != nil {
		return err
	}
	return n.findGatewayLink(ctx)
}

func (n *site) findGatewayLink(ctx context.Context) (err error) {
	n.gatewayLink = n.bridge
	if host, ok := hostVLAN(n.rec, n.bridge); ok {
		n.gatewayLink, err = n.s.link(ctx, host.Name)
	}
	return cmp.Or(err, n.findUplink(ctx))
}

// look compares the listed parts of the network with its record. If n.quick is set, it stops at the first difference or
// error.
func (n *site) look(ctx context.Context, list []part) error {
	if err := n.find(ctx); err != nil {
		return err
	}

	var errs []error
	for _, p := range list {
		err := p.look(ctx, n)
		if n.quick && (err != nil || len(n.found.list) > 0) {
			return err
		}
		errs = append(errs, err)
	}

	return errors.Join(errs...)
}

// make creates or repairs all parts of the network, and then the host's side of its pods. changed is as in part.make.
// When all networks are repaired, the caller must call declareMended (see nft.Conn.Prepare).
func (n *site) make(ctx context.Context) (changed bool, _ error) {
	for i, p := range parts() {
		partChanged, err := p.make(ctx, n)
		changed = changed || partChanged
		if err != nil {
			return i > 0, err // after the first part, assume that something shared was missing
		}
	}
	return changed, n.reattach(ctx)
}

// findings collects differences between records and the kernel.
type findings struct {
	list []tombolo.Difference
}

// add adds a difference with a formatted text and without a remedy.
func (f *findings) add(format string, args ...any) { f.advise("", format, args...) }

// advise adds a difference with its remedy.
func (f *findings) advise(remedy tombolo.Remedy, format string, args ...any) {
	f.list = append(f.list, tombolo.Difference{Text: fmt.Sprintf(format, args...), Remedy: remedy})
}

// texts returns a line of text for each difference.
func (f *findings) texts() []string { return printable.Texts(f.list) }

// addAll adds differences. If a difference has no remedy, it gets the given one.
func (f *findings) addAll(diffs []tombolo.Difference, remedy tombolo.Remedy) {
	for _, d := range diffs {
		d.Remedy = cmp.Or(d.Remedy, remedy)
		f.list = append(f.list, d)
	}
}

// A podPart is one object or setting of a pod on its network. addCall.run creates the podParts of a new pod, and
// teardown.takeDown removes them.
type podPart interface {
	// look compares the object or setting with the record, and adds the differences to p.found. It changes nothing.
	look(ctx context.Context, p *podSite) error
	// mend restores the object or setting outside of the pod's namespace, under the state directory's exclusive lock.
	// It is called only if the pod's port exists.
	mend(ctx context.Context, p *podSite) error
}

// podParts returns the objects and settings of a pod, in the order of their repair. endpointPart comes before portPart,
// because the guard must exist before the port is on the bridge again.
func podParts() []podPart {
	return []podPart{leasePart{}, endpointPart{}, portPart{}, limitsPart{}, hostRoutePart{}}
}

// podSite describes a pod as a call finds it, and its intended state.
type podSite struct {
	*state.Attachment
	s     *session
	nw    *state.Network
	link  *bridge.Link // the pod's port; set only for a repair
	port  bridge.Port  // the intended port and interface
	pod   *netns.NS    // the pod's namespace; nil if it could not be opened, with the reason in lost
	lost  error
	gone  bool // the port is gone; nothing else is reported, since the pod's other objects are useless without it
	found findings
	// keeperOptional means that the pod's lease needs no tombolod that renews it.
	keeperOptional bool
	anyDefault     bool // the pod's default routes may lead anywhere
}

// find returns a podSite, so that the method look of its parts can compare the pod with its record. The caller must
// close the field pod.
func (s *session) find(ctx context.Context, nw *state.Network, rec *state.Attachment) (*podSite, error) {
	br, err := s.link(ctx, rec.Bridge)
	if err != nil {
		return nil, err
	}
	p := &podSite{Attachment: rec, s: s, nw: nw, port: portOn(rec, br)}
	p.port.Addresses, p.port.Routes = lastingPrefixes(rec), lastingRoutes(rec)
	p.pod, p.lost = netns.OpenSame(rec.NetNS, rec.NetNSCookie)
	return p, nil
}

// look calls the method look of each podPart, which compares the pod with its record. It stops after an error, or if
// the port is gone.
func (p *podSite) look(ctx context.Context) error {
	for _, part := range podParts() {
		if err := part.look(ctx, p); err != nil || p.gone {
			return err
		}
	}
	return nil
}

// reattach repairs the host's side of the network's existing pods, and appends these pods to n.restored. It skips an
// attachment whose port is gone. For an attachment whose Add has not finished, it calls only endpointPart.mend, and
// only if the pod has a guard.
func (n *site) reattach(ctx context.Context) error {
	for _, a := range n.attachments {
		if a.State != state.Ready && (a.Guard == "" || !n.rec.Guards()) {
			continue // its own Add is in progress, or was never finished
		}

		link, err := n.s.link(ctx, a.HostIf)
		if err != nil {
			return err
		}

		if link.Index == 0 {
			continue // the pod is gone, and its Del is still to come
		}

		parts := podParts()
		if a.State != state.Ready {
			parts = []podPart{endpointPart{}} // its Add is waiting for a lease, and the pod has its interface already
		}

		if err := n.followNIC(ctx, a); err != nil {
			return err
		}

		p := &podSite{Attachment: a, s: n.s, nw: n.rec, link: link}
		for _, part := range parts {
			if err := part.mend(ctx, p); err != nil {
				return err
			}
		}

		n.restored = append(n.restored, endpoint.In(a, n.rec))
	}

	return nil
}

// requirement describes the network that a call such as Add needs.
type requirement struct {
	// Record is the network's record as requested, without the gateways and subnets of other pods. MTU is 0, and NFCall
	// and Promiscuous are nil, if the configuration leaves them open.
	Record       state.Network
	DefaultMTU   int  // MTU of a new bridge if the MTU is open; see Network.DefaultMTU
	Gateway      bool // the bridge has the gateways' addresses
	Routed       bool // the value of NFCall if it is open
	ForceAddress bool // addresses of the bridge that overlap with a gateway's are replaced

	PodEgress bool              // the pod has an egress policy
	Owner     string            // the hash of the Add's attachment
	Pod       *state.Attachment // the record of the call's pod; nil in Ready, which has no pod
}

// configHash returns a hash of the network's configuration. It leaves out the pools, and the fields that depend on
// single pods.
func (w *requirement) configHash() string {
	r := w.Record
	r.Gateways, r.Subnets, r.Pools, r.PoolDir, r.Resolvers = nil, nil, nil, "", nil
	return ident.Hash(string(state.Encode(&r.Version, &r)), fmt.Sprint(w.Gateway), "")
}

// ensureReady ensures that the network exists. Usually it does, and a few requests for single objects confirm that. If
// anything is missing, one caller creates it under the state directory's exclusive lock, while the others wait.
func ensureReady(ctx context.Context, s *session, w *requirement) (*site, error) {
	// If route_localnet is off, a part is missing. Then skip the first comparison, since the network is compared
	// again under the exclusive lock. Reading this parameter takes a tenth of the time of a comparison.
	shut := false
	if w.Pod != nil && endpoint.PublishesIPv4(w.Pod) && w.Record.Uplink == "" && s.lock.Mode() == state.Shared {
		value, err := sysctl.Read(sysctl.Link("ipv4", w.Record.GatewayLink(), routeLocalnet))
		shut = err == nil && value == "0"
	}
	return ensureBuilt(ctx, s, func() (*site, error) {
		if shut {
			shut = false
			return nil, nil
		}
		return findReady(ctx, s, w)
	}, func() (*site, error) { return buildNetwork(ctx, s, w) })
}

// ensureBuilt returns the network that look finds. If look returns nil, ensureBuilt takes the state directory's
// exclusive lock, calls look again and, after another nil, returns the result of build. If the network has
// needsCompletion set, ensureBuilt calls its method complete under that lock.
func ensureBuilt(ctx context.Context, s *session, look, build func() (*site, error)) (n *site, err error) {
	done := func() (is bool, _ error) {
		n, err = look()
		return n != nil && !n.needsCompletion, err
	}
	err = s.lock.Ensure(ctx, done, func() (err error) {
		if n != nil {
			return n.complete(ctx)
		}
		n, err = build()
		return err
	})

	return n, err
}

// findReady returns the network if it meets the Add's requirements, or if its method complete can make it meet them.
// Otherwise it returns nil, and the network must be built.
func findReady(ctx context.Context, s *session, w *requirement) (*site, error) {
	rec, err := s.Dir.LoadNetwork(w.Record.Name)
	if err != nil {
		// The network was not built yet, or its record is damaged. Building the network writes a new record.
		return nil, nil
	}

	if rec.ConfigHash != w.configHash() || rec.Epoch != s.Epoch.Token() ||
		!containsAll(rec.Gateways, w.Record.Gateways) || !containsAll(rec.Subnets, w.Record.Subnets) ||
		!gatewaysInUse(s, rec, w) ||
		w.PodEgress && !rec.PodEgress || !containsAll(rec.Resolvers, w.Record.Resolvers) {
		return nil, nil
	}
	return compareObjects(ctx, s, rec, w)
}

// compareObjects is the second half of findReady, after the comparison of the record. It compares the network's objects
// in the kernel, and returns nil if any is missing or different, unless complete can repair it.
func compareObjects(ctx context.Context, s *session, rec *state.Network, w *requirement) (*site, error) {
	n := &site{s: s, rec: rec, required: w, quick: true}
	if err := n.look(ctx, parts()); err != nil || len(n.found.list) > 0 {
		return nil, err
	}
	n.needsCompletion = n.needsCompletion || !samePools(rec, &w.Record)
	return n, nil
}

func samePools(a, b *state.Network) bool {
	return a.PoolDir == b.PoolDir && reflect.DeepEqual(a.Pools, b.Pools)
}

// complete prepares a network that has needsCompletion set, under the state directory's exclusive lock. It makes host
// ports at 127.0.0.1 work, and records the pools. It is faster than a build. This matters since a network may get its
// first host port many times.
func (n *site) complete(ctx context.Context) error {
	rec, w := n.rec, n.required
	unfiltered := rec.LoopbackUnfiltered
	if _, err := (loopbackPart{}).make(ctx, n); err != nil {
		return err
	}
	if rec.LoopbackUnfiltered == unfiltered && samePools(rec, &w.Record) {
		return nil
	}
	rec.Pools, rec.PoolDir = w.Record.Pools, w.Record.PoolDir
	return stateError(n.s.Dir.SaveNetwork(rec))
}

// buildNetwork creates or repairs the network, under the state directory's exclusive lock. It first removes deserted
// networks (isDeserted) with overlapping subnets. If an object was missing that other networks share, it repairs the
// other networks too. Every step can be repeated, so the next build completes an interrupted one.
func buildNetwork(ctx context.Context, s *session, w *requirement) (*site, error) {
	deserted, err := w.refuse(ctx, s)
	if err != nil {
		return nil, err
	}

	// The network needs our rules in other programs' chains, which deleteNetwork keeps.
	for _, o := range deserted {
		if err := s.deleteNetwork(ctx, o.Name, o, nil); err != nil {
			return nil, err
		}
	}

	if err := leaveBridge(ctx, s, w); err != nil {
		return nil, err
	}

	attachments, err := s.attachments(w.Record.Name)
	if err := cmp.Or(refuseOthers(s, &w.Record), err); err != nil {
		return nil, err
	}

	rec := w.newRecord(s.Epoch.Token(), attachments)
	if err := w.chooseBridge(ctx, s, rec); err != nil {
		return nil, err
	}

	if rec.MTU < ipv6MTU && slices.ContainsFunc(w.Record.Subnets, isIPv6) {
		return nil, failf(tombolo.ErrInvalid, "network %q: an MTU of %d is too small for IPv6, which needs %d",
			rec.Name, rec.MTU, ipv6MTU)
	}

	if old, err := s.Dir.LoadNetwork(rec.Name); err == nil {
		rec.ChainedPolicy, rec.AdminChain = old.ChainedPolicy, old.AdminChain
		rec.PortSNAT, rec.HostMAC = old.PortSNAT, old.HostMAC
		rec.PodEgress = old.PodEgress
		for _, a := range old.Resolvers {
			rec.Resolvers = appendNew(rec.Resolvers, a)
		}
	}

	// Look at the attachments too: the network's earlier record may be lost while its pods run.
	rec.PodEgress = rec.PodEgress || w.PodEgress ||
		slices.ContainsFunc(attachments, func(a *state.Attachment) bool { return a.Egress != "" })
	if err := refuseUnfiltered(rec); err != nil {
		return nil, err
	}

	rec.PortSNAT = rec.PortSNAT ||
		slices.ContainsFunc(attachments, func(a *state.Attachment) bool { return endpoint.SNAT(a) != nft.SNATNeeded })
	if err := recordUplink(ctx, s, rec); err != nil {
		return nil, err
	}

	n := &site{s: s, rec: rec, attachments: attachments, required: w}
	changed, err := n.make(ctx)
	if err != nil {
		return nil, err
	}

	zonePending, err := refuseObstacles(ctx, s, rec, len(rec.Gateways) > 0)
	paths, pathsErr := s.reversePaths(ctx, rec)
	if err := cmp.Or(err, pathsErr); err != nil {
		return nil, err
	}

	for _, path := range paths {
		s.warn("network " + rec.Name + ": " + path)
	}

	// Save the record first: settle restores the other networks on the bridge, and their settings depend on this
	// network's record (see adaptToOthers).
	if changed {
		if err := saveEarly(s, rec); err != nil {
			return nil, err
		}
	}

	// Write the complete record last, so that the next ADD completes an interrupted call.
	if err := n.settle(ctx, changed); err != nil {
		return nil, err
	}

	if zonePending {
		if err := awaitZone(ctx, s, rec); err != nil {
			return nil, err
		}
	}

	return n, stateError(s.Dir.SaveNetwork(rec))
}

// prepareForHostPorts prepares a network so that host ports can lead to the attachment a, whose record already lists
// the ports. It also applies change to the network's record, and returns the record. change reports whether it changed
// the record. Usually nothing is missing, and a few requests confirm that, as in the function ensureReady.
func prepareForHostPorts(
	ctx context.Context, s *session, a *state.Attachment, change func(*state.Network) bool,
) (rec *state.Network, _ error) {
	w := &requirement{Pod: a}
	_, err := ensureBuilt(ctx, s, func() (_ *site, err error) {
		if rec, err = s.Dir.LoadNetwork(a.Network); err != nil {
			return nil, stateError(err)
		}
		if change(rec) {
			return nil, nil
		}
		w.Record.Pools, w.Record.PoolDir = rec.Pools, rec.PoolDir
		return compareObjects(ctx, s, rec, w)
	}, func() (*site, error) { return nil, restoreAlone(ctx, s, rec, w) })

	return rec, err
}

// restoreAlone repairs one network from its record. If an object was missing that networks share, it also repairs the
// other networks. It returns an error if another program's firewall certainly stops the pods.
func restoreAlone(ctx context.Context, s *session, rec *state.Network, w *requirement) error {
	attachments, err := s.attachments(rec.Name)
	if err != nil {
		return err
	}

	n := &site{s: s, rec: rec, attachments: attachments, required: w}
	changed, err := n.restore(ctx)
	if err == nil {
		err = n.settle(ctx, changed)
	}

	if err == nil {
		_, err = refuseCertainObstacles(ctx, s, rec)
	}
	return err
}

// settle completes the firewall's sets after a network was created or repaired (declareMended). If changed is true, an
// object was missing that other networks share, and settle repairs the other networks with attachments too. If such a
// repair fails, settle only warns. For example, a flush of our table deletes the rules of all networks, and a deleted
// bridge loses the ports of all its networks. If changed is true, settle also deletes elements of pods that no longer
// exist, which a program may have loaded from an older copy of the table.
func (n *site) settle(ctx context.Context, changed bool) error {
	if !changed {
		return declareMended(ctx, n.s, n)
	}

	others, err := n.s.otherNetworks(n.rec.Name)
	if err != nil {
		return err
	}

	r := &repair{s: n.s}
	for _, o := range others {
		if err := r.network(ctx, o); err != nil {
			n.s.warn(err.Error()) // the network's next ADD reports the error
		}
	}

	if _, err := mendStrays(ctx, n.s); err != nil {
		return err
	}
	return declareMended(ctx, n.s, append(r.mended, n)...)
}

// newRecord returns the network's new record. It combines the requirements of this Add with the subnets, gateways and
// guards of the existing pods.
func (w *requirement) newRecord(epoch string, attachments []*state.Attachment) *state.Network {
	rec := w.Record
	rec.Epoch, rec.ConfigHash = epoch, w.configHash()
	rec.Gateways, rec.Subnets = slices.Clone(rec.Gateways), slices.Clone(rec.Subnets)
	for _, gw := range w.Record.Gateways {
		rec.GatewayUses = append(rec.GatewayUses, state.GatewayUse{Gateway: gw, Attachment: w.Owner})
	}

	for _, a := range attachments {
		rec.Guard = rec.Guard || a.Guard != "" // a pod may have a guard although its network has none
		for _, address := range a.Addresses {
			rec.Subnets = appendNew(rec.Subnets, address.Prefix.Masked())
			if !w.Gateway || !address.Gateway.IsValid() {
				continue
			}
			gw := netip.PrefixFrom(address.Gateway, address.Prefix.Bits())
			if !slices.Contains(rec.Gateways, gw) {
				rec.Gateways = append(rec.Gateways, gw)
				rec.GatewayUses = append(rec.GatewayUses, state.GatewayUse{Gateway: gw, Attachment: a.Hash()})
			}
		}
	}

	return &rec
}

func containsAll[T comparable](have, want []T) bool {
	return !slices.ContainsFunc(want, func(p T) bool { return !slices.Contains(have, p) })
}

// convertAll returns the results of convert for all elements of a list.
func convertAll[From, To any](list []From, convert func(From) To) []To {
	all := make([]To, len(list))
	for i, one := range list {
		all[i] = convert(one)
	}
	return all
}

func appendNew[T comparable](list []T, p T) []T {
	if slices.Contains(list, p) {
		return list
	}
	return append(list, p)
}

// checkBuildable returns an error with the reason if the network could not be built, or if no pod could be attached. It
// takes no lock, and sets s.Epoch. It changes nothing now. If the host has become a router, it schedules reopen, which
// makes the rules anew when the session closes.
func checkBuildable(ctx context.Context, s *session, w *requirement) error {
	if err := probe(ctx, s, w); err != nil {
		return err
	}

	// Take the subnets of existing pods into account: another firewall may accept packets by these subnets, but drop
	// other packets of the bridge.
	rec := w.Record
	rec.Subnets = nil
	if existing, err := s.Dir.LoadNetwork(rec.Name); err == nil && existing.Bridge == rec.Bridge {
		rec.Subnets = existing.Subnets
		if isRouterNow(existing) {
			s.deferUntilClose(func() error { defer s.leave(); return reopen(ctx, s, existing.Name) })
		}
	}

	_, err := refuseObstacles(ctx, s, &rec, w.Gateway)
	if err := cmp.Or(err, stateError(s.Dir.CheckWritable())); err != nil {
		return err
	}

	switch s.Epoch, err = s.Dir.Epoch(); {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, state.ErrStale), errors.Is(err, state.ErrDamaged):
		s.Epoch = state.Epoch{} // no record is valid, and the next ADD begins an epoch
	case err != nil:
		return stateError(err)
	}

	_, err = w.refuse(ctx, s)
	return err
}

// refuse returns an error with the reason if the network cannot exist on this node. The deserted networks are as in
// refuseConflicts.
func (w *requirement) refuse(ctx context.Context, s *session) (deserted []*state.Network, err error) {
	rec := &w.Record
	if err := refuseIPv6(rec.Name, rec.SLAAC, rec.Subnets); err != nil {
		return nil, err
	}

	if !rec.VLAN.IsZero() {
		if err := s.Links.VLANs().Probe(ctx); err != nil {
			return nil, err
		}
	}

	if deserted, err = refuseConflicts(ctx, s, w); err == nil && rec.Uplink != "" {
		_, err = refuseUplink(ctx, s, rec)
	}
	return deserted, err
}

// probe returns an error if the kernel lacks a facility that an Add needs.
func probe(ctx context.Context, s *session, w *requirement) error {
	if err := cmp.Or(s.Links.Probe(), s.Firewall.Probe(ctx)); err != nil {
		return err
	}

	rec := &w.Record
	if rec.NFCall == nil && w.Routed || rec.NFCall != nil && *rec.NFCall {
		if err := bridge.ProbeNetfilter(); err != nil {
			remedy := "set bridgeNFCall to false, if no service or policy concerns packets between pods of one node"
			if rec.DefaultRoute == exitHost {
				remedy = `set defaultRoute to "router" and bridgeNFCall to false: else a firewall of the host that ` +
					`drops "ct state invalid" stops every connection`
			}
			return fmt.Errorf("bridgeNFCall: %w; or %s", err, remedy)
		}
	}

	return nil
}

func isIPv6(p netip.Prefix) bool { return p.Addr().Is6() }

// isDeserted reports whether a network has no pods and no bridge. An unused bridge that Tombolo made counts as none.
// nerdctl and podman delete a network without calling the plugins, and give its subnet to the next network.
func (s *session) isDeserted(ctx context.Context, o *state.Network) (bool, error) {
	attachments, err := s.attachments(o.Name)
	if err != nil || len(attachments) > 0 {
		return false, err
	}

	l, err := s.link(ctx, o.Bridge)
	if err != nil || l.Index == 0 {
		return err == nil, err
	}

	shared, err := sharers(s, o)
	ports, portsErr := s.Links.Ports(ctx, l.Index)
	return len(ports) == 0 && len(shared) == 0 && l.Alias == endpoint.BridgeAlias, cmp.Or(err, portsErr)
}
