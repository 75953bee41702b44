package network

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/build"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/network/internal/teardown"
	"github.com/tombolo-cni/tombolo/route"
)

// Add attaches a pod to a network, and makes the network first if it is not there: an
// interface with addresses and routes, limits, and its part in the firewall. Where it fails it
// has undone what it did. What an Add of the same attachment left that was killed, it undoes
// first; otherwise an attachment that exists is ErrExists. Where the network has no address
// left, it is undone, takes down what CollectDead finds of the network, and tries once more. It
// needs CAP_NET_ADMIN in both namespaces, and CAP_SYS_ADMIN to enter the pod's.
func (n *Node) Add(ctx context.Context, nw *Network, pod *Pod) (*Attachment, error) {
	if err := n.usable(ctx); err != nil {
		return nil, err
	}
	if err := nw.check(); err != nil {
		return nil, err
	}
	if err := pod.check(nw); err != nil {
		return nil, err
	}
	made, err := n.tryAdd(ctx, nw, pod)
	if err != nil && nw.lacking(err) && n.reclaim(ctx, nw) {
		made, err = n.tryAdd(ctx, nw, pod)
	}
	if err == nil && (nw.DHCPv6 || made.informs) {
		return n.await6(ctx, pod, made)
	}
	return made, err
}

// tryAdd is one try. When it returns, it has given up its locks.
func (n *Node) tryAdd(ctx context.Context, nw *Network, pod *Pod) (*Attachment, error) {
	hash := pod.key(nw).hash()
	a := &adding{entry: entry{node: n, hash: hash, getsMore: pod.Lease != nil || nw.SLAAC}, nw: nw, pod: pod, base: pod.record(nw, hash)}
	origin := n.origin(nw)
	a.base.IPAMType, a.base.DataDir = origin.Type, origin.Dir
	if pod.Lease != nil {
		var err error
		if a.leasing, err = a.prepareLease(); err != nil {
			return nil, err
		}
	}
	var err error
	if a.s, err = n.open(); err != nil {
		return nil, err
	}
	defer a.s.Close()
	if a.leasing != nil {
		// Before Close, which may wait for the lock of the host's lease.
		defer a.leasing.unlock()
	}
	if err := n.step("open"); err != nil {
		return nil, err
	}
	made, err := a.run(ctx)
	switch {
	case err == nil:
		return made, nil
	case a.overtaken():
		_ = a.pending.Close() // of a file that is gone
		return nil, session.ErrDeleted()
	}
	return nil, a.back.run(a.reason(err))
}

// adding is one Add under way.
type adding struct {
	entry
	nw   *Network
	pod  *Pod
	base *state.Attachment // as it was put on record

	leasing *leasing        // nil unless the address comes by DHCP
	metrics metrics         // of its default routes
	shaped  bandwidth.Shape // its limits as the kernel enforces them
}

// reason is why an Add failed. One whose record is gone may fail at anything that was taken
// down along with it.
func (a *adding) reason(err error) error {
	if a.pending == nil {
		return err
	}
	if gone, lookErr := a.pending.Gone(); !gone || lookErr != nil {
		return err
	}
	a.s.Warn("the attachment's record is gone: " + err.Error())
	return session.ErrDeleted()
}

func (a *adding) run(ctx context.Context) (*Attachment, error) {
	if len(a.pod.Ports) > 0 {
		// After all else is undone, the record included.
		a.back.push(func(ctx context.Context) error {
			return teardown.CloseLoopback(ctx, a.s, false, a.nw.Bridge, a.nw.GatewayLink())
		})
	}
	if err := a.begin(ctx); err != nil {
		return nil, err
	}
	if err := a.node.step("record"); err != nil {
		return nil, err
	}
	tie := a.tie
	if a.leasing != nil {
		tie = a.lease
	}
	t, err := tie(ctx)
	if err != nil {
		return nil, err
	}
	rec := &t.plan.rec
	if a.getsMore { // only now is known what the ifb's alias says
		if err := a.shape(ctx, rec, t.link.Index, t.link.MTU); err != nil {
			return nil, err
		}
	}
	recorded.Limit(rec, a.shaped)
	if err := a.add(ctx, rec, t.plan.want); err != nil {
		return nil, err
	}
	// Only now do the pod's ports lead to it.
	if err := flushStale(ctx, a.s.Links, rec); err != nil {
		return nil, err
	}
	if err := a.node.step("firewall"); err != nil {
		return nil, err
	}
	if err := a.s.Links.Wait(ctx, t.link.Name); err != nil {
		return nil, err
	}
	if t.lease != nil {
		if err := a.leasing.commit(ctx, a.s, t.lease); err != nil {
			return nil, err
		}
	}
	if err := a.pending.Commit(rec); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, session.ErrDeleted()
		}
		return nil, fail.State(err)
	}
	if err := a.node.step("commit"); err != nil {
		return nil, err
	}
	if slices.ContainsFunc(rec.Published, func(p state.Published) bool { return p.Withheld }) {
		// A Del of the one that has the ports passed them on to nobody until now.
		if err := a.s.Publish(ctx, state.Waiting{Network: a.nw.Name, Hash: a.hash}); err != nil {
			return nil, err
		}
	}
	return a.made(t), nil
}

// made is the result of an Add.
func (a *adding) made(t *tied) *Attachment {
	at := attachmentOf(&t.plan.rec)
	at.BridgeMAC, at.BridgeMTU = t.built.Bridge.MAC, t.built.MTU
	if l := t.built.At; l.Index != t.built.Bridge.Index {
		at.HostVLAN, at.HostVLANMAC = l.Name, l.MAC
	}
	at.PortMAC, at.MAC = t.link.MAC, t.link.PeerMAC
	at.Routes, at.DNS = a.metrics.apply(withDefaults(a.nw.DefaultGateway, t.plan.rec.Addresses, t.given.routes)), t.given.dns
	if t.lease != nil && t.lease.Applied.MTU > 0 {
		at.PodMTU = min(t.lease.Applied.MTU, at.MTU)
	}
	at.informs = t.lease != nil && t.lease.Six != nil && t.lease.Six.Stateless
	return at
}

// given is what a pod was given: its addresses, IPv4 first, routes as they were asked for, and
// name servers.
type given struct {
	addresses []ipam.Address
	hosts     state.HostGateways // of addresses whose default route leads to the host
	routes    []route.Route
	dns       DNS
	informs   bool // DHCPv6 has DNS that routers do not tell
}

// tied is a pod on its network, with addresses.
type tied struct {
	given given
	plan  *plan
	built *build.Built
	link  *bridge.Attachment
	lease *lease.Record // nil unless it is by DHCP
}

// tie gets the pod its addresses, and then the link with them.
func (a *adding) tie(ctx context.Context) (*tied, error) {
	g, err := a.allocate(ctx)
	if err != nil {
		return nil, err
	}
	if err := a.node.step("ipam"); err != nil {
		return nil, err
	}
	p, err := a.plan(g, nil)
	if err != nil {
		return nil, err
	}
	if err := refuseListeners(ctx, a.pod.ContainerID, a.pod.Ports, g.addresses, a.nw.SLAAC); err != nil {
		return nil, err
	}
	b, err := build.Ready(ctx, a.s, p.want)
	if err != nil {
		return nil, err
	}
	if err := a.node.step("network"); err != nil {
		return nil, err
	}
	if a.nw.Exit == ExitHost && !a.nw.NoDefaultRoute {
		if g, err = a.routeThroughHost(ctx, b.Bridge, g); err != nil {
			return nil, err
		}
		if p, err = a.plan(g, nil); err != nil {
			return nil, err
		}
	}
	link, err := a.attach(ctx, p, b)
	if err != nil {
		return nil, err
	}
	t := &tied{g, p, b, link, nil}
	if a.nw.SLAAC {
		if t, err = a.autoconfigure(ctx, t); err != nil {
			return nil, err
		}
	}
	return t, a.node.step("link")
}

// allocate gets the pod's addresses. Of an allocator that asks another program nobody knows
// how long it takes, so the lock is not held meanwhile.
func (a *adding) allocate(ctx context.Context) (given, error) {
	if err := session.Wanted(a.pending); err != nil {
		return given{}, err
	}
	if a.nw.Allocator == nil {
		return givenOf(a.pod.Addresses, a.pod.Routes)
	}
	owner := a.pod.owner()
	allocator := a.nw.Allocator.Bind(a.s.IPAMNode(a.nw.Name, owner, a.hash))
	if allocator.Slow() {
		a.s.Leave()
	}
	got, err := allocator.Add(ctx, owner)
	if err != nil {
		return given{}, &allocationError{err}
	}
	a.back.push(func(ctx context.Context) error {
		if allocator.Slow() {
			a.s.Leave()
		}
		var addrs []netip.Addr
		for _, one := range got.Addresses {
			addrs = append(addrs, one.Prefix.Addr())
		}
		return allocator.Del(ctx, owner, addrs)
	})
	if err := a.s.Enter(ctx); err != nil {
		return given{}, err
	}
	return givenOf(got.Addresses, append(got.Routes, a.pod.Routes...))
}

// givenOf puts IPv4 first: runtimes take the first address of a result for the pod's.
func givenOf(addresses []ipam.Address, routes []route.Route) (given, error) {
	g := given{routes: routes}
	var v6 []ipam.Address
	for i, a := range addresses {
		if !a.Prefix.IsValid() {
			return g, fail.Errorf(ErrInvalid, "the ipam's ips[%d] is no address with a prefix length", i)
		}
		if a.Gateway.IsValid() && a.Gateway.BitLen() != a.Prefix.Addr().BitLen() {
			return g, fail.Errorf(ErrInvalid, "the ipam's ips[%d]: the gateway %s is not of the family of %s", i, a.Gateway, a.Prefix)
		}
		if a.Prefix.Addr().Is4() {
			g.addresses = append(g.addresses, a)
		} else {
			v6 = append(v6, a)
		}
	}
	g.addresses = append(g.addresses, v6...)
	return g, nil
}

// routeThroughHost adds the default routes that were left to the network.
func (a *adding) routeThroughHost(ctx context.Context, l *bridge.Link, g given) (given, error) {
	asked := g.routes
	g.hosts, g.routes = slices.Clone(g.hosts), slices.Clone(asked)
	for _, address := range g.addresses {
		if hasDefault(asked, address.Prefix.Addr()) {
			continue
		}
		own, err := a.hostAddress(ctx, l, address.Prefix)
		if err != nil {
			return g, err
		}
		g.routes = append(g.routes, defaultBy(own))
		g.hosts.Set(address.Prefix, own)
	}
	return g, nil
}

// hostAddress is the host's, to which the default route of a pod with this address leads; it
// is invalid where it leads elsewhere.
func (a *adding) hostAddress(ctx context.Context, l *bridge.Link, pod netip.Prefix) (netip.Addr, error) {
	if a.nw.Exit != ExitHost || a.nw.NoDefaultRoute {
		return netip.Addr{}, nil
	}
	return build.HostAddress(ctx, a.s, a.nw.Uplink.NIC, l, pod)
}

// attach makes the link. One of the same name that an Add or a Del of this very
// attachment left when it was killed is deleted first: the record, which was made
// anew, says that nobody else is at it.
func (a *adding) attach(ctx context.Context, p *plan, b *build.Built) (*bridge.Attachment, error) {
	port := p.onto(b)
	if !a.getsMore {
		shape := func(ctx context.Context, index int) error { return a.shape(ctx, &p.rec, index, port.MTU) }
		if a.pod.Limits.IsZero() {
			if err := shape(ctx, 0); err != nil {
				return nil, err
			}
		} else {
			port.BeforeUp = shape
		}
	}
	if err := session.Wanted(a.pending); err != nil {
		return nil, err
	}
	if err := a.holdBefore(ctx, &p.rec, p.want); err != nil {
		return nil, err
	}
	owner := endpoint.AliasOwner(a.hash)
	link, err := a.s.Links.Attach(ctx, a.pod.NetNS, port)
	if errors.Is(err, fs.ErrExist) && !errors.Is(err, bridge.ErrPeerExists) {
		if err := session.Wanted(a.pending); err != nil {
			return nil, err
		}
		if err := a.s.Links.Detach(ctx, port.Name, owner); err != nil {
			return nil, err
		}
		link, err = a.s.Links.Attach(ctx, a.pod.NetNS, port)
	}
	if isSecondRoute(err) {
		if err = a.makeWay(p, &port, err); err == nil {
			link, err = a.s.Links.Attach(ctx, a.pod.NetNS, port)
		}
	}
	if err != nil {
		return nil, explainRoute(err)
	}
	a.attached = true
	a.back.push(func(ctx context.Context) error {
		err := a.s.Links.Detach(ctx, port.Name, owner)
		a.attached = err != nil
		return err
	})
	p.link(link)
	return link, nil
}

// shape gives a pod's port the limits that were asked for, if any. That is done before the port
// comes up, when its index is known (bridge.Port's BeforeUp), unless the pod gets addresses later.
func (a *adding) shape(ctx context.Context, rec *state.Attachment, index, mtu int) error {
	if !a.pod.Limits.IsZero() {
		if err := a.limit(ctx, rec, index, mtu); err != nil {
			return err
		}
	}
	return a.node.step("bandwidth")
}

func (a *adding) limit(ctx context.Context, rec *state.Attachment, index, mtu int) error {
	target := recorded.Target(rec)
	target.PortIndex, target.MTU = index, mtu
	conn := bandwidth.On(a.s.Links.Socket())
	// What the port has of them goes with it.
	a.back.push(func(ctx context.Context) error {
		return conn.Remove(ctx, bandwidth.Target{IFB: target.IFB, Owner: target.Owner})
	})
	var err error
	if a.shaped.IsZero() { // else this is a second try, and the operator was told
		if a.shaped, err = effectiveLimits(a.s, a.pod.Limits, mtu); err != nil {
			return err
		}
	}
	_, err = conn.Ensure(ctx, target, a.shaped)
	return err
}
