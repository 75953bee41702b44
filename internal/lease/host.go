package lease

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/tombolo-cni/tombolo/route"
)

// hostName is what the record of a lease of the host's own has for a network and for a
// container. No network and no container can have a bracket in its name.
const hostName = "(host)"

// Host is what a record has if its lease is the host's own: the one that the NIC had when
// it became a port of the bridge. A client on a port hears no answer, so the keeper renews
// the lease on the bridge, from its own network namespace. It is never released.
type Host struct {
	// NIC is the port. The link that has the address is Record.Bridge and, where the
	// takeover leaves addresses behind, the NIC.
	NIC string `json:"nic"`
	// Permanent says that the kernel was given no lifetime of the address, and is to be
	// given none: some clients do it so.
	Permanent bool `json:"permanent,omitempty"`
	// Routes are those that came with the lease, as they were when the keeper last saw
	// the address. It puts them back, or moves them, when it has to put back or to change
	// the address.
	Routes []HostRoute `json:"routes,omitempty"`
}

// HostRoute is a route out of the bridge that goes with the host's address.
type HostRoute struct {
	Dst      netip.Prefix   `json:"dst"`
	Via      netip.Addr     `json:"via,omitzero"`
	Source   netip.Addr     `json:"source,omitzero"`
	Table    uint32         `json:"table,omitempty"`
	Metric   uint32         `json:"metric,omitempty"`
	Protocol uint8          `json:"protocol,omitempty"`
	Scope    uint8          `json:"scope,omitempty"`
	TOS      uint8          `json:"tos,omitempty"`
	OnLink   bool           `json:"onLink,omitempty"`
	MTU      uint32         `json:"mtu,omitempty"`
	AdvMSS   uint32         `json:"advMSS,omitempty"`
	Metrics  []route.Metric `json:"metrics,omitempty"`
}

// HostRouteOf keeps a route as the kernel lists it.
func HostRouteOf(r route.Route) HostRoute {
	h := HostRoute{
		Dst: r.Dst, Via: r.Gateway, Source: r.Source, Table: r.Table, Metric: r.Priority, Protocol: uint8(r.Protocol),
		TOS: r.TOS, OnLink: r.OnLink, MTU: r.MTU, AdvMSS: r.AdvMSS, Metrics: r.Metrics,
	}
	if !h.Dst.IsValid() {
		h.Dst = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	if r.Scope != nil {
		h.Scope = uint8(*r.Scope)
	}
	return h
}

// Route is the route on a link.
func (h HostRoute) Route(link int) route.Route {
	scope := route.Scope(h.Scope)
	return route.Route{
		Dst: h.Dst, Gateway: h.Via, Link: link, OnLink: h.OnLink, Source: h.Source, Table: h.Table, Priority: h.Metric,
		Scope: &scope, Protocol: route.Protocol(h.Protocol), TOS: h.TOS, MTU: h.MTU, AdvMSS: h.AdvMSS, Metrics: h.Metrics,
	}
}

// HostHash is the hash of the record of the lease that a NIC of the host had.
func HostHash(nic string) string { return Hash(hostName, hostName, nic) }

// check refuses what the keeper could not work with.
func (h *Host) check(r *Record) error {
	if h == nil {
		if r.State == Adopting || r.Network == hostName {
			return errors.New("it is of the host's own lease, and does not say of which NIC")
		}
		return nil
	}
	var errs []error
	if r.Network != hostName || r.ContainerID != hostName || r.IfName != h.NIC {
		errs = append(errs, fmt.Errorf("it is of the host's own lease on %q, and of network %q, container %q, interface %q", h.NIC, r.Network, r.ContainerID, r.IfName))
	}
	if r.State != Adopting && r.State != Bound && r.State != Expired {
		errs = append(errs, fmt.Errorf("it is of the host's own lease and its state is %q", r.State))
	}
	if r.Bridge == "" {
		errs = append(errs, errors.New("it is of the host's own lease and has no bridge"))
	}
	return errors.Join(errs...)
}

// hosts reads the records of the host's own leases: of all the others, no more than the
// bytes. Files that cannot be read are left out.
func (d *Dir) hosts() ([]*Record, error) {
	hashes, err := d.Hashes()
	if err != nil {
		return nil, err
	}
	var found []*Record
	for _, hash := range hashes {
		if r, err := d.having(hash, []byte(hostName)); err == nil && r != nil && r.Host != nil {
			found = append(found, r)
		}
	}
	return found, nil
}
