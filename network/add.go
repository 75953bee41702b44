package network

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// Add attaches a pod to a network. It creates the network if necessary, and the pod's interface with addresses,
// routes and limits, and adds the pod's elements to the firewall. If Add fails, it undoes its changes for the pod. A
// network that it has created stays.
//
// If an earlier Add of the same attachment was killed, or its pod died without a Del, Add first deletes the objects
// that are left. If the attachment exists otherwise, the error matches ErrExists. If no address is free, a requested
// address is taken, or an IPAM plugin returns any error, Add removes the network's dead attachments, as CollectDead
// does. If it has removed one, Add tries once more.
//
// Add needs CAP_NET_ADMIN in the host's and the pod's namespace, and CAP_SYS_ADMIN to enter the pod's.
func (n *Node) Add(ctx context.Context, nw *Network, pod *Pod) (*Attachment, error) {
	if err := cmp.Or(nw.check(), pod.check(nw, n.cfg.NetNS)); err != nil {
		return nil, err
	}

	made, err := n.tryAdd(ctx, nw, pod)
	if err != nil && nw.lacksAddress(err) && n.reclaim(ctx, nw) {
		made, err = n.tryAdd(ctx, nw, pod)
	}

	if err == nil && pod.Path != "" && (nw.DHCPv6 && !made.unconfirmed || made.informs) {
		return n.awaitDHCPv6(ctx, pod, made)
	}
	return made, err
}

// tryAdd tries once to add the pod, and undoes its steps on an error, unless another call has created the attachment
// anew. It has released all locks when it returns.
func (n *Node) tryAdd(ctx context.Context, nw *Network, pod *Pod) (*Attachment, error) {
	hash := pod.key(nw).hash()
	a := &addCall{entry: entry{node: n, hash: hash, getsMore: pod.Lease != nil || nw.SLAAC}, nw: nw, pod: pod,
		rec: pod.record(nw, hash)}
	origin := n.origin(nw)
	a.rec.IPAMType, a.rec.DataDir = origin.Type, origin.Dir
	var err error
	if pod.Lease != nil {
		if a.leasing, err = a.prepareLease(); err != nil {
			return nil, err
		}
	}

	if a.s, err = openSession(n.cfg); err != nil {
		return nil, err
	}
	defer a.s.close()
	if a.leasing != nil {
		// Release the lease's lock before a.s.close, which may call functions that take the locks of leases.
		defer func() { a.leasing.lock.Close() }()
	}

	if err := n.reportStep("open"); err != nil {
		return nil, err
	}

	made, err := a.run(ctx)
	if err == nil {
		return made, nil
	}

	if a.pending != nil {
		if gone, _ := a.pending.Gone(); gone {
			// The Add may have failed because another call removed the attachment.
			a.s.warn("the attachment's record is gone: " + err.Error())
			err = errDeleted()

			// If there is a record, another ADD has created the attachment anew. Port, elements and reservations are
			// named after the attachment, so they may belong to that ADD: undo nothing. The objects of this ADD are
			// gone: the DEL has deleted them, or the other ADD deletes them as remains.
			if _, loadErr := a.s.Dir.Load(nw.Name, hash); !errors.Is(loadErr, fs.ErrNotExist) {
				_ = a.pending.Close() // ignore the error: the record's file is gone
				return nil, err
			}
		}
	}

	return nil, a.undo.run(err)
}

// addCall is the state of one Add in progress.
type addCall struct {
	entry
	nw  *Network
	pod *Pod
	rec *state.Attachment // the attachment's record, as derived so far

	leasing *leaseCall      // nil unless the IPv4 address comes by DHCP
	metrics metrics         // additions to the metrics of the pod's default routes
	limits  bandwidth.Shape // the pod's limits as enforced by the kernel

	// The results of the steps so far.
	assigned assignment
	required *requirement
	port     bridge.Port
	site     *site              // the network as it exists; nil before ready
	link     *bridge.Attachment // nil until the pod has its link
}

// run runs the steps of an Add, in order. A pod gets its addresses before its link, except for those that it gets
// through the link.
func (a *addCall) run(ctx context.Context) (*Attachment, error) {
	if len(a.pod.Ports) > 0 {
		// Undo functions run in reverse order. So this one runs last, after the record was deleted.
		a.undo.push(func(ctx context.Context) error {
			return closeUnusedLoopback(ctx, a.s, false, a.nw.Bridge, a.nw.GatewayLink())
		})
	}

	refuseListeners := func(ctx context.Context) error {
		return refuseListeners(ctx, a.pod.ContainerID, a.pod.Ports, a.assigned.addresses, a.getsMore)
	}
	addElements := func(ctx context.Context) error { return a.add(ctx, a.rec, a.required) }
	flushStale := func(ctx context.Context) error { return flushStale(ctx, a.s.Links, a.rec) }

	// Last, publish host ports that another attachment of the container had, since the pod can answer now.
	for _, step := range []func(context.Context) error{
		a.begin, a.reportStep("record"), a.allocate, a.derive, refuseListeners, a.ready,
		a.reportStep("network"), a.recordLease, a.attach, a.reportStep("link"), a.obtain, addElements, flushStale,
		a.reportStep("firewall"), a.commit, a.reportStep("commit"),
		a.publishWithheld,
	} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}

	return a.result(), nil
}

// reportStep returns a step that reports the end of the previous steps to Config.Step.
func (a *addCall) reportStep(name string) func(context.Context) error {
	return func(context.Context) error { return a.node.reportStep(name) }
}

// ready ensures that the network exists as planned. It then checks whether others have the pod's MAC or addresses
// (refuseTwin, refuseMAC, refuseTaken). It skips this check if the pod already has its link.
func (a *addCall) ready(ctx context.Context) (err error) {
	if a.site, err = ensureReady(ctx, a.s, a.required); err != nil {
		return err
	}

	a.rec.NIC = a.site.sharedNIC()
	if a.link != nil {
		return nil // the pod's own frames would look like another machine's
	}

	if err := cmp.Or(a.refuseTwin(ctx), a.site.refuseMAC(ctx, a.pod.MAC)); err != nil {
		return err
	}
	return a.refuseTaken(ctx)
}

// commit waits until the port forwards and the pod's IPv6 addresses are usable. Then it writes the complete records of
// the lease and the attachment. It returns an error if another call has deleted the attachment's record, or another
// machine has answered for an address of the pod.
func (a *addCall) commit(ctx context.Context) error {
	if err := a.s.Links.Wait(ctx, a.rec.HostIf); err != nil {
		return err
	}

	if a.leasing != nil {
		if err := a.leasing.commit(ctx, a.s); err != nil {
			return err
		}
	}

	if err := a.refuseAnswered(a.link.PeerMAC); err != nil {
		return err
	}

	err := a.pending.Commit(a.rec)
	if errors.Is(err, fs.ErrNotExist) {
		return errDeleted()
	}

	return stateError(err)
}

// publishWithheld publishes host ports that the record marks as withheld (see withholdsPorts). Another attachment of
// the container had them. Its Del may have come too early to pass them on. If the container seems to have other
// attachments, publishWithheld first calls linkSiblings.
func (a *addCall) publishWithheld(ctx context.Context) error {
	rec := a.rec

	// Each of these conditions is a sign that the container has another attachment. Either this attachment took over
	// host ports, or its default route got another metric because the container has a default route already.
	l := a.leasing
	if a.isTakeover || a.metrics != nil || l != nil && l.rec.Policy.Priority != l.request.Priority {
		if err := a.s.linkSiblings(ctx, rec); err != nil {
			return err
		}
	}

	if !withholdsPorts(rec) {
		return nil
	}
	return a.s.publish(ctx, newWaiting(rec))
}

func (a *addCall) result() *Attachment {
	at := attachmentOf(a.rec)
	at.BridgeMAC, at.BridgeMTU, at.HostVLAN = a.site.bridge.MAC, a.site.rec.MTU, ""
	if l := a.site.gatewayLink; a.site.share == nil && l.Index != a.site.bridge.Index {
		at.HostVLAN, at.HostVLANMAC = l.Name, l.MAC
	}

	at.PortMAC, at.MAC = a.link.MAC, a.link.PeerMAC
	at.Addresses, at.DNS = a.assigned.addresses, a.assigned.dns
	at.Routes = a.metrics.apply(withDefaults(a.nw.DefaultGateway, at.Addresses, a.assigned.routes))
	if a.leasing == nil {
		return at
	}

	rec := a.leasing.rec
	if rec.Applied.MTU > 0 {
		at.PodMTU = min(rec.Applied.MTU, at.MTU)
	}

	at.informs, at.unconfirmed = rec.Six != nil && rec.Six.Stateless, a.unconfirmed()
	return at
}

// assignment holds the addresses of a pod, IPv4 first, and its DNS. It also holds the pod's routes, without the default
// routes that withDefaults adds.
type assignment struct {
	addresses []ipam.Address
	routes    []route.Route
	dns       DNS
	informs   bool // router advertisements have no name servers, and refer to DHCPv6 (flag O or M)
}

// maxRemains limits how often one ADD tries to create its record. Before another try, it deletes the remains of a
// killed ADD. Two tries are enough, unless other ADDs of the same attachment are killed at the same time.
const maxRemains = 3

// begin takes the lease's lock, if the pod leases its address, and then the state directory's lock. It then creates and
// locks the attachment's record, before the ADD creates anything. So every object has an owner, even after a kill. The
// new record's lock comes last, since begin does not wait for it. The ADD holds it until commit. If a killed ADD or a
// dead pod left a record, begin first removes that attachment. For any other record, the error matches ErrExists.
func (a *addCall) begin(ctx context.Context) (err error) {
	for range maxRemains {
		if a.leasing != nil {
			// Look for remains first: a running ADD of the same attachment holds the lease's lock until its DHCP server
			// answers. A DEL or tombolod may hold that lock for a while. In the order of locks, the lease's lock comes
			// before the state directory's lock.
			if err := a.takeRemainsDown(ctx); err != nil {
				return err
			}
			if a.leasing.lock, err = a.leasing.dir.Lock(ctx, a.hash); err != nil {
				return failf(ErrTryAgain, "%w", err)
			}
		}

		if err := a.s.enter(ctx); err != nil {
			return err
		}

		if a.pending, err = a.s.Dir.Create(a.rec); err == nil {
			a.undo.push(func(context.Context) error { return a.pending.Abandon() })
			return nil
		}

		if !errors.Is(err, fs.ErrExist) {
			return stateError(err)
		}

		// Release the locks first, since takeRemainsDown may have to release a lease, or to call an IPAM plugin.
		a.s.leave()
		if a.leasing != nil {
			a.leasing.lock.Close()
		}

		if err := a.takeRemainsDown(ctx); err != nil {
			return err
		}
	}

	return errAlreadyExists(a.pod.key(a.nw))
}

// takeRemainsDown deletes the record and the objects that a killed ADD of the same attachment left. Such a record is
// neither locked nor complete. It also deletes the record and the objects of a pod that died without a DEL. The kernel
// deleted such a pod's port with its namespace, and some runtimes reuse its ID. If there is no record, takeRemainsDown
// does nothing. For any other record, the error matches ErrExists.
func (a *addCall) takeRemainsDown(ctx context.Context) error {
	lock, err := a.s.Dir.LockAttachment(a.nw.Name, a.hash)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil // the record is gone already
	case err != nil:
		return errAlreadyExists(a.pod.key(a.nw))
	}
	defer lock.Close()
	rec, err := a.s.Dir.Load(a.nw.Name, a.hash)
	unfinished := state.IsUnfinished(rec, err)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil // the record is gone already
	case !unfinished && !a.s.hasDied(ctx, a.nw.Name, a.hash):
		return errAlreadyExists(a.pod.key(a.nw))
	case unfinished:
		a.s.warn("an earlier ADD of this attachment was killed: undoing what it left")
	default:
		a.s.warn("the pod of this attachment is gone, without a DEL: undoing what it left")
	}

	known := &Known{Bridge: a.nw.Bridge, GatewayLink: a.nw.GatewayLink(), Leased: a.leasing != nil}
	t := a.node.teardown(a.s, a.nw.Name, known)
	return t.takeDown(ctx, t.ownRemains(ctx, a.pod.key(a.nw).owner(), a.hash))
}

func errAlreadyExists(k Key) error {
	return failf(ErrExists, "container %s has an attachment %s to network %q already: DEL it first", k.ContainerID,
		k.IfName, k.Network)
}

// derive computes the required network, the port and the record from the configuration and the pod's addresses and
// routes. It returns an error if the pod could not use these.
func (a *addCall) derive(context.Context) error {
	a.addHostRoutes()
	g := a.assigned
	if err := a.checkAssigned(g); err != nil {
		return err
	}

	nw, rec := a.nw, a.rec
	a.required = newRequirement(a.nw, a.hash, a.s.Mark)
	rec.Addresses, rec.Masquerade, rec.Guard = nil, nw.Masquerade, nw.Guard
	a.limitEgress()
	rec.PublishFrom = slices.DeleteFunc([]string{nw.PublishFrom, a.pod.PublishFrom},
		func(list string) bool { return list == "" })
	rec.Unadmitted = nw.Unadmitted
	rec.DefaultRoute, rec.NoDefaultRoute, rec.SLAAC = string(nw.Exit), nw.NoDefaultRoute, nw.SLAAC
	rec.Hairpin, rec.Isolated = nw.Hairpin, nw.Isolated
	for _, address := range g.addresses {
		record := &a.required.Record
		record.Subnets = appendNew(record.Subnets, address.Prefix.Masked())
		if address.Gateway.IsUnspecified() {
			address.Gateway = netip.Addr{} // an allocator may return 0.0.0.0 or :: if there is no gateway
		}
		if nw.Gateway && address.Gateway.IsValid() {
			record.Gateways = appendNew(record.Gateways, netip.PrefixFrom(address.Gateway, address.Prefix.Bits()))
		}
		rec.Addresses = append(rec.Addresses, address)
	}

	a.required.Pod = rec
	mac := a.pod.MAC
	if mac == nil {
		mac = ident.MACOf(endpoint.Addresses(rec))
	}

	switch {
	case a.link != nil:
		mac = a.link.PeerMAC
	case mac == nil && (rec.Guard != "" || nw.Uplink != ""):
		mac = ident.RandomMAC() // the rules need a MAC before the kernel would choose one
	}

	rec.MAC = state.MAC(mac)
	port := portOf(rec)

	// For a pod that leases its address, leave NoWait unset: Attach then returns only when the port forwards. Otherwise
	// the pod's first DHCP message would be lost.
	port.DAD, port.Group, port.NoWait, port.SameNetNS = nw.DAD, nft.PodGroup, a.leasing == nil, a.pod.SameNetNS
	if nw.Gateway && nw.Uplink == "" {
		port.Group = nft.GatewayGroup
	}

	// Announce the MAC only if neighbours may remember another MAC for the address. By default the MAC is derived
	// from the address, so it stays the same. It may differ if the pod requests a MAC, or if another plugin's pod had
	// the address before.
	port.Announce = a.pod.MAC != nil || rec.DataDir != ""

	// Otherwise the last link on the path writes the checksum after the guard's rules have seen the packet, at an
	// offset that the pod chose. So make the pod write the checksum (see bridge.Port.NoTxOffload).
	port.NoTxOffload = nw.Guard != "" && nw.Guard != nft.GuardMAC && nw.Uplink != ""
	port.LeaveIPv6 = nw.LeaveIPv6 && len(g.addresses) == 0 && a.leasing == nil
	port.Addresses = prefixesOf(g.addresses)
	port.Routes = a.metrics.apply(routesFor(g.addresses, withDefaults(nw.DefaultGateway, g.addresses, g.routes)))
	if a.leasing == nil {
		rec.Routes = recordedRoutes(rec, port.Routes)
	}

	a.port = port
	return nil
}

// limitEgress writes the pod's egress policy, with the name servers that it permits, into the pod's record. It writes
// the name servers that the network's policy permits into a.required. A pod with a policy gets at least the guard
// nft.GuardAddresses.
func (a *addCall) limitEgress() {
	resolvers := a.pod.Resolvers
	if from, ok := a.nw.Allocator.(interface{ Resolvers() []netip.Addr }); ok {
		resolvers = from.Resolvers()
	}

	if endpoint.WithResolvers(a.nw.Egress, resolvers) != a.nw.Egress {
		a.required.Record.Resolvers = resolvers
	}

	if a.pod.Egress == "" {
		return
	}

	a.required.PodEgress, a.rec.Egress = true, endpoint.WithResolvers(a.pod.Egress, resolvers)
	if a.rec.Guard == "" || a.rec.Guard == nft.GuardMAC {
		a.rec.Guard = nft.GuardAddresses // without this, the pod could send from other addresses
	}
}

// newRequirement returns the network that the configuration requests, without additions for the addresses of a pod.
// hash identifies the attachment.
func newRequirement(nw *Network, hash string, mark uint32) *requirement {
	w := &requirement{
		Record: state.Network{
			Name: nw.Name, Bridge: nw.Bridge, MTU: nw.MTU,
			Masquerade: nw.Masquerade, NonMasquerade: nw.NonMasquerade,
			Policy: nw.Policy, Internal: nw.Internal, Egress: nw.Egress, Guard: nw.Guard != "", Mark: mark,
			NFCall: nw.NFCall, Promiscuous: nw.Promiscuous,
			Uplink: nw.Uplink, DefaultRoute: string(nw.Exit), SLAAC: nw.SLAAC, VLAN: nw.VLAN,
		},
		DefaultMTU: nw.DefaultMTU, Gateway: nw.Gateway, Routed: nw.Routed, ForceAddress: nw.ForceAddress, Owner: hash,
	}
	if sets := ipam.RangeSetsOf(nw.Allocator); len(sets) > 0 {
		w.Record.Pools, w.Record.PoolDir = sets, nw.Origin.Dir
	}
	return w
}

// portOnBridge returns the requested port, with the bridge's index, the MTU and other values of the network as it was
// built.
func (a *addCall) portOnBridge() bridge.Port {
	port, b := a.port, a.site
	port.BridgeIndex, port.MTU = b.bridge.Index, b.rec.MTU
	port.Neighbours = neighbours(a.rec, net.HardwareAddr(b.rec.HostMAC))
	if b.sharedNIC() != "" {
		port.Hairpin = false
		port.MTU = cmp.Or(a.required.Record.MTU, b.uplink.nic.MTU) // may differ from the recorded MTU
	}
	keepTable(&port, a.rec.Guard != "", b.bridge)
	return port
}

// checkAssigned returns an error about addresses, gateways, routes and host ports that the pod could not use.
func (a *addCall) checkAssigned(g assignment) error {
	if len(g.addresses) == 0 && a.leasing != nil {
		return nil // the addresses come later
	}

	if len(g.addresses) == 0 && a.nw.Origin.Type != "" {
		return failf(ErrInvalid, "ipam %q gave no address", a.nw.Origin.Type)
	}

	for _, address := range g.addresses {
		if a.nw.Gateway && !address.Gateway.IsValid() {
			return failf(ErrNoGateway,
				"ipam %q gave %s without a gateway, and the bridge is to be one: name the gateway in the ipam, or "+
					"set isGateway to false", a.nw.Origin.Type, address.Prefix)
		}
	}

	if slices.ContainsFunc(prefixesOf(g.addresses), isIPv6) {
		return refuseUnreachable(a.pod.Ports, g.addresses)
	}

	return cmp.Or(refuseIPv6(a.nw.Name, false, nil, g.routes...), refuseUnreachable(a.pod.Ports, g.addresses))
}
