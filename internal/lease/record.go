package lease

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// State says what a record is about.
type State string

const (
	// Adding is a lease that an ADD is getting, or died getting.
	Adding State = "adding"

	// Bound is a lease that a pod has and the keeper renews.
	Bound State = "bound"

	// Expired is a pod whose lease ran out or was refused, and for which the keeper
	// tries to get another. Lease is the last one.
	Expired State = "expired"

	// Sticky is the last lease of a pod that is gone, kept so that its next one is
	// asked for the same address. It has no namespace, and no keeper renews it.
	Sticky State = "sticky"
)

// A Record is one lease: what is needed to renew it, to apply it to the pod and to
// release it, without the configuration that it was got with.
type Record struct {
	Version int `json:"version,omitempty"` // of the format

	State State `json:"state"`

	// Token is drawn for each ADD. It tells the record from a later one of the same
	// names.
	Token string `json:"token"`

	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"` // in the pod
	Pod         string `json:"pod,omitempty"`

	NetNS       string `json:"netns,omitempty"`       // path, as the runtime gave it; paths are reused
	NetNSCookie uint64 `json:"netnsCookie,omitempty"` // SO_NETNS_COOKIE, never reused within a boot
	Boot        string `json:"boot,omitempty"`        // the kernel's boot id
	// Booted is when the machine booted by the clock that the file's times are by; Dir reads and writes it.
	Booted time.Time `json:"booted,omitzero"`

	HostIf string `json:"hostIf,omitempty"` // the port, in the host's namespace
	Bridge string `json:"bridge,omitempty"` // its master, from which a dead pod's lease is released
	// GatewayLink names the host's link in the VLAN of the bridge that the pod is in, though there
	// be none; empty: in none.
	GatewayLink string `json:"gatewayLink,omitempty"`

	Client  Client       `json:"client"`
	Lease   *dhcpc.Lease `json:"lease,omitempty"`
	Policy  Policy       `json:"policy,omitzero"`
	Applied Applied      `json:"applied,omitzero"` // what the pod has of the lease
	// Removed is what the pod's owner has removed of its leases, also by DHCPv6. The pod does not get it again.
	Removed Applied `json:"removed,omitzero"`

	// Six is the pod's part in DHCPv6; nil where it has none.
	Six *Six `json:"six,omitempty"`

	Error string `json:"error,omitempty"` // the keeper's last trouble, while it lasts
	Note  string `json:"note,omitempty"`  // why the lease is not renewed yet, while there is time left
}

// Client is the client of the lease: what a server is told of it.
type Client struct {
	dhcpc.Config
	// MAC is Config's, in a form that JSON has.
	MAC dhcpc.Hex `json:"mac"`
	// Sticky says that the identity is the pod's and not the container's: its lease is
	// remembered when the node has booted, and not released.
	Sticky bool `json:"sticky,omitempty"`
}

// Asking returns the client's configuration, without clock and transport. A new lease
// is asked for the address of hint, if that is not nil, else for Address.
func (c *Client) Asking(hint *dhcpc.Lease) *dhcpc.Config {
	cfg := c.Config
	cfg.MAC = net.HardwareAddr(c.MAC)
	if hint != nil {
		cfg.Address = hint.Address.Addr()
	}
	return &cfg
}

// ClientOf returns the part of a configuration that a record keeps.
func ClientOf(cfg *dhcpc.Config) Client {
	c := Client{Config: *cfg, MAC: dhcpc.Hex(cfg.MAC)}
	c.Config.MAC, c.Timeout, c.Retransmit, c.Dial, c.Refuse = nil, 0, 0, nil, nil
	return c
}

// key is what a server knows the client by. The two cannot be taken for each other: an
// identifier has a type byte, and that of Ethernet (RFC 2132) is 7 bytes with it.
func (c *Client) key() string {
	if len(c.ClientID) > 0 {
		return c.ClientID.String()
	}
	return c.MAC.String()
}

// Hash returns the record's name, which is that of the attachment's. A sticky record's name follows from the
// client, since the pod's next container does not know the name of the last one.
func (r *Record) Hash() string {
	if r.State == Sticky {
		return stickyHash(r.Network, r.Client.ClientID)
	}
	return ident.Hash(r.Network, r.ContainerID, r.IfName)
}

// stickyHash cannot be that of an attachment, but for a collision: no interface has
// an empty name.
func stickyHash(network string, clientID dhcpc.Hex) string {
	return ident.Hash(network, clientID.String(), "")
}

// Expires gives when the lease ends; the zero time if it does not.
func (r *Record) Expires() time.Time {
	if r.Lease == nil {
		return time.Time{}
	}
	return r.Lease.Expire
}

// Wanted returns what the pod gets of a lease: what its policy says, without what its owner has removed. A pod whose
// owner has removed the address gets nothing.
func (r *Record) Wanted(l *dhcpc.Lease) Applied {
	a := r.Policy.Apply(l)
	if slices.ContainsFunc(r.Removed.Addresses, func(p netip.Prefix) bool { return p.Addr().Is4() }) {
		return Applied{MTU: a.MTU}
	}
	a.Routes = slices.DeleteFunc(a.Routes, func(want dhcpc.Route) bool {
		return slices.ContainsFunc(r.Removed.Routes, func(o dhcpc.Route) bool { return o.Dst == want.Dst })
	})
	return a
}

// Wants6 reports whether the pod gets an address that DHCPv6 leases: its owner has removed none.
func (r *Record) Wants6() bool {
	return !slices.ContainsFunc(r.Removed.Addresses, func(p netip.Prefix) bool { return p.Addr().Is6() })
}

// encode writes a record's file.
func encode(r *Record) ([]byte, error) {
	return state.EncodeChecked(&r.Version, r, file.MaxRecord)
}

// decode reads a record's file. The error matches file.ErrDamaged, or state.ErrVersion: such a
// record is left alone, and its lease runs out unless that version comes back.
func decode(data []byte) (*Record, error) {
	r := new(Record)
	return r, state.Decode(data, &r.Version, r)
}

// Check refuses what would not be read back, or could not be used.
func (r *Record) Check() error {
	errs := []error{
		ident.CheckText("network", r.Network),
		ident.CheckText("container ID", r.ContainerID),
		ident.CheckText("interface name", r.IfName),
	}
	if r.Token == "" {
		errs = append(errs, errors.New("it has no token"))
	}
	switch r.State {
	case Adding:
	case Bound, Expired, Sticky:
		if r.Lease == nil {
			errs = append(errs, fmt.Errorf("it is %s and has no lease", r.State))
		}
	default:
		errs = append(errs, fmt.Errorf("its state is %q", r.State))
	}
	if r.State == Sticky && len(r.Client.ClientID) == 0 {
		errs = append(errs, errors.New("it is sticky and has no client identifier"))
	}
	if r.Lease != nil {
		errs = append(errs, r.Lease.Validate())
	}
	// The finer points are checked when the client is made.
	if _, err := dhcpc.NewMachine(r.Client.Asking(nil)); err != nil {
		errs = append(errs, fmt.Errorf("client: %w", err))
	}
	errs = append(errs, r.Six.check())
	return errors.Join(errs...)
}

// VLAN is the one of its bridge that the pod is in; 0 is none.
func (r *Record) VLAN() uint16 {
	id, _ := strconv.ParseUint(strings.TrimPrefix(r.GatewayLink, r.Bridge+"."), 10, 16)
	return uint16(id)
}

// At names the link by which the host is where the pod is: its bridge, or the one in its VLAN.
func (r *Record) At() string {
	return cmp.Or(r.GatewayLink, r.Bridge)
}
