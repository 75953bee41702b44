package nft

import (
	"slices"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// PodGroup is the group of links (IFLA_GROUP) that ports of pods have to be in for Network.DropReports, and for the
// rules about multicast queries (Network.Groups), to say something of them. One that is taken out of it, by `ip link
// set PORT group 0`, gets all reports again, as a pod needs that is a multicast router.
const PodGroup = ruleset.PodGroup

// checkGuard says what is wrong with an endpoint's guard.
func (ep *Endpoint) checkGuard() error {
	const group = 1 // the bit of a MAC that makes it one of many
	switch {
	case ep.GuardedPort == "":
		return nil
	case !ident.IsLinkName(ep.GuardedPort):
		return invalid("endpoint %s: guarded port %q is no name of a link", ep.Owner, ep.GuardedPort)
	case len(ep.MAC) != ruleset.EtherLen || ep.MAC[0]&group != 0:
		return invalid("endpoint %s: port %s cannot be guarded: %q cannot be the MAC of a pod", ep.Owner, ep.GuardedPort, ep.MAC)
	case ep.MACOnly && ep.Untrusted:
		return invalid("endpoint %s: guarded port %s: MACOnly and Untrusted exclude each other", ep.Owner, ep.GuardedPort)
	}
	return nil
}

// guardElements gives what an endpoint has in the guard's sets.
func (ep *Endpoint) guardElements() []ruleset.Element {
	if ep.GuardedPort == "" {
		return nil
	}
	port := ruleset.GuardedPort{
		Name: ep.GuardedPort, MAC: ep.MAC, Addrs: ep.Addrs, SLAAC: ep.SLAAC, MACOnly: ep.MACOnly, Untrusted: ep.Untrusted,
	}
	return port.Elements()
}

// leftovers gives what a guarded endpoint should not have in the sets, but may have had
// as another one: as one without addresses, with SLAAC, or with its MAC alone.
func (ep *Endpoint) leftovers() []ruleset.Element {
	if ep.GuardedPort == "" {
		return nil
	}
	bare := Endpoint{Bridge: ep.Bridge, MAC: ep.MAC, GuardedPort: ep.GuardedPort}
	leasing := bare
	leasing.SLAAC, leasing.Untrusted = true, true
	had := append(bare.elements(), leasing.guardElements()...)
	known := ep.elements()
	var list []ruleset.Element
	for _, el := range had {
		if !slices.ContainsFunc(known, el.Equal) {
			known, list = append(known, el), append(list, el)
		}
	}
	return list
}
