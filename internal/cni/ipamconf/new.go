package ipamconf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
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

// allocator is what all types have in common: the section around what gives addresses.
type allocator struct {
	*said
	ipam.Allocator
}

// said is what the section, or the plugin that it names, says.
type said struct {
	network    string
	routes     []route.Route
	dns        types.DNS
	resolvConf string         // a file that has the DNS
	reported   []ipam.Address // of the families of what is given, in the order in which that is reported
	gateways   bool           // see Request
	confErr    error          // the config is wrong: only Del and Collect can do anything
	noRanges   error          // there are none before a runtime hands them over
}

// Bind keeps the section, which is told more by Add.
func (a *allocator) Bind(node ipam.Node) ipam.Allocator {
	return &allocator{a.said, a.Allocator.Bind(node)}
}

// RangeSets are those that package network puts on record.
func (a *allocator) RangeSets() []ipam.RangeSet { return ipam.RangeSetsOf(a.Allocator) }

func (a *allocator) DNS() types.DNS { return a.dns }

func (a *allocator) Ordered(given []ipam.Address) []ipam.Address {
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
		text, err := os.ReadFile(a.resolvConf)
		if err != nil {
			return nil, withCode(types.ErrIOFailure, fmt.Errorf("network %q: read \"ipam.resolvConf\": %w", a.network, err))
		}
		a.dns = parseResolvConf(string(text))
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

// New returns the allocator for the ipam.type of the netconf. Without a type,
// as in a plain layer 2 network, that is one that gives no addresses and always
// succeeds; New never returns a nil Allocator without an error.
func New(r *Request) (Allocator, error) {
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
	case TypeDHCP:
		// It is served in process too, but not by this package: so no program of that name is run.
		// Callers see to leases before they come here, but for a pod that was made under another
		// type.
		a.confErr = newError(codeInvalidConfig, `network %q: ipam.type is "dhcp", and the attachment's addresses are not leased: DEL it and ADD it again`, r.Network)
		return a, nil
	default:
		plugin := r.Plugin
		plugin.Self = self
		a.Allocator = &delegated{said: a.said, inOrder: r.ByName, warn: r.Warn, plugin: &plugin}
	}
	if r.Strict && a.confErr != nil {
		return nil, a.confErr
	}
	return a, nil
}

// Subnets are those that host-local and static give addresses of.
func Subnets(of Allocator) []netip.Prefix {
	var list []netip.Prefix
	for _, set := range ipam.RangeSetsOf(of) {
		for _, r := range set.Ranges {
			list = append(list, r.Subnet)
		}
	}
	if a, ok := of.(*allocator); ok {
		if s, ok := a.Allocator.(static); ok {
			for _, one := range s.Static {
				list = append(list, one.Prefix.Masked())
			}
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
