package cni

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// leasing is the part of an ADD that gets the address by DHCP.
type leasing struct {
	conf   *dhcpConf
	client *lease.Client
	dir    *lease.Dir
	held   *lease.Held
	rec    *lease.Record
}

// prepareDHCP reads what can be wrong before anything is touched.
func (a *adding) prepareDHCP(args map[string]string) error {
	conf, err := a.conf.dhcp()
	if err != nil {
		return err
	}
	id := &identity{network: a.rec.Network, container: a.rec.ContainerID, ifName: a.rec.IfName, pod: a.rec.Pod}
	if a.mac == nil {
		a.mac = id.mac(conf.ClientID)
	}
	client, err := conf.client(id, a.mac, args)
	if err != nil {
		return err
	}
	s := a.conf.settings()
	dir, err := lease.Open(s.LeaseDir)
	if err != nil {
		return newError(codeInvalidConfig, "%v", err)
	}
	for _, p := range a.rec.Published {
		if p.Protocol == "udp" && p.PodPort == dhcpc.ClientPort {
			return newError(codeInvalidConfig, "runtimeConfig.portMappings: port %s leads to the pod's UDP port %d, where DHCP servers answer: with ipam.type \"dhcp\" it cannot be published", portText(p), p.PodPort)
		}
	}
	a.leasing = &leasing{conf: conf, client: client, dir: dir}
	a.rec.DataDir = dir.Path()
	// On record from the first on: others may have to put the guard back while the
	// server is waited for.
	a.rec.MAC, a.rec.Guarded, a.rec.Untrusted, a.rec.SLAAC = a.mac.String(), s.Guard, s.Untrusted, s.SLAAC
	return a.leasing.refuseUnkept()
}

// refuseUnkept says what to do where nobody would renew the lease.
func (l *leasing) refuseUnkept() error {
	if l.conf.Keeper == keeperOptional {
		return nil
	}
	if err := l.dir.Kept(); err != nil {
		return newError(codeTryAgainLater, `%v; or set ipam.keeper to "optional", if leases need not be renewed`, err)
	}
	return nil
}

// lease gets the pod its address: the link first, up and without one, and from there
// the lease. Of a server nobody knows how long it takes, so the lock is not held
// meanwhile.
func (a *adding) lease(ctx context.Context) (*tied, error) {
	n, port, err := a.plan(&current.Result{})
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
	if err := a.recordLease(ctx, port); err != nil {
		return nil, err
	}
	port.Unsettled = false // or the first frame would be lost
	att, err := a.attach(ctx, n, b, port)
	if err != nil {
		return nil, err
	}
	if err := a.call.step("link"); err != nil {
		return nil, err
	}
	solicited, err := a.solicit(ctx, port)
	if err != nil {
		return nil, err
	}
	defer solicited.close()
	a.leave()
	err = whileWanted(ctx, a.pending, func(ctx context.Context) error { return a.acquire(ctx, b, att) })
	if err != nil {
		return nil, err
	}
	t := &tied{leased: a.leasing.result(), built: b, attachment: att}
	if err := a.advertised(ctx, solicited, t); err != nil {
		return nil, err
	}
	if err := a.enter(ctx); err != nil {
		return nil, err
	}
	if t.network, port, err = a.plan(t.leased); err != nil {
		return nil, err
	}
	a.rec.Addresses[0].GoThrough(a.leasing.rec.Policy.Gateway)
	if err := a.applyLease(ctx, att); err != nil {
		return nil, err
	}
	// Only now can the port tell whose address is behind it.
	port.PeerMAC = att.PeerMAC
	a.onto(b, port)
	if err := a.br.Enslave(ctx, *port); err != nil {
		return nil, err
	}
	if t.built, err = a.ready(ctx, t.network); err != nil {
		return nil, err
	}
	return t, a.call.step("ipam")
}

// recordLease says what will be leased before a packet is sent: whatever comes, the
// keeper and GC know that it may be there.
func (a *adding) recordLease(ctx context.Context, port *bridge.Port) error {
	l := a.leasing
	cookie, err := a.pod.Cookie()
	if err != nil {
		return err
	}
	// By this the keeper knows that the attachment is the lease's.
	a.rec.NetNSCookie = cookie
	boot, err := lease.Boot()
	if err != nil {
		return err
	}
	l.rec = &lease.Record{
		State: lease.Adding, Network: a.rec.Network, ContainerID: a.rec.ContainerID, IfName: a.rec.IfName, Pod: a.rec.Pod,
		NetNS: a.rec.NetNS, NetNSCookie: cookie, Boot: boot, HostIf: port.Name, Bridge: port.Bridge,
		Client: *l.client, Policy: l.conf.policy(&a.settings), Created: time.Now().UTC(),
	}
	// The client knows a lease of an earlier container of the pod.
	if l.client.Sticky {
		if last, err := l.dir.Recall(a.rec.Network, l.client.ClientID); err == nil && last != nil {
			l.rec.Lease = last.Lease
		}
	}
	if err := l.held.Create(l.rec); err != nil {
		return newError(codeIO, "%v", err)
	}
	a.undo.push(func(context.Context) error { return l.held.Remove() })
	return nil
}

// lock takes the lock of the lease's record, which a DEL or the keeper may have for a
// while. It comes before the state's.
func (l *leasing) lock(ctx context.Context, hash string) error {
	var err error
	if l.held, err = l.dir.Lock(ctx, hash); err != nil {
		return newError(codeTryAgainLater, "%v", err)
	}
	return nil
}

// unlock gives it back.
func (l *leasing) unlock() {
	if l.held != nil {
		l.held.Close()
		l.held = nil
	}
}

// acquire gets the lease from inside the pod.
func (a *adding) acquire(ctx context.Context, b *built, att *bridge.Attachment) error {
	l := a.leasing
	l.rec.Client.LinkMTU = att.MTU
	sockets := &transport.Config{NetNS: a.pod, Link: att.PeerIndex, MAC: att.PeerMAC, ARP: l.conf.DetectConflicts}
	cfg := l.rec.Client.Config(l.rec.Lease)
	cfg.Timeout = l.conf.timeout()
	cfg.Dial, cfg.Refuse = l.dialer(sockets, att), a.refuse(ctx, b, l.rec.Lease)
	client, err := dhcpc.New(cfg)
	if err != nil {
		return newError(codeInvalidConfig, "ipam: %v", err)
	}
	lockorder.Slow("a DHCP server")
	got, err := client.Acquire(ctx)
	if err != nil {
		return newError(codeTryAgainLater, "%v", err)
	}
	a.undo.push(func(ctx context.Context) error {
		a.leave()
		return transport.Release(ctx, sockets, got)
	})
	for _, why := range got.Ignored {
		a.call.log.warn("lease of " + got.Address.String() + ": " + why)
	}
	if l.rec.Policy.Gateway, err = a.throughHost(ctx, b.bridge, got.Address); err != nil {
		return err
	}
	l.rec.Lease, l.rec.Applied = got, l.rec.Policy.Apply(got)
	return nil
}

// result is the lease as an IPAM's result.
func (l *leasing) result() *current.Result {
	got := l.rec.Lease
	r := &current.Result{IPs: []*current.IPConfig{{Address: ipNet(got.Address)}}}
	switch gateway := l.rec.Policy.Gateway; {
	case gateway.IsValid():
		r.IPs[0].Gateway = gateway.AsSlice()
	case len(got.Routers) > 0:
		r.IPs[0].Gateway = got.Routers[0].AsSlice()
	}
	onLink := int(route.ScopeLink)
	for _, rt := range l.rec.Applied.Routes {
		one := &types.Route{Dst: ipNet(rt.Dst), Priority: l.rec.Policy.Priority}
		if rt.Via.IsValid() {
			one.GW = rt.Via.AsSlice()
		} else {
			one.Scope = &onLink
		}
		r.Routes = append(r.Routes, one)
	}
	for _, a := range got.DNS {
		r.DNS.Nameservers = append(r.DNS.Nameservers, a.String())
	}
	r.DNS.Domain, r.DNS.Search = got.Domain, got.Search
	return r
}

// applyLease gives the pod what it has leased. The address has the lease's lifetime,
// so that the kernel itself ends it if everything of ours dies.
func (a *adding) applyLease(ctx context.Context, att *bridge.Attachment) error {
	rec := a.leasing.rec
	if mtu := rec.Applied.MTU; mtu > 0 && mtu < att.MTU {
		// The pod's alone: the host's bridge, and with it the host, is not the server's.
		if err := a.br.SetMTU(ctx, a.pod, "", att.Peer, mtu); err != nil {
			return err
		}
	}
	addresses, err := addr.Dial(&addr.Config{NetNS: a.pod})
	if err != nil {
		return err
	}
	defer addresses.Close()
	valid := validFor(rec.Lease)
	for _, p := range rec.Applied.Addresses {
		if _, err := addresses.Ensure(addr.Address{Prefix: p, Link: att.PeerIndex, Valid: valid, Preferred: valid}); err != nil {
			return err
		}
	}
	routes, err := route.Dial(&route.Config{NetNS: a.pod})
	if err != nil {
		return err
	}
	defer routes.Close()
	for _, rt := range rec.Applied.Routes {
		if err := routes.Add(lease.RouteOf(rt, att.PeerIndex, rec.Policy.Priority)); err != nil {
			return explainRoute(err)
		}
	}
	return nil
}

// validFor is how long the kernel is to keep a lease's address; nil is for ever.
func validFor(l *dhcpc.Lease) *time.Duration {
	left := l.Left(time.Now())
	if left < 0 {
		return nil
	}
	left = min(max(left, time.Second), (math.MaxUint32-1)*time.Second)
	return &left
}

// commitLease hands the lease over to the keeper. That waits for the disk, so the state's
// lock is not held meanwhile.
func (a *adding) commitLease(ctx context.Context) error {
	a.leave()
	rec := a.leasing.rec
	rec.State, rec.Updated = lease.Bound, time.Now().UTC()
	if err := a.leasing.held.Replace(rec); err != nil {
		return newError(codeIO, "%v", err)
	}
	return a.enter(ctx)
}

// releaseLease gives back what an attachment leased, from the pod's interface as long
// as that is there, else from the bridge; and its record goes. A server that does not
// hear of it has the address back when the lease ends. The state's lock must not be held.
func (h *host) releaseLease(ctx context.Context, path, hash string) error {
	if path == "" {
		return nil
	}
	dir, err := lease.Open(path)
	if err != nil {
		return err
	}
	if _, err := dir.Load(hash); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	held, err := dir.Lock(ctx, hash)
	if err != nil {
		return newError(codeTryAgainLater, "%v", err)
	}
	defer held.Close()
	rec, err := held.Load()
	var damaged *lease.RecordError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.As(err, &damaged):
		h.call.log.warn(err.Error())
		_, err := held.SetAside()
		return err
	case err != nil:
		return newError(codeIO, "%v", err)
	}
	if rec.Lease != nil && rec.State == lease.Bound && rec.Lease.Left(time.Now()) != 0 {
		if err := h.sendRelease(ctx, dir, rec); err != nil {
			// It must not keep a pod from going.
			h.call.log.warn(err.Error())
		}
	}
	if rec.Client.Sticky && rec.Lease != nil {
		return held.Remember(ctx, rec)
	}
	return held.Remove()
}

// leases lists the network's, but for those that only wait for their pod to come back.
func (h *host) leases() ([]*lease.Record, error) {
	if h.settings.LeaseDir == "" {
		return nil, nil // an operator's command
	}
	dir, err := lease.Open(h.settings.LeaseDir)
	if err != nil {
		return nil, err
	}
	all, damaged, err := dir.List()
	for _, d := range damaged {
		h.call.log.warn(d.Error())
	}
	return slices.DeleteFunc(all, func(r *lease.Record) bool {
		return r.Network != h.call.network || r.State == lease.Sticky
	}), err
}

// followLease brings an attachment's record up to its lease: where the server gave the
// pod another address since its ADD, the keeper has changed the pod's, and what else
// goes by the address follows here.
func (h *host) followLease(ctx context.Context, n *state.Network, a *state.Attachment) error {
	if a.IPAMType != ipamDHCP || len(a.Addresses) == 0 {
		return nil
	}
	dir, err := lease.Open(a.DataDir)
	if err != nil {
		return err
	}
	rec, err := dir.Load(a.Hash())
	if err != nil || rec.State != lease.Bound || rec.Lease.Address == a.Addresses[0].Prefix {
		return nil // what is wrong with a lease is for CHECK to say
	}
	old := endpointOf(a)
	moved := a.Addresses[0]
	moved.Prefix, moved.Gateway = rec.Lease.Address, netip.Addr{}
	if len(rec.Lease.Routers) > 0 {
		moved.Gateway = rec.Lease.Routers[0]
	}
	a.Addresses[0] = moved
	if err := h.fw.Move(ctx, old, endpoint.In(a, n)); err != nil {
		return err
	}
	if err := h.dir.Update(a); err != nil {
		return newError(codeIO, "%v", err)
	}
	return nil
}

// leaseDir is where an attachment's lease is on record, by its own record or by the
// configuration; "" where it has none.
func (h *host) leaseDir(conf *NetConf, rec *state.Attachment) string {
	switch {
	case rec != nil && rec.IPAMType == ipamDHCP && rec.DataDir != "":
		return rec.DataDir
	case rec == nil && conf.ipamType() == ipamDHCP:
		return h.settings.LeaseDir
	}
	return ""
}

// sendRelease sends the RELEASE. A pod's lease that is to stay its own is not given
// back: the server keeps the address for it as long as the lease runs.
func (h *host) sendRelease(ctx context.Context, dir *lease.Dir, rec *lease.Record) error {
	if rec.Client.Sticky {
		return nil
	}
	if pod, err := netns.Open(rec.NetNS); err == nil {
		defer pod.Close()
		if cookie, err := pod.Cookie(); err == nil && cookie == rec.NetNSCookie {
			index, err := linkIndexIn(pod, rec.IfName)
			if err == nil {
				return releaseFromPod(ctx, dir, &transport.Config{NetNS: pod, Link: index, MAC: net.HardwareAddr(rec.Lease.MAC)}, rec.Lease)
			}
		}
	}
	l, err := h.br.Link(ctx, rec.Bridge)
	if err != nil {
		return fmt.Errorf("release lease of %s: %w", rec.Lease.Address.Addr(), err)
	}
	return transport.Release(ctx, &transport.Config{Link: l.Index}, rec.Lease)
}

// releaseFromPod sends it from the pod's interface, by a packet socket that the keeper
// closes: by a UDP socket, the packet might still wait for the server's MAC when the link
// goes.
func releaseFromPod(ctx context.Context, dir *lease.Dir, sockets *transport.Config, l *dhcpc.Lease) error {
	p, err := dhcpc.Release(l, rand.Uint32())
	if err != nil {
		return err
	}
	raw, err := transport.DialRaw(sockets)
	if err != nil {
		return err
	}
	return errors.Join(raw.Send(ctx, p), handOver(dir, raw))
}

// linkIndexIn looks an interface of a pod up.
func linkIndexIn(pod *netns.NS, name string) (int, error) {
	conn, err := bridge.Dial(&bridge.Config{NetNS: pod})
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	l, err := conn.Link(context.Background(), name)
	if err != nil {
		return 0, err
	}
	return l.Index, nil
}

// leaseDifferences compares an attachment with its lease.
func (h *host) leaseDifferences(rec *state.Attachment, conf *dhcpConf, found *findings) error {
	dir, err := lease.Open(rec.DataDir)
	if err != nil {
		return err
	}
	if conf == nil || conf.Keeper != keeperOptional {
		if err := dir.Kept(); err != nil {
			found.add("%v", err)
		}
	}
	r, err := dir.Load(rec.Hash())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		found.add("its lease has no record in %s", dir.Path())
	case err != nil:
		found.add("%v", err)
	case r.State != lease.Bound:
		found.add("its lease is %s: %s", r.State, r.Error)
	case len(rec.Addresses) == 0 || r.Lease.Address != rec.Addresses[0].Prefix:
		found.add("its lease is of %s", r.Lease.Address)
	case r.Lease.Left(time.Now()) == 0:
		found.add("its lease of %s ended at %s", r.Lease.Address, r.Lease.Expire.Format(time.RFC3339))
	}
	return nil
}
