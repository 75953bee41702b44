package state

import (
	"net/netip"
	"slices"
)

// A HostGateway is the host's address that the default route of a pod's address leads to, where
// a pod of a LAN goes out through the host.
type HostGateway struct {
	Of   netip.Prefix `json:"of"` // the pod's address
	Host netip.Addr   `json:"host,omitzero"`
	// HostAtADD is what Host was when the pod was added, and in the result, if it was another.
	HostAtADD netip.Addr `json:"hostAtADD,omitzero"`
}

// HostGateways are those of the addresses of a pod that have one.
type HostGateways []HostGateway

// Of gives that of an address; the zero HostGateway is none.
func (l HostGateways) Of(p netip.Prefix) HostGateway {
	if i := l.index(p); i >= 0 {
		return l[i]
	}
	return HostGateway{}
}

// Set notes that the default route of an address leads to another address of the host.
func (l *HostGateways) Set(p netip.Prefix, own netip.Addr) {
	i := l.index(p)
	if i < 0 {
		if own.IsValid() {
			*l = append(*l, HostGateway{Of: p, Host: own})
		}
		return
	}
	if one := &(*l)[i]; own != one.Host {
		if !one.HostAtADD.IsValid() {
			one.HostAtADD = one.Host
		}
		one.Host = own
	}
}

// Moved gives the list in which an address of the pod has become another one.
func (l HostGateways) Moved(from, to netip.Prefix) HostGateways {
	l = slices.Clone(l)
	if i := l.index(from); i >= 0 {
		l[i].Of = to
	}
	return l
}

func (l HostGateways) index(p netip.Prefix) int {
	return slices.IndexFunc(l, func(one HostGateway) bool { return one.Of == p })
}
