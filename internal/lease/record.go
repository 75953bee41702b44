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

// State is the state of a lease record.
type State string

const (
	// Adding means that an ADD is acquiring the lease, or died while it was acquiring it.
	Adding State = "adding"

	// Bound means that a pod has the lease, and the keeper renews it.
	Bound State = "bound"

	// Expired means that the pod's lease ran out or was refused. The keeper tries to get another. Record.Lease is the
	// last lease.
	Expired State = "expired"

	// Sticky means that the pod is gone, and that its next container may request the same address. The record has no
	// namespace, and no keeper renews the lease.
	Sticky State = "sticky"
)

// Record describes one lease. It suffices to renew the lease, to apply it to the pod and to release it, without the
// original configuration.
type Record struct {
	Version int `json:"version,omitempty"` // version of the format

	State State `json:"state"`

	// Token is random for each ADD. It distinguishes the record from a later one with the same name.
	Token string `json:"token"`

	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"` // in the pod
	Pod         string `json:"pod,omitempty"`

	NetNS       string `json:"netns,omitempty"`       // path, as the runtime gave it; paths are reused
	NetNSCookie uint64 `json:"netnsCookie,omitempty"` // SO_NETNS_COOKIE, never reused within a boot
	Boot        string `json:"boot,omitempty"`        // the kernel's boot id
	// Booted is the time of the boot by the wall clock of the file's other times. Store reads and writes it.
	Booted time.Time `json:"booted,omitzero"`

	HostIf string `json:"hostIf,omitempty"` // the port, in the host's namespace
	Bridge string `json:"bridge,omitempty"` // the port's bridge; a dead pod's lease is released from there
	// GatewayLink is the name of the host's link in the pod's VLAN of the bridge. The link need not exist. Empty
	// means that the pod is not in a VLAN.
	GatewayLink string `json:"gatewayLink,omitempty"`

	Client  Client       `json:"client"`
	Lease   *dhcpc.Lease `json:"lease,omitempty"`
	Policy  Policy       `json:"policy,omitzero"`
	Applied Applied      `json:"applied,omitzero"` // the parts of the lease that the pod has
	// Removed lists the addresses and routes that the pod's owner removed, including DHCPv6 addresses. The pod does
	// not get them again.
	Removed Applied `json:"removed,omitzero"`

	// Formed lists the addresses that the pod formed from router advertisements. It is nil until the keeper has
	// checked.
	Formed []netip.Prefix `json:"formed,omitzero"`

	// Six is the state of the pod's DHCPv6. It is nil if the pod does not use DHCPv6.
	Six *Six `json:"six,omitempty"`

	Error string `json:"error,omitempty"` // the keeper's present problem with the lease
	Note  string `json:"note,omitempty"`  // why the lease is not renewed yet, while time is left

}

// Client is a DHCP client's identity and the parameters of its requests.
type Client struct {
	dhcpc.Config
	// MAC is the field MAC of Config, which has no JSON form.
	MAC dhcpc.Hex `json:"mac"`
	// Timeout is how long one visit of the keeper waits for servers. 0 is the client's default.
	Timeout time.Duration `json:"timeout,omitempty"`
	// Sticky is set if the identity belongs to the pod and not to its container. The lease is then not released when
	// the pod ends, and is remembered across a boot.
	Sticky bool `json:"sticky,omitempty"`
}

// DHCPConfig returns the client's configuration, without clock and transport. If hint is not nil, the client requests
// its address, and otherwise Address.
func (c *Client) DHCPConfig(hint *dhcpc.Lease) *dhcpc.Config {
	cfg := c.Config
	cfg.MAC, cfg.Timeout = net.HardwareAddr(c.MAC), c.Timeout
	if hint != nil {
		cfg.Address = hint.Address.Addr()
	}
	return &cfg
}

// ClientOf returns the part of a configuration that a record stores.
func ClientOf(cfg *dhcpc.Config) Client {
	c := Client{Config: *cfg, MAC: dhcpc.Hex(cfg.MAC), Timeout: cfg.Timeout}
	c.Config.MAC, c.Config.Timeout, c.Retransmit, c.Dial, c.Refuse = nil, 0, 0, nil, nil
	return c
}

// key returns the client's identity towards a server, which is the client identifier or, without one, the MAC. The
// two never clash: a client identifier made from a MAC (RFC 2132) begins with a type byte and so has 7 bytes.
func (c *Client) key() string {
	if len(c.ClientID) > 0 {
		return c.ClientID.String()
	}
	return c.MAC.String()
}

// Hash returns the record's name, which is the attachment's hash. The name of a sticky record derives from the client
// instead, since the pod's next container does not know the hash of the previous one.
func (r *Record) Hash() string {
	if r.State == Sticky {
		return stickyHash(r.Network, r.Client.ClientID)
	}
	return ident.Hash(r.Network, r.ContainerID, r.IfName)
}

// stickyHash returns the name of a client's sticky record. It differs from every attachment's hash, since no
// interface's name is empty.
func stickyHash(network string, clientID dhcpc.Hex) string {
	return ident.Hash(network, clientID.String(), "")
}

// Expires returns the end of the lease. It returns the zero time if there is no lease, or if the lease never ends.
func (r *Record) Expires() time.Time {
	if r.Lease == nil {
		return time.Time{}
	}
	return r.Lease.Expire
}

// Intended returns the addresses, routes and MTU that the pod gets from a lease: those that its policy selects, without
// those that its owner removed. If the owner removed the address, only the MTU is left.
func (r *Record) Intended(l *dhcpc.Lease) Applied {
	a := r.Policy.Apply(l)
	if slices.ContainsFunc(r.Removed.Addresses, func(p netip.Prefix) bool { return p.Addr().Is4() }) {
		return Applied{MTU: a.MTU}
	}
	a.Routes = slices.DeleteFunc(a.Routes, func(want dhcpc.Route) bool {
		return slices.ContainsFunc(r.Removed.Routes, func(o dhcpc.Route) bool { return o.Dst == want.Dst })
	})
	return a
}

// Wants6 reports whether the pod gets a DHCPv6 address. It gets none if its owner removed one.
func (r *Record) Wants6() bool {
	return !slices.ContainsFunc(r.Removed.Addresses, func(p netip.Prefix) bool { return p.Addr().Is6() })
}

// encode returns the content of a record's file.
func encode(r *Record) ([]byte, error) {
	return state.EncodeChecked(&r.Version, r, file.MaxRecord)
}

// decode parses the content of a record's file. The error matches file.ErrDamaged, or state.ErrVersion for a record
// of a newer version. Such a record is left alone, and its lease runs out unless the newer version is installed
// again.
func decode(data []byte) (*Record, error) {
	r := new(Record)
	return r, state.Decode(data, &r.Version, r)
}

// Check returns an error if the record could not be read back or used.
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

	// NewMachine checks the client's other fields.
	if _, err := dhcpc.NewMachine(r.Client.DHCPConfig(nil)); err != nil {
		errs = append(errs, fmt.Errorf("client: %w", err))
	}

	errs = append(errs, r.Six.check())
	return errors.Join(errs...)
}

// VLAN returns the pod's VLAN on the bridge, or 0 if it is not in one.
func (r *Record) VLAN() uint16 {
	id, _ := strconv.ParseUint(strings.TrimPrefix(r.GatewayLink, r.Bridge+"."), 10, 16)
	return uint16(id)
}

// At returns the name of the host's link in the pod's network, which is the bridge or its link in the pod's VLAN.
func (r *Record) At() string {
	return cmp.Or(r.GatewayLink, r.Bridge)
}
