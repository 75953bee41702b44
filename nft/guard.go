package nft

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/nft/guard"
)

// Package guard says what ports may say; here that becomes a part of our tables of the bridge
// family.

// PodGroup is guard.Group.
const PodGroup = guard.Group

const quietPrefix = "quiet-"

// guardSets are package guard's, in our table.
func guardSets() []set {
	var list []set
	for _, s := range guard.Sets() {
		list = append(list, set{place: inBridge(s.Name), keyType: s.KeyType, keyLen: s.KeyLen, typeof: s.Userdata})
	}
	return list
}

// guarded is the endpoint's port as package guard has it.
func (ep *Endpoint) guarded() guard.Port {
	return guard.Port{Name: ep.GuardedPort, MAC: ep.MAC, Addrs: ep.Addrs, SLAAC: ep.SLAAC, Untrusted: ep.Untrusted}
}

// checkGuard says what is wrong with an endpoint's guard.
func (ep *Endpoint) checkGuard() error {
	if ep.GuardedPort == "" {
		return nil
	}
	port := ep.guarded()
	if err := port.Check(); err != nil {
		return fmt.Errorf("endpoint %s: %w", ep.Owner, err)
	}
	return nil
}

// guardElements gives what an endpoint has in the guard's sets.
func (ep *Endpoint) guardElements() []element {
	if ep.GuardedPort == "" {
		return nil
	}
	port := ep.guarded()
	list := make([]element, 0, 7+2*len(ep.Addrs))
	for set, key := range port.Elements() {
		list = append(list, element{set: inBridge(set), key: key})
	}
	return list
}

// leftovers gives what a guarded endpoint should not have in the sets, but may have had
// as another one: as one without addresses, or with SLAAC.
func (ep *Endpoint) leftovers() []element {
	if ep.GuardedPort == "" {
		return nil
	}
	bare := Endpoint{Bridge: ep.Bridge, MAC: ep.MAC, GuardedPort: ep.GuardedPort}
	leasing := bare
	leasing.SLAAC, leasing.Untrusted = true, true
	known := ep.elements()
	var list []element
	for _, el := range append(bare.elements(), leasing.guardElements()...) {
		if !slices.ContainsFunc(known, el.equal) {
			known, list = append(known, el), append(list, el)
		}
	}
	return list
}

// noteGuard adds what an element of the guard's sets tells of an endpoint; it is false
// for any other. Of addresses it says nothing: pods have the same in other sets, and
// there none that follows from the MAC.
func (ep *Endpoint) noteGuard(el *elementState) bool {
	if el.set.family != unix.NFPROTO_BRIDGE {
		return false
	}
	port := ep.guarded()
	if !port.Note(el.set.name, el.key) {
		return false
	}
	ep.GuardedPort, ep.MAC, ep.SLAAC, ep.Untrusted = port.Name, port.MAC, port.SLAAC, port.Untrusted
	return true
}

func isGuardSet(at place) bool {
	return at.family == unix.NFPROTO_BRIDGE && guard.IsSet(at.name)
}

// addGuard adds what guards the network's pods: the same for all networks. Without it,
// chains that are there may be another network's too, and go with the table.
func (rs *ruleset) addGuard(n *Network) {
	if n.Groups || n.Guard {
		rs.addChains(guard.Everyone())
	}
	if n.Guard {
		rs.addChains(guard.Guarded())
	}
}

// addReports adds the network's chain against reports that nobody reads, or has it removed.
func (rs *ruleset) addReports(n *Network, key string) {
	if !n.DropReports {
		rs.gone = append(rs.gone, inBridge(quietPrefix+key))
		return
	}
	reports := guard.Reports()
	for i := range reports {
		reports[i].Name = quietPrefix + key
	}
	rs.addChains(reports)
}

func (rs *ruleset) addChains(list []guard.Chain) {
	rs.needTable(unix.NFPROTO_BRIDGE)
	for _, ch := range list {
		rs.chains = append(rs.chains, chain{
			place: inBridge(ch.Name), kind: "filter", hook: ch.Hook, priority: ch.Priority, settings: ch.Settings, guard: ch.Rules,
		})
	}
}

// needTable has the table of a family made.
func (rs *ruleset) needTable(family uint8) {
	if !slices.Contains(rs.tables, family) {
		rs.tables = append(rs.tables, family)
	}
}
