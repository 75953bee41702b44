package nft

import (
	"fmt"
	"slices"

	"github.com/tombolo-cni/tombolo/nft/guard"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Package guard says what ports may say; here that becomes a part of our tables of the bridge
// family.

// PodGroup is guard.Group.
const PodGroup = guard.Group

// guarded is the endpoint's port as package guard has it.
func (ep *Endpoint) guarded() guard.Port {
	return guard.Port{Name: ep.GuardedPort, MAC: ep.MAC, Addrs: ep.Addrs, SLAAC: ep.SLAAC, MACOnly: ep.MACOnly, Untrusted: ep.Untrusted}
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
func (ep *Endpoint) guardElements() []ruleset.Element {
	if ep.GuardedPort == "" {
		return nil
	}
	port := ep.guarded()
	list := make([]ruleset.Element, 0, 7+2*len(ep.Addrs))
	for set, key := range port.Elements() {
		list = append(list, ruleset.Element{Set: ruleset.InBridge(set), Key: key})
	}
	return list
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
