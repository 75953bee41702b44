package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// forwardingPart is the part that makes the host forward packets from and to pods. The host forwards no other
// packets, unless its owner made it a router. The rules that drop other packets belong to firewallPart.
type forwardingPart struct{}

// neededRouting returns the address families that the host must forward for the network. These are the families of
// gateways, of pods with host ports, and of pods with a default route through the host (ExitHost). With n.quick, as for
// an Add, only the Add's own pod counts. If the host is a gateway, Input is the link with the gateways.
func (n *site) neededRouting() (r bridge.Routing) {
	need := func(a netip.Addr) { r.IPv4, r.IPv6 = r.IPv4 || a.Is4(), r.IPv6 || a.Is6() }
	gateways := n.rec.Gateways
	if n.quick && n.required != nil {
		gateways = n.required.Record.Gateways
	}

	for _, gw := range gateways {
		need(gw.Addr())
	}

	for _, a := range n.pods() {
		for _, address := range a.Addresses {
			if len(a.Published) > 0 {
				need(address.Prefix.Addr())
			}
		}
	}

	if n.gatewayLink.Index != 0 && len(n.rec.Gateways) > 0 {
		r.Input = n.gatewayLink.Name
	}

	if n.rec.DefaultRoute == exitHost {
		r.IPv4, r.IPv6 = true, r.IPv6 || n.rec.SLAAC
	}

	return r
}

// lookAtForwarding sets n.closed to the families that the host forwards for pods only, now or after a repair that
// meets needs. It returns the families that the host forwards for pods now.
func (n *site) lookAtForwarding(ctx context.Context, needs bridge.Routing) (pods bridge.Routing, _ error) {
	pods, router, err := n.s.Links.Forwards(ctx)
	if err != nil {
		return pods, err
	}

	n.closed = []nft.Closed{}
	if (pods.IPv4 || needs.IPv4) && !router.IPv4 {
		n.closed = append(n.closed, nft.Closed{Routers: n.rec.Routers4})
	}

	if (pods.IPv6 || needs.IPv6) && !router.IPv6 {
		n.closed = append(n.closed, nft.Closed{IPv6: true, Routers: n.rec.Routers6})
	}
	return pods, err
}

// routers4 lists the links for which the host's owner turned on IPv4 forwarding, although the host is no router.
// Their parameter is neither 0 nor the value that we write.
func routers4() ([]string, error) { return routers("ipv4", "forwarding", "0", sysctl.OwnForwarding) }

// routers lists the links whose value of the parameter name is none of the values in others. It leaves out "default".
func routers(family, name string, others ...string) ([]string, error) {
	values, err := sysctl.Links(family, name)
	maps.DeleteFunc(values,
		func(link, value string) bool { return link == "default" || slices.Contains(others, value) })
	return slices.Sorted(maps.Keys(values)), err
}

const forceForwarding = "force_forwarding" // an IPv6 parameter of a link; since Linux 6.17

func (forwardingPart) look(ctx context.Context, n *site) error {
	needs := n.neededRouting()
	pods, err := n.lookAtForwarding(ctx, needs)
	if err != nil {
		return err
	}

	if needs.IPv4 && !pods.IPv4 {
		n.found.advise(tombolo.RemedyRepair, "the host does not forward IPv4 (net.ipv4.conf.*.forwarding)")
	}

	if needs.IPv6 && !pods.IPv6 {
		parameter := "*." + forceForwarding
		if !sysctl.Exists(sysctl.Link("ipv6", "lo", forceForwarding)) {
			parameter = "all.forwarding"
		}
		n.found.advise(tombolo.RemedyRepair, "the host does not forward IPv6 (net.ipv6.conf.%s)", parameter)
	}

	// Leave out a family that the host does not forward, since it was reported above.
	needs.IPv4, needs.IPv6 = needs.IPv4 && pods.IPv4, needs.IPv6 && pods.IPv6
	if n.quick {
		return nil
	}

	n.lookAtOthers()
	diffs, err := n.s.Links.CheckRouting(ctx, needs)
	n.found.addAll(diffs, tombolo.RemedyRepair)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a link is gone, which another part reports
	}

	return err
}

func (forwardingPart) make(ctx context.Context, n *site) (bool, error) {
	needs := n.neededRouting()
	if err := n.noteRouters(); err != nil {
		return false, err
	}

	if _, err := n.s.Links.EnsureRouting(ctx, needs); err != nil {
		return false, err
	}

	if _, err := n.lookAtForwarding(ctx, needs); err != nil {
		return false, err
	}

	n.rec.Closed4 = slices.ContainsFunc(n.closed, func(c nft.Closed) bool { return !c.IPv6 })
	n.rec.Closed6 = slices.ContainsFunc(n.closed, func(c nft.Closed) bool { return c.IPv6 })
	if n.rec.Routers4 = nil; n.rec.Closed4 {
		links, err := routers4()
		if err != nil {
			return false, err
		}
		n.rec.Routers4, n.closed[0].Routers = links, links // closed[0] is IPv4
	}

	return false, nil
}

// isRouterNow reports whether the host has become a router since the network's rules that stop forwarding for others
// were made.
func isRouterNow(rec *state.Network) bool {
	isOn := func(path string) bool { value, err := sysctl.Read(path); return err == nil && value != "0" }
	return rec.Closed4 && isOn("net/ipv4/ip_forward") || rec.Closed6 && isOn("net/ipv6/conf/all/forwarding")
}

// forwardingChanged reports whether the network's rules drop packets that the host's owner now wants forwarded. Either
// isRouterNow is true, or the owner has changed forwarding for some links since the rules were made. forwardingChanged
// reads a parameter of each link.
func forwardingChanged(rec *state.Network) bool {
	if !rec.Closed4 || isRouterNow(rec) {
		return isRouterNow(rec)
	}
	links, err := routers4()
	return err == nil && !slices.Equal(links, rec.Routers4)
}

// lookAtOthers adds a finding if the rules drop packets that the host's owner now wants forwarded (forwardingChanged).
func (n *site) lookAtOthers() {
	if forwardingChanged(n.rec) {
		n.found.advise(tombolo.RemedyRepair,
			"the host's owner changed what it forwards for others (net.ipv4.ip_forward, "+
				"net.ipv6.conf.all.forwarding, or of a link), and the rules of network %s drop it as before",
			n.rec.Name)
	}
}

// reopen makes the network's rules again if forwardingChanged is true, so that they no longer drop packets that the
// owner lets the host forward. For this it takes the exclusive lock.
func reopen(ctx context.Context, s *session, name string) error {
	rec, err := s.Dir.LoadNetwork(name)
	if err != nil || !forwardingChanged(rec) {
		return nil // another part reports the damaged record
	}

	if err := s.enterAlone(ctx); err != nil {
		return err
	}

	if rec, err = s.Dir.LoadNetwork(name); err != nil || rec.Epoch != s.Epoch.Token() {
		return stateError(err)
	}

	n := &site{s: s, rec: rec}
	if err := n.find(ctx); err != nil {
		return err
	}

	for _, p := range []part{forwardingPart{}, firewallPart{}} {
		if _, err := p.make(ctx, n); err != nil {
			return err
		}
	}

	return stateError(s.Dir.SaveNetwork(rec))
}

// noteRouters records the links for which the host's owner turned on IPv6 forwarding. It must run before other links
// forward for pods, since the parameter is only 0 or 1 and does not tell who set it. If a network has turned on
// forwarding already, noteRouters copies the list from a network's record.
func (n *site) noteRouters() (err error) {
	// If "default" is not 1, no network of ours has turned on force_forwarding yet, so each link's value is its
	// owner's. The kernel never resets "default".
	if later, _ := sysctl.Read(sysctl.Link("ipv6", "default", forceForwarding)); later != "1" {
		n.rec.Routers6, err = routers("ipv6", forceForwarding, "0")
		return err
	}

	records, _, err := n.s.Dir.ListNetworks()
	for _, rec := range records {
		if len(n.rec.Routers6) == 0 && rec.Epoch == n.rec.Epoch {
			n.rec.Routers6 = rec.Routers6
		}
	}
	return stateError(err)
}

// stopForwarding reverts the settings of forwardingPart when the last network is removed. It skips settings that
// somebody has changed since. On kernels before Linux 6.17 the host continues to forward IPv6.
func stopForwarding(rec *state.Network) error {
	err := sysctl.Replace("ipv4", "forwarding", sysctl.OwnForwarding, "0")
	return errors.Join(err, sysctl.Replace("ipv6", forceForwarding, "1", "0", rec.Routers6...))
}

// refuseIPv6 returns an error if the network's pods use IPv6, and the kernel was built without it or booted with
// ipv6.disable=1. Pods use IPv6 by SLAAC, by an address in one of the subnets, or by one of the routes. The kernel's
// own errors would come late and be terse. An Add passes subnets only when it builds the network. This suffices,
// since on such a kernel a network with IPv6 is never complete.
func refuseIPv6(network string, slaac bool, subnets []netip.Prefix, routes ...route.Route) error {
	request := ""
	if i := slices.IndexFunc(routes, func(r route.Route) bool { return isIPv6(r.Dst) }); i >= 0 {
		request = fmt.Sprintf("a route to %s", routes[i].Dst)
	}

	if i := slices.IndexFunc(subnets, isIPv6); i >= 0 {
		request = fmt.Sprintf("an address in %s", subnets[i])
	}

	if slaac {
		request = `ipv6 "slaac"`
	}

	if request == "" || sysctl.HasIPv6() {
		return nil
	}

	return failf(tombolo.ErrInvalid, "network %q asks for %s, and IPv6 is switched off in this kernel: "+
		"take it out of the configuration, or boot without ipv6.disable=1 on the kernel's command line "+
		"(and with a kernel that has IPv6)", network, request)
}
