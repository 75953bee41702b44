package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// routed is the remedy for a host that lacks a route to other nodes' pods.
const routed = "see why the host gets no such route from the routing engine (birdc show protocols; " +
	"vtysh -c 'show bgp summary'), or from the cloud's route controller"

// setRoute returns the remedy for a pod without a route, for the error of its lookup. An unreachable, prohibit or
// blackhole route in the pod, such as that of a VPN's kill switch, causes another error than ENETUNREACH.
func (e *examination) setRoute(err error) string {
	if errors.Is(err, unix.ENETUNREACH) {
		return "set isDefaultGateway, or a route in the ipam, and create the pod again"
	}
	return "see which route or rule in the pod refuses it: " + e.inside("sh -c 'ip rule; ip route; ip -6 route'")
}

// kept checks the destinations in Options.Kept, such as other nodes' pods. It adds a note if an unreachable, blackhole
// or prohibit route covers such a destination, and no other route leads to a part of it. A routing daemon adds such a
// route for all pods of a cluster, and more specific routes for the nodes that it knows. kept ignores default routes,
// since the next router may have a route. It also ignores routes to the pod itself, such as the route to its subnet.
func (e *examination) kept(ctx context.Context) {
	routes, err := e.onHost.List(ctx, route.Filter{Family: nl.FamilyOf(e.own), Table: unix.RT_TABLE_MAIN})
	e.fail(err)
	for _, to := range e.opt.Kept[e.at.Network] {
		if to.Addr().Is4() != e.own.Is4() {
			continue
		}

		refused, sent := false, false
		for _, r := range routes {
			special := r.Dst.Bits() > 0
			refused = refused || special && refuses(r) && r.Dst.Bits() <= to.Bits() && r.Dst.Contains(to.Addr())
			sent = sent || special && r.Type == unix.RTN_UNICAST && r.Dst.Overlaps(to) && !r.Dst.Contains(e.own)
		}

		if refused && !sent {
			f := finding(StepBeyond, "nothing, if no other node has pods; else "+routed, "the host has routes to no "+
				"other pods of %s, a destination without masquerade, and refuses packets there", to)
			f.Note = true
			e.findings = append(e.findings, *f)
		}
	}
}

// targets follows the path to each target that the operator named, such as another node's pod. It adds a finding for a
// target that the pod does not reach.
func (e *examination) targets(ctx context.Context) {
	for _, to := range e.opt.To {
		switch {
		case !e.sendsTo(to.Addr()):
			e.add(StepAddress, "give the pod an address of that family",
				"the pod has no address to reach %s from", to.Addr())
		case to.Port() == 0:
			e.destination(ctx, to.Addr())
		default:
			e.connection(ctx, to)
		}
	}
}

// sendsTo reports whether the pod has an address of the family of the destination. It sets the first such address as
// the source of probes.
func (e *examination) sendsTo(to netip.Addr) bool {
	i := slices.IndexFunc(e.at.Addresses, func(a ipam.Address) bool { return a.Prefix.Addr().Is4() == to.Is4() })
	if i >= 0 {
		e.own = e.at.Addresses[i].Prefix.Addr()
	}
	return i >= 0
}

// connection opens a TCP connection from the pod, and adds a finding if no answer comes. A refusal by the other end
// counts as an answer, but a rejection by a firewall of this host does not.
func (e *examination) connection(ctx context.Context, to netip.AddrPort) {
	const dynamic = 49152 // the first port that is not assigned (RFC 6335)
	from := netip.AddrPortFrom(e.own, dynamic+rand.N[uint16](1<<14))
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(from), Timeout: wait}
	p := flowProbe(e.own.Is4(), unix.IPPROTO_TCP, from.Port())
	dial := func(ns *netns.NS, dialer net.Dialer) error {
		return ns.Do(func() error {
			conn, err := dialer.DialContext(ctx, "tcp", to.String())
			if err != nil {
				return err
			}
			return conn.Close()
		})
	}

	f := e.exchange(ctx, "a connection to "+to.String(), to.Addr(), p, func() error { return dial(e.pod, dialer) })
	if f == nil {
		return
	}

	if f.Remedy == "" {
		f.Remedy = "see there and in between whether a firewall drops it, and whether a route leads back"
		does := ", and the host itself reaches it"
		if err := dial(e.host, net.Dialer{Timeout: wait}); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			does = ", nor does the host itself reach it"
		}
		f.Evidence += does
	}

	e.addLoss(f, to.String())
}

// destination follows the path to an address, and adds a finding if the pod does not reach it.
func (e *examination) destination(ctx context.Context, to netip.Addr) {
	f, _ := e.echo(ctx, to, to.String())
	if f == nil {
		return
	}

	hop, err := e.onHost.Get(ctx, to)
	e.fail(err)
	general, _ := e.onHost.Get(ctx, routing.Outside(to))
	byDefault := hop.Gateway.IsValid() && hop.Gateway == general.Gateway && hop.Link == general.Link
	keeps := slices.ContainsFunc(e.opt.Kept[e.at.Network], func(p netip.Prefix) bool { return p.Contains(to) })
	evidence := fmt.Sprintf("neither the host nor the pod reaches %s", to)
	remedy := fmt.Sprintf("look whether %s is up", to)
	switch {
	case byDefault && keeps:
		evidence = fmt.Sprintf("only the host's default route, by %s, leads to %s, a destination without masquerade, "+
			"and neither host nor pod reaches it", hop.Gateway, to)
		remedy = routed
	case hop.Gateway.IsValid():
		evidence += ", to which a route leads by " + hop.Gateway.String()
		remedy = fmt.Sprintf("look whether %s and %s are up, and whether a firewall there drops it", hop.Gateway, to)
	}

	e.add(StepBeyond, remedy, "%s: %s", evidence, f.Evidence)
}

// hear is the time to wait for the answers to one ARP probe, which several nodes may answer.
const hear = 200 * time.Millisecond

// duplicates sends ARP probes from the bridge for the pod's IPv4 addresses, and for a gateway's address that the host
// itself has. It adds a finding for each other node that answers. The host itself does not answer these probes.
func (e *examination) duplicates(ctx context.Context) {
	for _, a := range e.at.Addresses {
		for _, asked := range []netip.Addr{a.Prefix.Addr(), a.Gateway} {
			isGateway := asked == a.Gateway
			if !asked.Is4() || isGateway && !e.isOwn(ctx, asked) {
				continue
			}

			owners, err := lease.WhoHas(ctx, e.bridge.Index, e.bridge.MAC, asked, hear)
			e.fail(err)
			for _, mac := range owners {
				if isGateway {
					e.add(StepDuplicate, "give that node another address",
						"another node on bridge %s answers for the gateway %s: %s", e.bridge.Name, asked, mac)
				} else if !bytes.Equal(mac, e.at.MAC) {
					e.add(StepDuplicate, "give one of the two another address",
						"another node answers for %s: %s, and the pod has %s", asked, mac, e.at.MAC)
				}
			}
		}
	}
}
