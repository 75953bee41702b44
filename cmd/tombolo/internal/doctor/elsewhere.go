package doctor

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/icmp"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/route"
)

// routed is what helps where the host lacks a route to other nodes' pods.
const routed = "see why the host gets no such route from the routing engine (birdc show protocols; vtysh -c 'show bgp summary'), or from the cloud's route controller"

// kept looks for destinations for which pods keep their address, and to which the host refuses
// to send anything: a routing engine announces all of a cluster's pods as unreachable, but for
// those that it knows the way to. Where a default route is all that leads there, the next router
// may know the way.
func (e *examination) kept(ctx context.Context, own netip.Addr) error {
	routes, err := e.onHost.List(ctx, route.Filter{Family: nl.FamilyOf(own), Table: unix.RT_TABLE_MAIN})
	if err != nil {
		return err
	}
	for _, to := range e.opt.Kept[e.at.Network] {
		if to.Addr().Is4() != own.Is4() {
			continue
		}
		refused, sent := false, false
		for _, r := range routes {
			switch r.Type {
			case unix.RTN_UNREACHABLE, unix.RTN_BLACKHOLE, unix.RTN_PROHIBIT:
				refused = refused || r.Dst.Bits() > 0 && r.Dst.Bits() <= to.Bits() && r.Dst.Contains(to.Addr())
			case unix.RTN_UNICAST:
				sent = sent || r.Dst.Bits() > 0 && r.Dst.Overlaps(to) && !r.Dst.Contains(own)
			}
		}
		if refused && !sent {
			e.add(StepBeyond, "nothing, if no other node has pods; else "+routed, "the host has routes to no other pods of %s, for which pods keep their address: it refuses what is sent there", to)
			e.found[len(e.found)-1].Note = true
		}
	}
	return nil
}

// targets follows the way to what the operator asks about, such as another node's pod.
func (e *examination) targets(ctx context.Context) error {
	try := func(to netip.Addr, do func() error) error {
		if e.sendsTo(to) {
			return do()
		}
		e.add(StepAddress, "give the pod an address of that family", "the pod has no address to reach %s from", to)
		return nil
	}
	for _, to := range e.opt.Ports {
		if err := try(to.Addr(), func() error { return e.connection(ctx, to) }); err != nil {
			return err
		}
	}
	for _, to := range e.opt.To {
		if err := try(to, func() error { return e.destination(ctx, e.own, to) }); err != nil {
			return err
		}
	}
	return nil
}

// sendsTo reports whether the pod has an address of the family of to, and has probes sent from the first such address.
func (e *examination) sendsTo(to netip.Addr) bool {
	for _, a := range e.at.Addresses {
		if a.Prefix.Addr().Is4() == to.Is4() {
			e.own = a.Prefix.Addr()
			return true
		}
	}
	return false
}

// connection has the pod begin a connection by TCP. A refusal is an answer.
func (e *examination) connection(ctx context.Context, to netip.AddrPort) error {
	const dynamic = 49152 // the first port that is not assigned (RFC 6335)
	from := netip.AddrPortFrom(e.own, dynamic+rand.N[uint16](1<<14))
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(from), Timeout: wait}
	var dialErr error
	t, err := e.follow(ctx, flowProbe(e.own.Is4(), unix.IPPROTO_TCP, from.Port()), func() {
		dialErr = e.pod.Do(func() error {
			conn, err := dialer.DialContext(ctx, "tcp", to.String())
			if err != nil {
				return err
			}
			return conn.Close()
		})
	})
	rejected := t != nil && (t.dropped[false] != nil || t.dropped[true] != nil)
	if err != nil || dialErr == nil || errors.Is(dialErr, unix.ECONNREFUSED) && !rejected {
		e.try("a connection to %s", to)
		return err
	}
	l, err := e.whereLost(ctx, e.own, to.Addr(), t, dialErr)
	if err != nil {
		return err
	}
	if l.beyond {
		l.remedy = fmt.Sprintf("see on %s, and on what is between, whether a firewall drops the packets, and whether a route leads back", to.Addr())
	}
	e.addLoss(l, fmt.Sprintf("the pod %s gets no answer from %s", e.own, to))
	return ctx.Err()
}

// destination follows the way to an address.
func (e *examination) destination(ctx context.Context, own, to netip.Addr) error {
	if _, err := e.inPod.Get(ctx, to); err != nil {
		e.add(StepRoute, "set isDefaultGateway, or a route in the ipam, and create the pod again", "the pod has no route to %s: %v", to, err)
		return nil
	}
	l, answered, err := e.echo(ctx, own, to)
	if err != nil || answered {
		e.try("%s by echo requests", to)
		return err
	}
	hop, hopErr := e.onHost.Get(ctx, to)
	switch {
	case hopErr != nil:
		e.add(StepBeyond, cmp.Or(l.remedy, routed), "the host has no route to %s: %v", to, cmp.Or(l.evidence, hopErr.Error()))
		return nil
	case !l.beyond:
		e.addLoss(l, fmt.Sprintf("the pod %s gets no answer from %s", own, to))
		return nil
	}
	if ping(ctx, e.host, to, icmp.Echo{Wait: wait}) == nil {
		e.add(StepBeyond, "on the host or node of that address, see whether there is a route back to the pod, and whether a firewall drops what is forwarded: ip route get "+own.String(),
			"the host reaches %s, and the pod %s does not: %s", to, own, l.evidence)
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	general, generalErr := e.onHost.Get(ctx, routing.Outside(to))
	byDefault := generalErr == nil && hop.Gateway.IsValid() && hop.Gateway == general.Gateway && hop.Link == general.Link
	keeps := slices.ContainsFunc(e.opt.Kept[e.at.Network], func(p netip.Prefix) bool { return p.Contains(to) })
	switch {
	case byDefault && keeps:
		e.add(StepBeyond, routed, "only the host's default route, by %s, leads to %s, for which pods keep their address, and neither host nor pod reaches it: %s", hop.Gateway, to, l.evidence)
	case hop.Gateway.IsValid():
		e.add(StepBeyond, "look whether "+hop.Gateway.String()+" and "+to.String()+" are up, and whether a firewall there drops what is forwarded", "neither the host nor the pod reaches %s, to which a route leads by %s: %s", to, hop.Gateway, l.evidence)
	default:
		e.add(StepBeyond, "look whether "+to.String()+" is up", "neither the host nor the pod reaches %s: %s", to, l.evidence)
	}
	return nil
}

// hear is for how long several nodes may answer for one address.
const hear = 200 * time.Millisecond

// duplicates asks on the bridge who has the pod's IPv4 address, and who the gateway's, which the
// host itself does not answer there.
func (e *examination) duplicates(ctx context.Context) error {
	for _, a := range e.at.Addresses {
		if !a.Prefix.Addr().Is4() {
			continue
		}
		owners, err := lease.WhoHas(ctx, e.bridge.Index, e.bridge.MAC, a.Prefix.Addr(), hear)
		if err != nil {
			return err
		}
		for _, mac := range owners {
			if !bytes.Equal(mac, e.at.MAC) {
				e.add(StepDuplicate, "give one of the two another address", "another node answers for %s: %s, and the pod has %s", a.Prefix.Addr(), mac, e.at.MAC)
			}
		}
		if !a.Gateway.Is4() || !e.isOwn(ctx, a.Gateway) {
			return nil
		}
		if owners, err = lease.WhoHas(ctx, e.bridge.Index, e.bridge.MAC, a.Gateway, hear); err != nil {
			return err
		}
		for _, mac := range owners {
			e.add(StepDuplicate, "give that node another address", "another node on bridge %s answers for the gateway %s: %s", e.bridge.Name, a.Gateway, mac)
		}
	}
	return nil
}
