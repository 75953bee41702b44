package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/route"
)

// forwardingPart is that the host forwards what pods send, and what is sent to them.
type forwardingPart struct{}

// lanRouting is what the host has to be for pods of a LAN whose default route leads through it (defaultRoute
// "host"), so that its firewall and services see what they send; answers are bridged, and seen because the bridge
// calls the firewall. ok is false where there are none.
func lanRouting(rec *state.Network) (r bridge.Routing, ok bool) {
	return bridge.Routing{IPv4: true, IPv6: rec.SLAAC, NoRedirects: rec.Bridge}, rec.DefaultRoute == exitHost
}

// forwarded gives an address of each family that the host has to forward: of gateways, and of pods that ports of
// the host lead to. An Add asks for its own pod alone.
func (n *site) forwarded() []netip.Addr {
	var list []netip.Addr
	need := func(a netip.Addr) {
		if !slices.ContainsFunc(list, func(b netip.Addr) bool { return a.BitLen() == b.BitLen() }) {
			list = append(list, a)
		}
	}
	gateways := n.rec.Gateways
	if n.usual && n.want != nil {
		gateways = n.want.Record.Gateways
	}
	for _, gw := range gateways {
		need(gw.Addr())
	}
	if n.want != nil {
		for _, a := range n.want.Reached {
			need(a)
		}
	}
	for _, a := range n.attachments {
		for _, address := range a.Addresses {
			if len(a.Published) > 0 {
				need(address.Prefix.Addr())
			}
		}
	}
	return list
}

// familyRouting is that the host forwards the families of these addresses.
func familyRouting(addrs ...netip.Addr) (r bridge.Routing) {
	for _, a := range addrs {
		r.IPv4, r.IPv6 = r.IPv4 || a.Is4(), r.IPv6 || a.Is6()
	}
	return r
}

func familyName(a netip.Addr) string {
	if a.Is4() {
		return "IPv4 (net.ipv4.ip_forward)"
	}
	return "IPv6 (net.ipv6.conf.all.forwarding)"
}

func (forwardingPart) look(ctx context.Context, n *site) error {
	if r, ok := lanRouting(n.rec); ok && n.bridge.Index != 0 {
		diffs, err := n.s.Links.CheckRouting(ctx, r)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		n.found.AddAll(diffs, tombolo.RemedyRepair)
	}
	addrs := n.forwarded()
	if all, err := n.s.Links.Forwards(ctx, familyRouting(addrs...)); err == nil && all {
		return n.lookAtInput()
	}
	for _, a := range addrs {
		ok, err := n.s.Links.Forwards(ctx, familyRouting(a))
		if err != nil && !n.usual {
			return err
		}
		if err != nil || !ok { // making it says what a kernel cannot
			n.found.Advise(tombolo.RemedyRepair, "the host does not forward %s", familyName(a))
		}
	}
	return n.lookAtInput()
}

// lookAtInput looks at the parameter of the gateways' link without which the host does not forward what
// comes by it, though it forwards in general. IPv6 has no such parameter that matters.
func (n *site) lookAtInput() error {
	if n.usual || n.at.Index == 0 || !slices.ContainsFunc(n.rec.Gateways, isIPv4) {
		return nil
	}
	return n.lookAtParameter(sysctl.Link("ipv4", n.at.Name, "forwarding"), "1")
}

// lookAtParameter compares a kernel parameter.
func (n *site) lookAtParameter(path, want string) error {
	have, err := sysctl.Read(path)
	if err == nil && have != want {
		n.found.AddAll([]tombolo.Difference{{Object: "kernel parameters", What: path, Want: want, Have: have}}, tombolo.RemedyRepair)
	}
	return err
}

func (forwardingPart) make(ctx context.Context, n *site) (bool, error) {
	if _, err := n.s.Links.EnsureRouting(ctx, familyRouting(n.forwarded()...)); err != nil {
		return false, err
	}
	if r, ok := lanRouting(n.rec); ok {
		if _, err := n.s.Links.EnsureRouting(ctx, r); err != nil {
			return false, err
		}
	}
	if n.at.Index == 0 || !slices.ContainsFunc(n.rec.Gateways, isIPv4) {
		return false, nil
	}
	_, err := sysctl.Ensure(sysctl.Link("ipv4", n.at.Name, "forwarding"), "1")
	return false, err
}

// refuseIPv6 returns an error if the kernel was booted with ipv6.disable=1 or built without IPv6, and the network's
// pods use IPv6: by SLAAC, by an address in one of the subnets, or by one of the routes. The kernel's own errors come
// late and are terse. An Add passes subnets only when it builds, since such a network is never found ready.
func refuseIPv6(network string, slaac bool, subnets []netip.Prefix, routes ...route.Route) error {
	asked := ""
	if i := slices.IndexFunc(routes, func(r route.Route) bool { return isIPv6(r.Dst) }); i >= 0 {
		asked = fmt.Sprintf("a route to %s", routes[i].Dst)
	}
	if i := slices.IndexFunc(subnets, isIPv6); i >= 0 {
		asked = fmt.Sprintf("an address in %s", subnets[i])
	}
	if slaac {
		asked = `ipv6 "slaac"`
	}
	if asked == "" || sysctl.HasIPv6() {
		return nil
	}
	return fail.Errorf(tombolo.ErrInvalid, "network %q asks for %s, and IPv6 is switched off in this kernel: "+
		"take it out of the configuration, or boot without ipv6.disable=1 on the kernel's command line "+
		"(and with a kernel that has IPv6)", network, asked)
}
