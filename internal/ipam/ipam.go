package ipam

import (
	"context"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/strict"
)

// The types that are served in this process. Any other name is that of a plugin
// to run.
const (
	typeNone      = ""
	typeHostLocal = "host-local"
	typeStatic    = "static"
	typeDHCP      = "dhcp"
)

// An Allocator gives addresses to one attachment, following the ipam section of
// one netconf.
type Allocator interface {
	// Add reserves the attachment's addresses. The result holds IPs (with
	// gateways, IPv4 first), Routes and DNS, and nothing else. Where it fails
	// it has released everything; the caller has nothing to undo.
	Add(ctx context.Context) (*current.Result, error)

	// Del releases the attachment's addresses; that there are none is success.
	// hint names them, from the attachment's record, and spares a search
	// through all reservations; without any, Del searches.
	Del(ctx context.Context, hint []netip.Addr) error

	// Check reports whether the addresses that prev names are still this
	// attachment's. prev is the prevResult of the call, in the current version.
	Check(ctx context.Context, prev *current.Result) error

	// GC releases what this network has reserved for attachments that valid
	// does not list. An empty list releases everything.
	GC(ctx context.Context, valid []Owner) error

	// Status returns an error with code 50 where Add could not succeed for any
	// attachment. It changes nothing.
	Status(ctx context.Context) error
}

// An Owner is an attachment within its network.
type Owner struct {
	ContainerID string
	IfName      string
}

// A Live address is one that the kernel holds for an attachment right now.
type Live struct {
	Hash string // Request.OwnerHash of the attachment, from the mark on its link
	Addr netip.Addr
}

// An Epoch is one life of the node: from a boot to the next, or, where the node
// is itself a container, from one start of that container to the next. No pod
// outlives it, but a data directory on disk does.
//
// The directory's marker file holds the Token of its last use. At the first use
// in another epoch, reservations older than Started are dropped, unless the
// kernel shows the address alive. Where there is no marker the directory is
// new, or the reference plugin's, whose pods may be running: nothing is
// dropped. In both cases live addresses without a reservation get one, so that
// a directory deleted while pods run leads to no address being given twice.
type Epoch struct {
	Token   string    // of any form; empty switches all of this off
	Started time.Time // compared with the modification times of reservations; zero is not known: nothing is dropped
}

// A Request describes the attachment, the network and the node to an Allocator.
// Of one for GC or STATUS, ContainerID, NetNS, IfName and Args are empty.
type Request struct {
	Network     string // the netconf's name; also the name of the data directory
	ContainerID string
	NetNS       string // CNI_NETNS, handed to a delegated plugin; may be empty
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

	Epoch Epoch
	// Live returns the addresses that the kernel holds for this network right
	// now; others do not matter as long as they are not in its ranges. It may
	// be expensive: Add calls it once in an epoch, while the directory is
	// locked. If nil, nothing is alive.
	Live func() ([]Live, error)
	// OwnerHash is the hash of (network, container, interface) that marks what
	// we own in the kernel: hexadecimal digits. If nil, reservations that name
	// their owner by its hash are nobody's.
	OwnerHash func(Owner) string
	// InUse says whether an attachment, by its OwnerHash, is on record: GC leaves what it
	// has reserved, listed or not. If nil, GC goes by its list alone.
	InUse func(hash string) bool

	// Warn gets what an operator should know although the verb goes on; nil
	// drops it.
	Warn func(string)
	// LockWait is how long to wait for another process's lock on the directory;
	// 0 means 5 s. The context may end it earlier.
	LockWait time.Duration
}

// owner is the attachment that r is for.
func (r *Request) owner() Owner {
	return Owner{ContainerID: strings.TrimSpace(r.ContainerID), IfName: r.IfName}
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
	if err := checkNetwork(r.Network); err != nil {
		return nil, err
	}
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
	case typeDHCP:
		return elsewhere{r.Network}, nil
	default:
		return newDelegated(r, kind), nil
	}
}

// elsewhere is the allocator of the type that is served in process too, but not by
// this package: so no program of that name is run. Callers see to leases before
// they come here, but for a pod that was made under another type.
type elsewhere struct{ network string }

func (e elsewhere) Add(context.Context) (*current.Result, error) { return nil, e.refusal() }
func (elsewhere) Del(context.Context, []netip.Addr) error        { return nil }
func (e elsewhere) Check(context.Context, *current.Result) error { return e.refusal() }
func (elsewhere) GC(context.Context, []Owner) error              { return nil }
func (e elsewhere) Status(context.Context) error                 { return e.refusal() }

func (e elsewhere) refusal() error {
	return newError(codeInvalidConfig, nil, `network %q: ipam.type is "dhcp", and the attachment's addresses are not leased: DEL it and ADD it again`, e.network)
}

// checkNetwork refuses names that would lead out of the data directory. The
// caller has checked the name against the specification; here it is about to
// become a path.
func checkNetwork(name string) error {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
		return newError(codeInvalidConfig, nil, "network name %q cannot be the name of a directory", name)
	}
	return nil
}

// readType returns ipam.type, which is empty where it cannot be read and r is
// not strict.
func readType(r *Request) (string, error) {
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

// none is the allocator of a network without an ipam section.
type none struct{}

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
	return none{}, nil
}

func (none) Add(context.Context) (*current.Result, error) {
	return &current.Result{CNIVersion: current.ImplementedSpecVersion}, nil
}
func (none) Del(context.Context, []netip.Addr) error      { return nil }
func (none) Check(context.Context, *current.Result) error { return nil }
func (none) GC(context.Context, []Owner) error            { return nil }
func (none) Status(context.Context) error                 { return nil }

// sortIPs puts IPv4 first, since runtimes take the first address of a result
// for the pod's. The order is otherwise kept.
func sortIPs(ips []*current.IPConfig) {
	family := func(ip *current.IPConfig) int {
		if ip.Address.IP.To4() != nil {
			return 4
		}
		return 6
	}
	slices.SortStableFunc(ips, func(a, b *current.IPConfig) int { return family(a) - family(b) })
}
