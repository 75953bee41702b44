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

// These are the IPAM types that this program implements. Any other type is the name of an IPAM plugin to run.
const (
	typeNone      = ""
	typeHostLocal = "host-local"
	typeStatic    = "static"
	typeDHCP      = "dhcp" // no allocator: package network leases addresses after it has created the link
)

// allocator is the ipam.Allocator for the ipam section of a configuration. It wraps the Allocator that assigns the
// addresses, and adds the section's gateways, routes and DNS settings. The embedded Allocator is nil for the types
// static and dhcp, and for a section without a type. Then nobody may call the methods of ipam.Allocator.
type allocator struct {
	*ipamSection
	ipam.Allocator
}

// ipamSection holds the settings of an ipam section. For a delegated plugin, its routes and DNS settings come from the
// result of that plugin's ADD.
type ipamSection struct {
	network    string
	given      []ipam.Address // the addresses in the section or in requests (type static)
	routes     []route.Route
	dns        types.DNS      // complete when Add has returned
	resolvers  []string       // configured name servers, which replace those of dns unless nil
	resolvConf string         // path of a file with DNS settings
	reported   []ipam.Address // only their families count: see ordered
	gateways   bool           // see ipamRequest.Gateways
	confErr    error          // an error in the section; only Del and Collect work in spite of it
	noRanges   error          // the error of Add and Check without ranges (host-local) or addresses (static)
}

// Bind returns a copy of a whose wrapped allocator has the facts about node. The copy and a share the ipamSection,
// whose DNS settings Add completes.
func (a *allocator) Bind(node ipam.Node) ipam.Allocator {
	return &allocator{a.ipamSection, a.Allocator.Bind(node)}
}

// Resolvers returns the configured name servers or, if none are configured, those of the IPAM, which are complete after
// Add. It skips texts that are not addresses.
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

// RangeSets returns the range sets of the wrapped allocator, or nil if it has none. Package network records them.
func (a *allocator) RangeSets() []ipam.RangeSet { return ipam.RangeSetsOf(a.Allocator) }

// ordered sorts addresses for a result, so that their families have the same order as in a.reported (see
// ipamRequest.ByName). Addresses for which a.reported has no element come last.
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

// Add reserves addresses for owner. It adds the section's routes, and missing gateways if ipamRequest.Gateways is set.
// It first reads DNS settings from the file ipam.resolvConf, so that a failure leaves no reservation.
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

// addGateways sets each missing gateway to the first host address of the subnet, if s.gateways is set.
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

// Status returns an error if Add cannot succeed. An error that contains no *types.Error gets the code 50, the
// specification's code for "not available". If only ranges are missing, and the runtime may pass them with each pod,
// Status returns nil.
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

// An ipamRequest holds the parameters of newAllocator: the ipam section, and facts about the call.
type ipamRequest struct {
	// Plugin holds the parameters for running a delegated IPAM plugin. Its field Name is the IPAM type.
	delegate.Plugin
	Network string // the network's name, and the name of its directory of reservations
	Section Section
	RequestedAddresses
	DefaultDataDir string // replaces a missing ipam.dataDir

	// If Strict is set, every fault of the section is an error, including unknown fields unless ByName is set. For the
	// DEL and GC of a network it is not set, so that they do as much as possible in spite of faults.
	Strict bool
	// RangesLater is set if the runtime passes the ranges of host-local with each pod's verbs. A section without ranges
	// is then valid, since STATUS does not get them.
	RangesLater bool
	// Gateways is set if an address without a gateway gets the first host address of its subnet as gateway, as in the
	// reference plugin bridge.
	Gateways bool
	// ByName is set if the program was called by a reference plugin's name. The allocator then ignores unknown fields,
	// and reports addresses in the order in which the section, or the delegated plugin's result, lists their families.
	ByName bool
	// Unrecorded is set if the caller has no records of attachments. host-local then searches all reservations before
	// it assigns an address. If the attachment already has one, Add returns an error that matches ipam.ErrDuplicate.
	Unrecorded bool
	// If All is set, newAllocator returns all faults that decoding the section finds in one error, one a line. If not,
	// it returns the first fault.
	All bool

	Warn     func(string)  // receives messages about problems that do not stop the verb
	LockWait time.Duration // the longest wait for the directory's lock; 0 means 5 s
}

// newAllocator returns the allocator for the section and the type r.Name. For the types static and dhcp, and for no
// type, its embedded Allocator is nil. If the request is not strict, newAllocator returns no error.
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

// subnets returns the subnets of host-local's ranges, or of the addresses of type static. For other types it returns
// nil.
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

// isThere reports whether addresses of an IPAM type can be released. This program must implement the type, or path
// (CNI_PATH) must have a plugin of that name.
func isThere(kind, path string) bool {
	_, err := delegate.Find(kind, path)
	return err == nil || slices.Contains([]string{typeNone, typeHostLocal, typeStatic, typeDHCP}, kind)
}
