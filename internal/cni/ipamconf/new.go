package ipamconf

import (
	"cmp"
	"context"
	"io"
	"net/netip"
	"slices"
	"strings"
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
	reported []ipam.Address // of the families of what is given, in the order in which that is reported; IPv4 first without it
	gateways bool           // see Request
	confErr  error          // the config is wrong: only Del and Collect can do anything
}

func (l *local) Bind(ipam.Node) ipam.Allocator { return l }
func (*local) Slow() bool                      { return false }
func (l *local) DNS() types.DNS                { return l.dns }

func (l *local) Ordered(given []ipam.Address) []ipam.Address {
	given = ipv4First(given)
	if len(given) != len(l.reported) {
		return given
	}
	// The places that the addresses are reported at, in the order of given.
	places := make([]int, len(given))
	for i := range places {
		places[i] = i
	}
	slices.SortStableFunc(places, func(a, b int) int {
		return cmp.Compare(l.reported[a].Prefix.Addr().BitLen(), l.reported[b].Prefix.Addr().BitLen())
	})
	list := make([]ipam.Address, len(given))
	for i, place := range places {
		list[place] = given[i]
	}
	return list
}

// ipv4First keeps the order otherwise.
func ipv4First(list []ipam.Address) []ipam.Address {
	return slices.SortedStableFunc(slices.Values(list), func(a, b ipam.Address) int {
		return cmp.Compare(a.Prefix.Addr().BitLen(), b.Prefix.Addr().BitLen())
	})
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

// A Request is the configuration of an Allocator, and what a delegated plugin is told of
// the call. For GC or STATUS, ContainerID, NetNS, IfName and Args are empty.
type Request struct {
	Type        string // ipam.type, or the name in its place
	DataDir     string // ipam.dataDir, as far as it can be read; for Del and Collect where the rest cannot
	Network     string // the netconf's name; also the name of the data directory
	ContainerID string // handed to a delegated plugin, as are NetNS and IfName
	NetNS       string // CNI_NETNS; may be empty
	IfName      string
	Args        string // CNI_ARGS
	Path        string // CNI_PATH, where delegated plugins are looked for

	// Stdin is the whole netconf. In-process types read ipam,
	// runtimeConfig and args from it; a delegated plugin gets it as it is.
	Stdin []byte

	// Environ is what a delegated plugin inherits besides the CNI variables;
	// usually os.Environ().
	Environ []string
	// Stderr gets what a delegated plugin writes to its stderr; nil drops it.
	Stderr io.Writer

	// DefaultDataDir holds the reservations of networks that do not set
	// ipam.dataDir.
	DefaultDataDir string

	// Strict is for ADD, CHECK and STATUS: New fails for whatever is wrong with
	// the config, and unknown fields within ipam are wrong (for types in
	// process). Without it, for DEL and GC, New never fails for what the ipam
	// section says, and Del and GC do what they still can.
	Strict bool
	// Ranges says that the runtime hands over the ranges of host-local with a pod's verbs.
	Ranges bool
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

	// Warn gets what an operator should know although the verb goes on; nil
	// drops it.
	Warn func(string)
	// LockWait is how long to wait for another process's lock on the directory;
	// 0 means 5 s. The context may end it earlier.
	LockWait time.Duration
}

func (r *Request) warn(message string) {
	if r.Warn != nil {
		r.Warn(message)
	}
}

func (r *Request) local() *local { return &local{network: r.Network, gateways: r.Gateways} }

// New returns the allocator for the ipam.type of the netconf. Without a type,
// as in a plain layer 2 network, that is one that gives no addresses and always
// succeeds; New never returns a nil Allocator without an error.
func New(r *Request) (Allocator, error) {
	switch r.Type {
	case typeNone:
		// A section that has fields but no type probably has that misspelt.
		var conf netconf[struct {
			Type string `json:"type"`
		}]
		if err := conf.load(r); err != nil && r.Strict {
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

// outsideIPAM exempts what is not ours to judge from being an unknown field:
// all of the netconf but the ipam section, and comments in that.
func outsideIPAM(path, key string) bool {
	inside := path == "ipam" || strings.HasPrefix(path, "ipam.")
	return !inside || strings.HasPrefix(key, "_")
}
