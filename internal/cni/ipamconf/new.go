package ipamconf

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/route"
)

// The types that are served in this process. Any other name is that of a plugin
// to run.
const (
	typeNone      = ""
	typeHostLocal = "host-local"
	typeStatic    = "static"
)

// TypeDHCP is the type that is served here rather than by an Allocator: an
// address comes from the network itself, so that the link has to be there first.
const TypeDHCP = "dhcp"

// An Allocator is what the ipam section of a netconf stands for. Errors of its Status have
// code 50.
type Allocator interface {
	ipam.Allocator

	// DNS is what the section, or the plugin that it names, says of it. It is
	// complete when Add has returned.
	DNS() types.DNS
	// Ordered puts addresses, those of IPv4 first, into the order in which they are reported.
	Ordered(given []ipam.Address) []ipam.Address
}

// local is what the allocators have in common, and by itself one that gives
// no addresses: that of a network without an ipam section, or of one that is served elsewhere.
type local struct {
	network  string
	routes   []route.Route
	dns      types.DNS
	reported []ipam.Address // of the families of what is given, in the order in which that is reported
	gateways bool           // see Request
	confErr  error          // the config is wrong: only Del and Collect can do anything
}

func (l *local) Bind(ipam.Node) ipam.Allocator { return l }
func (*local) Slow() bool                      { return false }
func (l *local) DNS() types.DNS                { return l.dns }

func (l *local) Ordered(given []ipam.Address) []ipam.Address {
	given = slices.Clone(given)
	var list []ipam.Address
	for _, place := range l.reported {
		i := slices.IndexFunc(given, func(a ipam.Address) bool { return a.Prefix.Addr().Is4() == place.Prefix.Addr().Is4() })
		if i >= 0 {
			list = append(list, given[i])
			given = slices.Delete(given, i, i+1)
		}
	}
	return append(list, given...)
}

// given completes what Add gives.
func (l *local) given(addresses []ipam.Address) *ipam.Allocation {
	for i := range addresses {
		if one := &addresses[i]; l.gateways && !one.Gateway.IsValid() {
			one.Gateway = one.Prefix.Masked().Addr().Next()
		}
	}
	return &ipam.Allocation{Addresses: addresses, Routes: l.routes}
}

func (l *local) Add(context.Context, ipam.Owner) (*ipam.Allocation, error) {
	return &ipam.Allocation{}, l.confErr
}
func (*local) Del(context.Context, ipam.Owner, []netip.Addr) error       { return nil }
func (l *local) Check(context.Context, ipam.Owner, []ipam.Address) error { return l.confErr }
func (*local) Collect(context.Context, []ipam.Owner) error               { return nil }
func (l *local) Status(context.Context) error                            { return l.confErr }

// A Request is the configuration of an Allocator, and what it is told of the call.
type Request struct {
	// Plugin is what a plugin of another project is run with. Its name is ipam.type, or the name in its place.
	// For GC or STATUS it has no ContainerID, NetNS, IfName and Args.
	delegate.Plugin
	Network string // the netconf's name; also the name of the data directory
	Section Section
	Asked

	// DefaultDataDir holds the reservations of networks that do not set
	// ipam.dataDir.
	DefaultDataDir string

	// Strict is for ADD, CHECK and STATUS: New fails for whatever is wrong with
	// the config, and unknown fields within ipam are wrong (for types in
	// process). Without it, for DEL and GC, New never fails for what the ipam
	// section says, and Del and GC do what they still can.
	Strict bool
	// RangesLater says that the runtime hands over the ranges of host-local with a pod's verbs.
	RangesLater bool
	// Gateways gives an address without a gateway the first of its subnet, as by the reference's bridge.
	Gateways bool
	// ByName has all be as with the reference's plugins: fields that nobody knows are passed over,
	// and addresses are reported in the order in which the config, or the plugin, names families.
	ByName bool
	// Unrecorded says that the caller has no record of attachments: host-local looks through all
	// reservations for one of the attachment's, before it gives another.
	Unrecorded bool
	// All has an error of New tell, a line each, all that is wrong with the fields of the ipam section, and not only
	// what comes first.
	All bool

	// Warn gets what an operator should know although the verb goes on.
	Warn func(string)
	// LockWait is how long to wait for another process's lock on the directory;
	// 0 means 5 s. The context may end it earlier.
	LockWait time.Duration
}

func (r *Request) local() *local { return &local{network: r.Network, gateways: r.Gateways} }

// New returns the allocator for the ipam.type of the netconf. Without a type,
// as in a plain layer 2 network, that is one that gives no addresses and always
// succeeds; New never returns a nil Allocator without an error.
func New(r *Request) (Allocator, error) {
	switch r.Name {
	case typeNone:
		// A section that has fields but no type probably has that misspelt.
		if err := r.read(&struct {
			Type string `json:"type"`
		}{}); err != nil && r.Strict {
			return nil, err
		}
		return r.local(), nil
	case typeHostLocal:
		return newHostLocal(r)
	case typeStatic:
		return newStatic(r)
	case TypeDHCP:
		// It is served in process too, but not by this package: so no program of that name is run.
		// Callers see to leases before they come here, but for a pod that was made under another
		// type.
		l := r.local()
		l.confErr = newError(codeInvalidConfig, `network %q: ipam.type is "dhcp", and the attachment's addresses are not leased: DEL it and ADD it again`, r.Network)
		return l, nil
	default:
		return newDelegated(r), nil
	}
}

// Subnets are those that host-local and static give addresses of.
func Subnets(of Allocator) []netip.Prefix {
	var list []netip.Prefix
	for _, set := range ipam.RangeSetsOf(of) {
		for _, r := range set.Ranges {
			list = append(list, r.Subnet)
		}
	}
	if s, ok := of.(*static); ok {
		for _, a := range s.addresses {
			list = append(list, a.Prefix.Masked())
		}
	}
	return list
}

// IsThere says whether addresses could be given back to an ipam.type: it is served in this process, or path, which
// is CNI_PATH, has its program.
func IsThere(kind, path string) bool {
	switch kind {
	case typeNone, typeHostLocal, typeStatic, TypeDHCP:
		return true
	}
	_, err := delegate.Find(kind, path)
	return err == nil
}
