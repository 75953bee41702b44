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

// The types that are served in this process. Any other name is that of a plugin to run.
const (
	typeNone      = ""
	typeHostLocal = "host-local"
	typeStatic    = "static"
	typeDHCP      = "dhcp" // by a lease of package network, which has the link there first, and no allocator
)

// allocator is what the ipam section of a netconf stands for, and what all types have in common: the section around
// what gives addresses. Errors of its Status have code 50.
type allocator struct {
	*said
	ipam.Allocator
}

// said is what the section, or the plugin that it names, says.
type said struct {
	network    string
	routes     []route.Route
	dns        types.DNS      // complete when Add has returned
	resolvConf string         // a file that has the DNS
	reported   []ipam.Address // of the families of what is given, in the order in which that is reported
	gateways   bool           // see ipamRequest
	confErr    error          // the config is wrong: only Del and Collect can do anything
	noRanges   error          // there are none before a runtime hands them over
}

// Bind keeps the section, which is told more by Add.
func (a *allocator) Bind(node ipam.Node) ipam.Allocator {
	return &allocator{a.said, a.Allocator.Bind(node)}
}

// RangeSets are those that package network puts on record.
func (a *allocator) RangeSets() []ipam.RangeSet { return ipam.RangeSetsOf(a.Allocator) }

// ordered puts addresses, those of IPv4 first, into the order in which they are reported.
func (a *allocator) ordered(given []ipam.Address) []ipam.Address {
	given = slices.Clone(given)
	var list []ipam.Address
	for _, place := range a.reported {
		i := slices.IndexFunc(given, func(one ipam.Address) bool {
			return one.Prefix.Addr().Is4() == place.Prefix.Addr().Is4()
		})
		if i >= 0 {
			list = append(list, given[i])
			given = slices.Delete(given, i, i+1)
		}
	}
	return append(list, given...)
}

// Add reads the resolv.conf before it reserves anything.
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
	given, err := a.Allocator.Add(ctx, owner)
	if err != nil {
		return nil, err
	}
	for i := range given.Addresses {
		if one := &given.Addresses[i]; a.gateways && !one.Gateway.IsValid() {
			one.Gateway = one.Prefix.Masked().Addr().Next()
		}
	}
	given.Routes = a.routes
	return given, nil
}

func (a *allocator) Check(ctx context.Context, owner ipam.Owner, held []ipam.Address) error {
	if err := cmp.Or(a.confErr, a.noRanges); err != nil {
		return err
	}
	return a.Allocator.Check(ctx, owner, held)
}

// Status has code 50 for what has none. Ranges that a runtime hands over come with the verbs of a pod, and
// not with STATUS.
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

// An ipamRequest is what an allocator is made of: the ipam section, and what is told of the call.
type ipamRequest struct {
	// Plugin is what a plugin of another project is run with. Its name is ipam.type, or the name in its place.
	// For GC or STATUS it has no ContainerID, NetNS, IfName and Args.
	delegate.Plugin
	Network string // the network's name, and that of its directory of reservations
	Section Section
	Asked
	DefaultDataDir string // of networks that do not set ipam.dataDir

	// Strict is for ADD, CHECK and STATUS: every fault of the section is an error, and so are unknown fields of
	// types in process. DEL and GC do what they still can.
	Strict bool
	// RangesLater says that the runtime hands over the ranges of host-local with a pod's verbs.
	RangesLater bool
	// Gateways gives an address without a gateway the first of its subnet, as by the reference's bridge.
	Gateways bool
	// ByName makes it behave as the reference's plugins do: unknown fields are passed over, and addresses are
	// reported in the order in which the section, or the plugin, names families.
	ByName bool
	// Unrecorded says that the caller has no record of attachments: host-local looks through all
	// reservations for one of the attachment's, before it gives another.
	Unrecorded bool
	// All has an error tell, a line each, all that is wrong with the section's fields, and not only what comes first.
	All bool

	Warn     func(string)  // gets what an operator should know although the verb goes on
	LockWait time.Duration // for another process's lock on the directory; 0 means 5 s
}

// newAllocator makes the allocator of an ipam.type. Without a type, as in a plain layer 2 network, it gives no addresses
// and always succeeds. Where the request is not strict, there is no error.
func newAllocator(r *ipamRequest) (*allocator, error) {
	a := &allocator{&said{network: r.Network, gateways: r.Gateways}, static{byName: true}}
	switch r.Name {
	case typeNone:
		// A section that has fields but no type probably has that misspelt.
		a.confErr = r.read(&struct {
			Type string `json:"type"`
		}{})
	case typeHostLocal:
		a.confErr = a.hostLocal(r)
	case typeStatic:
		a.confErr = a.static(r)
	case typeDHCP:
		// Leases are package network's, so this is about a pod that was made under another type.
		a.confErr = newError(codeInvalidConfig, `network %q: ipam.type is "dhcp", and the attachment's addresses are not leased: DEL it and ADD it again`, r.Network)
		return a, nil
	default:
		r.Self = self
		a.Allocator = &delegated{a.said, r}
	}
	if r.Strict && a.confErr != nil {
		return nil, a.confErr
	}
	return a, nil
}

// subnets are those that host-local and static give addresses of.
func (a *allocator) subnets() []netip.Prefix {
	var list []netip.Prefix
	for _, set := range a.RangeSets() {
		for _, r := range set.Ranges {
			list = append(list, r.Subnet)
		}
	}
	if s, ok := a.Allocator.(static); ok {
		for _, one := range s.addresses {
			list = append(list, one.Prefix.Masked())
		}
	}
	return list
}

// isThere says whether addresses could be given back to an ipam.type: it is served in this process, or path, which
// is CNI_PATH, has its program.
func isThere(kind, path string) bool {
	_, err := delegate.Find(kind, path)
	return err == nil || slices.Contains([]string{typeNone, typeHostLocal, typeStatic, typeDHCP}, kind)
}
