package ipamconf

import (
	"context"
	"io"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/ipam"
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

	// Said is what the section, or the plugin that it names, says besides addresses. It is
	// complete when Add has returned.
	Said() *Said
}

// Said is what goes into a result besides addresses.
type Said struct {
	Routes []*types.Route
	DNS    types.DNS
	// ipv4 tells of each address, in the order in which they are reported, whether it is one of
	// IPv4. Without it those of IPv4 come first.
	ipv4 []bool
}

// Ordered puts addresses, those of IPv4 first, into the order in which they are reported.
func (s *Said) Ordered(given []ipam.Address) []ipam.Address {
	if len(s.ipv4) != len(given) {
		return given
	}
	of := func(ipv4 bool) (list []ipam.Address) {
		for _, a := range given {
			if a.Prefix.Addr().Is4() == ipv4 {
				list = append(list, a)
			}
		}
		return list
	}
	left := map[bool][]ipam.Address{true: of(true), false: of(false)}
	ordered := make([]ipam.Address, 0, len(given))
	for _, ipv4 := range s.ipv4 {
		if len(left[ipv4]) == 0 {
			return given
		}
		ordered, left[ipv4] = append(ordered, left[ipv4][0]), left[ipv4][1:]
	}
	return ordered
}

// Result is the CNI result of an Add.
func (s *Said) Result(given *ipam.Allocation) *current.Result {
	result := &current.Result{CNIVersion: current.ImplementedSpecVersion, Routes: s.Routes, DNS: s.DNS}
	for _, a := range s.Ordered(given.Addresses) {
		config := &current.IPConfig{Address: net.IPNet{
			IP: a.Prefix.Addr().AsSlice(), Mask: net.CIDRMask(a.Prefix.Bits(), a.Prefix.Addr().BitLen()),
		}}
		if a.Gateway.IsValid() {
			config.Gateway = a.Gateway.AsSlice()
		}
		result.IPs = append(result.IPs, config)
	}
	return result
}

// local is what the allocators in this process have in common, and by itself one that gives
// no addresses: that of a network without an ipam section, or of one that is served elsewhere.
type local struct {
	network string
	said    Said
	confErr error // the config is wrong: only Del and Collect can do anything
}

func (l *local) Bind(ipam.Node) ipam.Allocator { return l }
func (*local) Slow() bool                      { return false }
func (l *local) Said() *Said                   { return &l.said }
func (l *local) Add(context.Context, ipam.Owner) (*ipam.Allocation, error) {
	if l.confErr != nil {
		return nil, l.confErr
	}
	return &ipam.Allocation{}, nil
}
func (*local) Del(context.Context, ipam.Owner, []netip.Addr) error       { return nil }
func (l *local) Check(context.Context, ipam.Owner, []ipam.Address) error { return l.confErr }
func (*local) Collect(context.Context, []ipam.Owner) error               { return nil }
func (l *local) Status(context.Context) error                            { return l.confErr }

// A Request is the configuration of an Allocator, and what a delegated plugin is told of
// the call. For GC or STATUS, ContainerID, NetNS, IfName and Args are empty.
type Request struct {
	Network     string // the netconf's name; also the name of the data directory
	ContainerID string // handed to a delegated plugin, as are NetNS and IfName
	NetNS       string // CNI_NETNS; may be empty
	IfName      string
	Args        string // CNI_ARGS
	Path        string // CNI_PATH, where delegated plugins are looked for

	// Stdin is the whole netconf. In-process types read cniVersion, ipam,
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
	// ByName has all be as with the reference's plugins: fields that nobody knows are passed over,
	// and addresses are reported in the order in which the config, or the plugin, names them.
	ByName bool
	// Unrecorded says that the caller has no record of attachments: host-local looks through all
	// reservations for one of the attachment's, before it gives another.
	Unrecorded bool
	// Type is in place of ipam.type.
	Type string
	// All has an error of New tell, a line each, all that is wrong with the ipam section, as far
	// as it can be read off its fields one by one, and not only what comes first.
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

// New returns the allocator for the ipam.type of the netconf. Without a type,
// as in a plain layer 2 network, that is one that gives no addresses and always
// succeeds; New never returns a nil Allocator without an error.
func New(r *Request) (Allocator, error) {
	kind, err := readType(r)
	if err != nil {
		return nil, err
	}
	switch kind {
	case typeNone:
		return newNone(r)
	case typeHostLocal:
		return newHostLocal(r)
	case typeStatic:
		return newStatic(r)
	case TypeDHCP:
		// It is served in process too, but not by this package: so no program of that name is run.
		// Callers see to leases before they come here, but for a pod that was made under another
		// type.
		return &local{network: r.Network, confErr: newError(codeInvalidConfig, nil, `network %q: ipam.type is "dhcp", and the attachment's addresses are not leased: `+
			"DEL it and ADD it again", r.Network)}, nil
	default:
		return newDelegated(r, kind), nil
	}
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

// readType returns ipam.type, which is empty where it cannot be read and r is
// not strict.
func readType(r *Request) (string, error) {
	if r.Type != "" {
		return r.Type, nil
	}
	var conf struct {
		IPAM struct {
			Type string `json:"type"`
		} `json:"ipam"`
	}
	if !r.Strict {
		// Whatever is wrong elsewhere, a type that is there is in conf.
		_ = strict.Lenient(r.Stdin, &conf)
		return conf.IPAM.Type, nil
	}
	everything := func(string, string) bool { return true }
	if err := strict.Unmarshal(r.Stdin, &conf, everything); err != nil {
		return "", ConfigError(err)
	}
	return conf.IPAM.Type, nil
}

// outsideIPAM exempts what is not ours to judge from being an unknown field:
// all of the netconf but the ipam section, and comments in that.
func outsideIPAM(path, key string) bool {
	inside := path == "ipam" || strings.HasPrefix(path, "ipam.")
	return !inside || strings.HasPrefix(key, "_")
}

// newNone refuses, where r is strict, a section that has fields but no type:
// the type was probably misspelt.
func newNone(r *Request) (Allocator, error) {
	var conf struct {
		IPAM struct {
			Type string `json:"type"`
		} `json:"ipam"`
	}
	if r.Strict {
		if err := strict.Unmarshal(r.Stdin, &conf, outsideIPAM); err != nil {
			return nil, ConfigError(err)
		}
	}
	return &local{network: r.Network}, nil
}

// readAddresses takes the addresses out of a plugin's result, IPv4 first, since runtimes
// take the first address of a result for the pod's. The order is otherwise kept, and ipv4 is
// the one that the result had.
func readAddresses(result *current.Result) (_ []ipam.Address, ipv4 []bool, _ error) {
	var sorted []*current.IPConfig
	for _, is4 := range []bool{true, false} {
		for _, ip := range result.IPs {
			if (ip.Address.IP.To4() != nil) == is4 {
				sorted = append(sorted, ip)
			}
		}
	}
	for _, ip := range result.IPs {
		ipv4 = append(ipv4, ip.Address.IP.To4() != nil)
	}
	var list []ipam.Address
	for i, ip := range sorted {
		prefix, ok := Prefix(ip.Address)
		if !ok {
			return nil, nil, newError(codeDecode, nil, "the ipam's ips[%d] is no address with a prefix length: %s", i, ip.Address.String())
		}
		gateway, _ := netip.AddrFromSlice(ip.Gateway)
		gateway = gateway.Unmap()
		if gateway.IsValid() && gateway.BitLen() != prefix.Addr().BitLen() {
			return nil, nil, newError(codeInvalidConfig, nil, "the ipam's ips[%d]: the gateway %s is not of the family of %s", i, gateway, prefix)
		}
		list = append(list, ipam.Address{Prefix: prefix, Gateway: gateway})
	}
	return list, ipv4, nil
}

// Prefix is an address with the length of its network; ok is false where it is none.
func Prefix(n net.IPNet) (netip.Prefix, bool) {
	ip, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if !ok || bits == 0 {
		return netip.Prefix{}, false
	}
	ip = ip.Unmap()
	if bits == 128 && ip.Is4() {
		ones, bits = ones-96, 32
	}
	p := netip.PrefixFrom(ip, ones)
	return p, p.IsValid() && bits == ip.BitLen()
}
