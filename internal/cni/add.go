package cni

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

// undoTimeout bounds what is undone after a failed ADD, whose own deadline may
// have been what failed it.
const undoTimeout = 10 * time.Second

// undo keeps the way back from each step that was taken.
type undo []func(context.Context) error

func (u *undo) push(step func(context.Context) error) { *u = append(*u, step) }

// run takes the steps back in reverse, all of them, and joins what goes wrong to
// the cause.
func (u undo) run(cause error) error {
	ctx, cancel := context.WithTimeout(context.Background(), undoTimeout)
	defer cancel()
	errs := []error{cause}
	for i := len(u) - 1; i >= 0; i-- {
		errs = append(errs, u[i](ctx))
	}
	return errors.Join(errs...)
}

// adding is one ADD under way.
type adding struct {
	*host
	conf     *NetConf
	pod      *netns.NS
	mac      net.HardwareAddr // of the pod; nil: ours to choose
	dns      types.DNS
	shape    bandwidth.Shape
	leasing  *leasing      // nil unless the address comes by DHCP
	attached bool          // the port is there
	guarded  *nft.Endpoint // what the firewall has of the pod since before its port was there
	prev     *current.Result
	ipam     ipam.Allocator
	pending  *state.Pending
	rec      *state.Attachment
	undo     undo
}

// add carries out ADD: it makes the interface and gives the written result, or leaves
// nothing.
func (c *call) add(ctx context.Context, conf *NetConf) ([]byte, error) {
	a := &adding{conf: conf}
	if err := a.prepare(c); err != nil {
		return nil, err
	}
	var err error
	if a.pod, err = c.openPod(); err != nil {
		return nil, err
	}
	defer a.pod.Close()
	if a.host, err = c.openHost(conf.settings()); err != nil {
		return nil, err
	}
	defer a.host.Close()
	if err := c.step("open"); err != nil {
		return nil, err
	}
	if a.leasing != nil {
		defer a.leasing.unlock()
	}
	result, err := a.run(ctx)
	if err != nil {
		return nil, a.undo.run(a.reason(err))
	}
	return result, nil
}

// reason is why an ADD failed. One whose record is gone may fail at anything that was taken
// down along with it, as by an earlier version, which knows nothing of the record's lock.
func (a *adding) reason(err error) error {
	if a.pending == nil {
		return err
	}
	if gone, lookErr := a.pending.Gone(); !gone || lookErr != nil {
		return err
	}
	a.call.log.warn("the attachment's record is gone: " + err.Error())
	return errDeleted()
}

// prepare reads what can be wrong before anything is touched.
func (a *adding) prepare(c *call) error {
	rc, err := a.conf.runtimeConfig()
	if err != nil {
		return err
	}
	args, err := parseArgs(c.args)
	if err != nil {
		return err
	}
	if a.mac, err = a.conf.podMAC(rc, args); err != nil {
		return err
	}
	if a.prev, err = parsePrevResult(a.conf, c.cniVersion); err != nil {
		return err
	}
	published, err := rc.published()
	if err != nil {
		return err
	}
	if a.shape, err = a.conf.shape(rc); err != nil {
		return err
	}
	a.dns = a.conf.DNS
	if rc.DNS.Servers != nil || rc.DNS.Searches != nil || rc.DNS.Options != nil {
		a.dns = types.DNS{Nameservers: rc.DNS.Servers, Domain: a.dns.Domain, Search: rc.DNS.Searches, Options: rc.DNS.Options}
	}
	section := a.conf.ipam()
	a.rec = &state.Attachment{
		Network: c.network, ContainerID: c.containerID, IfName: c.ifName,
		Pod: podName(args), NetNS: c.netns, IPAMType: section.Type, DataDir: section.DataDir,
		HostIf: c.hostName(), Bridge: a.conf.settings().Bridge, Up: !a.conf.DisableContainerInterface,
		Published: published,
	}
	if section.Type == ipamDHCP {
		return a.prepareDHCP(args)
	}
	return nil
}

func (a *adding) run(ctx context.Context) ([]byte, error) {
	if len(a.rec.Published) > 0 {
		// After all else is undone, the record included.
		a.undo.push(func(ctx context.Context) error { return a.closeLoopback(ctx, a.rec.Bridge, false) })
	}
	if err := a.begin(ctx); err != nil {
		return nil, err
	}
	if err := a.call.step("record"); err != nil {
		return nil, err
	}
	make := a.tie
	if a.leasing != nil {
		make = a.lease
	}
	t, err := make(ctx)
	if err != nil {
		return nil, err
	}
	n, b, att := t.network, t.built, t.attachment
	if err := a.limit(ctx, att); err != nil {
		return nil, err
	}
	if err := a.call.step("bandwidth"); err != nil {
		return nil, err
	}
	if err := a.admit(ctx, n); err != nil {
		return nil, err
	}
	// Only now do the pod's ports lead to it.
	if err := a.flushStaleFlows(ctx, a.rec); err != nil {
		return nil, err
	}
	if err := a.call.step("firewall"); err != nil {
		return nil, err
	}
	if err := a.br.Settle(ctx, att.Name); err != nil {
		return nil, err
	}
	// Before the point of no return: not every version can say every result.
	result, err := a.call.encode(a.result(t.leased, b, att))
	if err != nil {
		return nil, err
	}
	if a.leasing != nil {
		if err := a.commitLease(ctx); err != nil {
			return nil, err
		}
	}
	if err := a.pending.Commit(a.rec); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, errDeleted()
		}
		return nil, newError(codeIO, "%v", err)
	}
	if err := a.call.step("commit"); err != nil {
		return nil, err
	}
	return result, nil
}

// tied is a pod on its network, with addresses.
type tied struct {
	leased     *current.Result
	network    *network
	built      *built
	attachment *bridge.Attachment
}

// tie gets the pod its addresses, and then the link with them.
func (a *adding) tie(ctx context.Context) (*tied, error) {
	leased, err := a.allocate(ctx)
	if err != nil {
		return nil, err
	}
	if err := a.call.step("ipam"); err != nil {
		return nil, err
	}
	n, port, err := a.plan(leased)
	if err != nil {
		return nil, err
	}
	if err := a.refuseListeners(ctx); err != nil {
		return nil, err
	}
	b, err := a.ready(ctx, n)
	if err != nil {
		return nil, err
	}
	if err := a.call.step("network"); err != nil {
		return nil, err
	}
	if err := a.routeThroughHost(ctx, b.bridge, leased, port); err != nil {
		return nil, err
	}
	att, err := a.attach(ctx, n, b, port)
	if err != nil {
		return nil, err
	}
	t := &tied{leased, n, b, att}
	if a.settings.SLAAC {
		if err := a.autoconfigure(ctx, t, port); err != nil {
			return nil, err
		}
	}
	return t, a.call.step("link")
}

// allocate gets the pod's addresses. Of a plugin that runs by itself nobody knows
// how long it takes, so the lock is not held meanwhile.
func (a *adding) allocate(ctx context.Context) (*current.Result, error) {
	conf, err := ipamconf.New(a.ipamRequest(true))
	if err != nil {
		return nil, err
	}
	a.ipam = conf.Bind(a.ipamNode())
	if a.ipam.Slow() {
		a.leave()
	}
	given, err := a.ipam.Add(ctx, a.call.owner())
	if err != nil {
		return nil, err
	}
	result := conf.Said().Result(given)
	a.undo.push(func(ctx context.Context) error {
		if a.ipam.Slow() {
			a.leave()
		}
		return a.ipam.Del(ctx, a.call.owner(), leasedAddresses(result))
	})
	if err := a.enter(ctx); err != nil {
		return nil, err
	}
	return result, nil
}

// plan derives the network and the port from the addresses.
func (a *adding) plan(leased *current.Result) (*network, *bridge.Port, error) {
	s := a.settings
	n := &network{settings: s}
	p := &bridge.Port{
		Bridge: s.Bridge, Name: a.rec.HostIf, Peer: a.call.ifName,
		Hairpin: s.Hairpin, Isolated: s.Isolated, ForwardGroups: true, Down: s.Down, DAD: s.DAD,
		PeerMAC: a.mac, Group: nft.QuietGroup, Unsettled: true, SameNetNS: a.call.sameNetNS(),
	}
	addresses, err := readAddresses(leased)
	if err != nil {
		return nil, nil, err
	}
	if len(addresses) == 0 && a.rec.IPAMType != "" && a.leasing == nil {
		return nil, nil, newError(codeInvalidConfig, "ipam %q gave no address", a.rec.IPAMType)
	}
	for _, address := range addresses {
		p.Addresses = append(p.Addresses, address.Prefix)
		n.subnets = appendNew(n.subnets, address.Prefix.Masked())
		if !s.IsGateway {
			continue
		}
		if !address.Gateway.IsValid() {
			return nil, nil, newError(codeNoGateway, "ipam %q gave %s without a gateway, and the bridge is to be one: name the gateway in the ipam, or set isGateway to false", a.conf.ipamType(), address.Prefix)
		}
		n.gateways = appendNew(n.gateways, netip.PrefixFrom(address.Gateway, address.Prefix.Bits()))
	}
	if p.Routes, err = podRoutes(s, addresses, leased.Routes); err != nil {
		return nil, nil, err
	}
	// Neighbours know an address's last MAC: that which follows from it, unless another
	// was asked for, or another plugin gave the address to a pod of its own.
	p.Announce = p.PeerMAC != nil || a.rec.DataDir != ""
	if p.PeerMAC == nil {
		p.PeerMAC = addressMAC(addresses)
	}
	a.rec.Addresses = sameWay(addresses, a.rec.Addresses)
	a.rec.Masquerade, a.rec.Guarded, a.rec.Untrusted = s.Masquerade, s.Guard, s.Untrusted
	a.rec.DefaultRoute, a.rec.SLAAC = s.DefaultRoute, s.SLAAC
	lanPort(p, a.rec)
	if len(addresses) > 0 || a.leasing == nil {
		if err := a.checkPublished(); err != nil {
			return nil, nil, err
		}
	}
	n.loopback = publishesIPv4(a.rec)
	n.reached = reached(nil, []*state.Attachment{a.rec})
	a.rec.Port = state.Port{Hairpin: &p.Hairpin, Isolated: &p.Isolated}
	p.Alias = formatAlias(a.call.hash(), a.call.network, addressesOf(a.rec))
	return n, p, nil
}

// addressMAC derives the pod's MAC from its IPv4 address: an address that goes to
// another pod soon afterwards is then no stale entry in anybody's neighbour table, and
// nobody has to be told of it.
func addressMAC(addresses []state.Address) net.HardwareAddr {
	for _, a := range addresses {
		if a.Prefix.Addr().Is4() {
			ip := a.Prefix.Addr().As4()
			return net.HardwareAddr{0x0a, 0x58, ip[0], ip[1], ip[2], ip[3]}
		}
	}
	return nil
}

// attach makes the link. One of the same name that an ADD or a DEL of this very
// attachment left when it was killed is deleted first: the record, which was made
// anew, says that nobody else is at it.
func (a *adding) attach(ctx context.Context, n *network, b *built, p *bridge.Port) (*bridge.Attachment, error) {
	a.onto(b, p)
	if err := a.guard(ctx, n, p); err != nil {
		return nil, err
	}
	att, err := a.br.Attach(ctx, a.pod, *p)
	if errors.Is(err, fs.ErrExist) && !errors.Is(err, bridge.ErrPeerExists) {
		if err := a.br.Detach(ctx, p.Name, aliasOwner(a.call.hash())); err != nil {
			return nil, err
		}
		att, err = a.br.Attach(ctx, a.pod, *p)
	}
	if err != nil {
		return nil, explainRoute(err)
	}
	a.attached = true
	a.undo.push(func(ctx context.Context) error {
		err := a.br.Detach(ctx, p.Name, aliasOwner(a.call.hash()))
		a.attached = err != nil
		return err
	})
	a.rec.MTU, a.rec.MAC, a.rec.HostMAC = att.MTU, att.PeerMAC.String(), att.MAC.String()
	return att, nil
}

// onto is what a port needs to know of its bridge.
func (a *adding) onto(b *built, p *bridge.Port) {
	p.BridgeIndex, p.MTU = b.bridge.Index, b.mtu
	keepTable(p, a.rec, b.bridge)
}

// explainRoute tells what to do where the pod has a route by another interface.
func explainRoute(err error) error {
	var op *tombolo.OpError
	if errors.Is(err, fs.ErrExist) && errors.As(err, &op) && op.Op == "add route" {
		return newError(codeConflict, "%v: the pod has such a route by another of its interfaces: set isDefaultGateway to false for this network, or give the route another priority", err)
	}
	return err
}
