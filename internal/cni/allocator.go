package cni

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/route"
)

// The IPAM types that this process serves. Any other type is the name of a plugin to run.
const (
	typeNone      = ""
	typeHostLocal = "host-local"
	typeStatic    = "static"
	typeDHCP      = "dhcp" // no allocator: package network leases addresses after it has created the link
)

// allocator is the allocator for the ipam section of a configuration. It wraps the allocator that assigns the
// addresses, and adds the settings that all types have in common. Errors of its method Status have code 50, unless
// they have a code. The embedded Allocator is nil for the types static and dhcp, and without a type. Then only the
// ipamSection may be used.
type allocator struct {
	*ipamSection
	ipam.Allocator
}

// ipamSection holds the settings of an ipam section or, for a delegated plugin, parts of the plugin's result.
type ipamSection struct {
	network    string
	given      []ipam.Address // addresses that the section names itself (type static)
	routes     []route.Route
	dns        types.DNS      // complete when Add has returned
	resolvers  []string       // name servers of the result; nil means dns.Nameservers
	resolvConf string         // path of a file with DNS settings
	reported   []ipam.Address // families in the order in which their addresses are reported
	gateways   bool           // see ipamRequest.Gateways
	confErr    error          // an error in the configuration; only Del and Collect can work
	noRanges   error          // set if there are no ranges until a runtime passes some
}

// Bind returns a copy of a that is bound to node. Both share the ipamSection, which Add completes.
func (a *allocator) Bind(node ipam.Node) ipam.Allocator {
	return &allocator{a.ipamSection, a.Allocator.Bind(node)}
}

// Resolvers returns the name servers of ADD's result. They are complete when Add has returned.
func (a *allocator) Resolvers() (list []netip.Addr) {
	servers := a.resolvers
	if servers == nil {
		servers = a.dns.Nameservers
	}
	for _, text := range servers {
		if server, err := netip.ParseAddr(text); err == nil {
			list = append(list, server.WithZone("").Unmap())
		}
	}
	return list
}

// RangeSets returns the range sets of the wrapped allocator, or none. Package network records them.
func (a *allocator) RangeSets() []ipam.RangeSet { return ipam.RangeSetsOf(a.Allocator) }

// ordered returns addresses in the order of the result. For each element of a.reported, the next address of its family
// comes. The remaining addresses follow.
func (a *allocator) ordered(addresses []ipam.Address) []ipam.Address {
	addresses = slices.Clone(addresses)
	var list []ipam.Address
	for _, place := range a.reported {
		i := slices.IndexFunc(addresses, func(one ipam.Address) bool {
			return one.Prefix.Addr().Is4() == place.Prefix.Addr().Is4()
		})
		if i >= 0 {
			list = append(list, addresses[i])
			addresses = slices.Delete(addresses, i, i+1)
		}
	}

	return append(list, addresses...)
}

// Add reserves addresses, and completes gateways, routes and DNS. It reads the resolv.conf file before it reserves
// anything, so that a failure leaves no reservation.
func (a *allocator) Add(ctx context.Context, owner ipam.Owner) (*ipam.Allocation, error) {
	if err := cmp.Or(a.confErr, a.noRanges); err != nil {
		return nil, err
	}

	if a.resolvConf != "" {
		text, err := file.ReadNamed(ctx, a.resolvConf, file.MaxRecord, 0)
		if err != nil {
			return nil, withCode(codeIO, fmt.Errorf("network %q: read \"ipam.resolvConf\": %w", a.network, err))
		}
		a.dns = ParseResolvConf(string(text))
	}

	allocation, err := a.Allocator.Add(ctx, owner)
	if err != nil {
		return nil, err
	}

	a.addGateways(allocation.Addresses)
	allocation.Routes = a.routes
	return allocation, nil
}

// addGateways sets the gateways of addresses without one: see ipamRequest.Gateways.
func (s *ipamSection) addGateways(addresses []ipam.Address) {
	for i := range addresses {
		if one := &addresses[i]; s.gateways && !one.Gateway.IsValid() {
			one.Gateway = one.Prefix.Masked().Addr().Next()
		}
	}
}

func (a *allocator) Check(ctx context.Context, owner ipam.Owner, held []ipam.Address) error {
	if err := cmp.Or(a.confErr, a.noRanges); err != nil {
		return err
	}
	return a.Allocator.Check(ctx, owner, held)
}

// Status returns an error if Add cannot succeed, with code 50 unless the error has a code already. If the runtime
// passes the ranges with a pod's verbs, STATUS has none, and Status returns nil.
func (a *allocator) Status(ctx context.Context) error {
	if a.confErr != nil || a.noRanges != nil {
		return a.confErr
	}
	err := a.Allocator.Status(ctx)
	if errors.As(err, new(*types.Error)) {
		return err
	}
	return withCode(codeNotAvailable, err)
}

// An ipamRequest holds the parameters for an allocator: the ipam section, and facts about the call.
type ipamRequest struct {
	// Plugin describes how to run a plugin of another project. Its name is ipam.type, or the recorded type. For GC or
	// STATUS it has no ContainerID, NetNS, IfName and Args.
	delegate.Plugin
	Network string // the network's name, and the name of its directory of reservations
	Section Section
	RequestedAddresses
	DefaultDataDir string // for networks without ipam.dataDir

	// Strict is set for ADD, CHECK and STATUS. Then every fault of the section is an error, including unknown fields
	// of the types that this process serves. DEL and GC do as much as possible in spite of faults.
	Strict bool
	// RangesLater is set if the runtime passes the ranges of host-local with each pod's verbs. STATUS then has no
	// ranges.
	RangesLater bool
	// Gateways is set if an address without a gateway gets the first address of its subnet as gateway, as in the
	// reference plugin bridge.
	Gateways bool
	// ByName is set if the program was called by a reference plugin's name. The allocator then behaves like the
	// reference plugins. It ignores unknown fields, and reports addresses in the order in which the section, or the
	// plugin, lists their families.
	ByName bool
	// Unrecorded is set if the caller has no records of attachments. Before host-local assigns an address, it then
	// searches all reservations for an address that the attachment already has.
	Unrecorded bool
	// All is set to get all faults of the section's fields in the error, one a line. Otherwise the error has only the
	// first.
	All bool

	Warn     func(string)  // receives messages about problems that do not stop the verb
	LockWait time.Duration // the longest wait for the directory's lock; 0 means 5 s
}

// newAllocator returns the allocator for the type of an ipam section. The types static and dhcp, and no type, as in a
// plain layer 2 network, have no Allocator. If the request is not strict, newAllocator returns no error.
func newAllocator(r *ipamRequest) (*allocator, error) {
	a := &allocator{&ipamSection{network: r.Network, gateways: r.Gateways}, nil}
	switch r.Name {
	case typeNone:
		// A section with fields but without a type is an error: the field type is probably misspelt.
		a.confErr = r.read(&struct {
			Type string `json:"type"`
		}{})
	case typeHostLocal:
		a.confErr = a.hostLocal(r)
	case typeStatic:
		a.confErr = a.static(r)
	case typeDHCP: // package network handles leases
	default:
		r.IsIPAM = true
		a.Allocator = &delegatedIPAM{a.ipamSection, r}
	}

	if r.Strict && a.confErr != nil {
		return nil, a.confErr
	}

	return a, nil
}

// subnets returns the subnets of the addresses that the types host-local and static assign.
func (a *allocator) subnets() []netip.Prefix {
	var list []netip.Prefix
	for _, set := range a.RangeSets() {
		for _, r := range set.Ranges {
			list = append(list, r.Subnet)
		}
	}

	for _, one := range a.given {
		list = append(list, one.Prefix.Masked())
	}
	return list
}

// isThere reports whether addresses of an ipam type can be released. Either this process serves the type, or the
// plugin's program is in path (CNI_PATH).
func isThere(kind, path string) bool {
	_, err := delegate.Find(kind, path)
	return err == nil || slices.Contains([]string{typeNone, typeHostLocal, typeStatic, typeDHCP}, kind)
}
