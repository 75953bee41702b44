package doctor

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/icmp"
	"github.com/tombolo-cni/tombolo/internal/nl"
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

// destination follows the way to an address that the operator asks about, such as another node's
// pod.
func (e *examination) destination(ctx context.Context, own, to netip.Addr) error {
	err := ping(ctx, e.pod, to, icmp.Echo{From: own, Wait: wait})
	if err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	if _, err := e.inPod.Get(ctx, to); err != nil {
		e.add(StepRoute, "set isDefaultGateway, or a route in the ipam, and create the pod again", "the pod has no route to %s: %v", to, err)
		return nil
	}
	hop, hopErr := e.onHost.Get(ctx, to)
	if hopErr != nil {
		e.add(StepBeyond, routed, "the host has no route to %s: %v", to, hopErr)
		return nil
	}
	if ping(ctx, e.host, to, icmp.Echo{Wait: wait}) == nil {
		e.add(StepBeyond, "with a port, --to "+netip.AddrPortFrom(to, 80).String()+" finds a rule of this host that drops it; on the host or node of that address, "+
			"see whether there is a route back to the pod, and whether a firewall drops what is forwarded: ip route get "+own.String(),
			"the host reaches %s, and the pod %s does not: %v", to, own, err)
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	general, generalErr := e.onHost.Get(ctx, outside(to))
	byDefault := generalErr == nil && hop.Gateway.IsValid() && hop.Gateway == general.Gateway && hop.Link == general.Link
	keeps := slices.ContainsFunc(e.opt.Kept[e.at.Network], func(p netip.Prefix) bool { return p.Contains(to) })
	switch {
	case byDefault && keeps:
		e.add(StepBeyond, routed, "only the host's default route, by %s, leads to %s, for which pods keep their address, and neither host nor pod reaches it: %v", hop.Gateway, to, err)
	case hop.Gateway.IsValid():
		e.add(StepBeyond, "look whether "+hop.Gateway.String()+" and "+to.String()+" are up, and whether a firewall there drops what is forwarded", "neither the host nor the pod reaches %s, to which a route leads by %s: %v", to, hop.Gateway, err)
	default:
		e.add(StepBeyond, "look whether "+to.String()+" is up", "neither the host nor the pod reaches %s: %v", to, err)
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
		owners, err := whoHas(ctx, e.bridge, a.Prefix.Addr())
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
		if owners, err = whoHas(ctx, e.bridge, a.Gateway); err != nil {
			return err
		}
		for _, mac := range owners {
			e.add(StepDuplicate, "give that node another address", "another node on bridge %s answers for the gateway %s: %s", e.bridge.Name, a.Gateway, mac)
		}
	}
	return nil
}

// whoHas sends an ARP probe (RFC 5227), which changes no neighbour table, and gives the MACs of those that answer.
func whoHas(ctx context.Context, br *bridge.Link, a netip.Addr) ([]net.HardwareAddr, error) {
	conn, err := transport.DialRaw(&transport.Config{Link: br.Index, MAC: br.MAC, ARP: true})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	probe := &dhcpc.Packet{ARP: &dhcpc.ARP{SenderMAC: dhcpc.Hex(br.MAC), SenderIP: netip.IPv4Unspecified(), TargetIP: a}}
	if err := conn.Send(ctx, probe); err != nil {
		return nil, err
	}
	var list []net.HardwareAddr
	until := time.Now().Add(hear)
	for {
		p, err := conn.Receive(ctx, until)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return list, nil
		}
		if err != nil {
			return nil, err
		}
		if p.ARP == nil || p.ARP.SenderIP != a || !p.ARP.Reply {
			continue
		}
		mac := net.HardwareAddr(p.ARP.SenderMAC)
		if !bytes.Equal(mac, br.MAC) && !slices.ContainsFunc(list, func(have net.HardwareAddr) bool { return bytes.Equal(have, mac) }) {
			list = append(list, mac)
		}
	}
}
