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
	// Adding marks a lease that an ADD is getting, or was getting when it died.
	Adding State = "adding"

	// Bound marks a lease that a pod has and the keeper renews.
	Bound State = "bound"

	// Expired marks a pod whose lease ran out or was refused. The keeper tries to get another. Record.Lease is the
	// last one.
	Expired State = "expired"

	// Sticky marks the last lease of a pod that is gone. It is kept so that the pod's next container can request the
	// same address. It has no namespace, and no keeper renews it.
	Sticky State = "sticky"
)

// A Record describes one lease. It suffices to renew the lease, to apply it to the pod and to release it, without the
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
	// Booted is the time of the boot by the clock of the file's other times. Dir reads and writes it.
	Booted time.Time `json:"booted,omitzero"`

	HostIf string `json:"hostIf,omitempty"` // the port, in the host's namespace
	Bridge string `json:"bridge,omitempty"` // the port's bridge; a dead pod's lease is released from there
	// GatewayLink is the name of the host's link in the pod's VLAN of the bridge. The link need not exist. Empty
	// means that the pod is in no VLAN.
	GatewayLink string `json:"gatewayLink,omitempty"`

	Client  Client       `json:"client"`
	Lease   *dhcpc.Lease `json:"lease,omitempty"`
	Policy  Policy       `json:"policy,omitzero"`
	Applied Applied      `json:"applied,omitzero"` // the parts of the lease that the pod has
	// Removed lists the addresses and routes that the pod's owner removed, including DHCPv6 addresses. The pod does
	// not get them again.
	Removed Applied `json:"removed,omitzero"`

	// Formed lists the addresses that the pod has formed by router advertisements; nil until the keeper has looked.
	Formed []netip.Prefix `json:"formed,omitzero"`

	// Six is the state of the pod's DHCPv6; nil if the pod does not use it.
	Six *Six `json:"six,omitempty"`

	Error string `json:"error,omitempty"` // the keeper's present problem with the lease
	Note  string `json:"note,omitempty"`  // why the lease is not renewed yet, while time is left

}

// Client is the client's identity and requests towards the server.
type Client struct {
	dhcpc.Config
	// MAC is the MAC of Config, in a form for JSON.
	MAC dhcpc.Hex `json:"mac"`
	// Timeout is how long the keeper waits for servers at a time; 0 is the client's default.
	Timeout time.Duration `json:"timeout,omitempty"`
	// Sticky is set if the identity belongs to the pod and not to its container. Then the lease is not released at
	// the pod's end, and is remembered across a boot.
	Sticky bool `json:"sticky,omitempty"`
}

// Asking returns the client's configuration, without clock and transport. The client requests hint's address or, if
// hint is nil, Address.
func (c *Client) Asking(hint *dhcpc.Lease) *dhcpc.Config {
	cfg := c.Config
	cfg.MAC, cfg.Timeout = net.HardwareAddr(c.MAC), c.Timeout
	if hint != nil {
		cfg.Address = hint.Address.Addr()
	}
	return &cfg
}

// ClientOf returns the part of a configuration that a record keeps.
func ClientOf(cfg *dhcpc.Config) Client {
	c := Client{Config: *cfg, MAC: dhcpc.Hex(cfg.MAC), Timeout: cfg.Timeout}
	c.Config.MAC, c.Config.Timeout, c.Retransmit, c.Dial, c.Refuse = nil, 0, 0, nil, nil
	return c
}

// key returns the client's identity towards a server: the client identifier, or without one the MAC. The two never
// clash. An identifier begins with a type byte, and one made of an Ethernet address (RFC 2132) has 7 bytes.
func (c *Client) key() string {
	if len(c.ClientID) > 0 {
		return c.ClientID.String()
	}
	return c.MAC.String()
}

// Hash returns the record's name, which is the attachment's hash. A sticky record's name is derived from the client
// instead, since the pod's next container does not know the name of the last one.
func (r *Record) Hash() string {
	if r.State == Sticky {
		return stickyHash(r.Network, r.Client.ClientID)
	}
	return ident.Hash(r.Network, r.ContainerID, r.IfName)
}

// stickyHash returns the name of a client's sticky record. It differs from every attachment's hash, since no
// interface has an empty name.
func stickyHash(network string, clientID dhcpc.Hex) string {
	return ident.Hash(network, clientID.String(), "")
}

// Expires returns when the lease ends, or the zero time if it never does.
func (r *Record) Expires() time.Time {
	if r.Lease == nil {
		return time.Time{}
	}
	return r.Lease.Expire
}

// Wanted returns the parts of a lease that the pod gets: those of its policy, without those that its owner removed.
// If the owner removed the address, the pod gets nothing.
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

// Wants6 reports whether the pod gets a DHCPv6 address. It does not if its owner removed one.
func (r *Record) Wants6() bool {
	return !slices.ContainsFunc(r.Removed.Addresses, func(p netip.Prefix) bool { return p.Addr().Is6() })
}

// encode returns a record's file.
func encode(r *Record) ([]byte, error) {
	return state.EncodeChecked(&r.Version, r, file.MaxRecord)
}

// decode parses a record's file. The error matches file.ErrDamaged or state.ErrVersion. A record of a newer version
// is left alone, and its lease runs out unless that version is installed again.
func decode(data []byte) (*Record, error) {
	r := new(Record)
	return r, state.Decode(data, &r.Version, r)
}

// Check returns an error for a record that could not be read back or used.
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

	// Making the client checks the rest.
	if _, err := dhcpc.NewMachine(r.Client.Asking(nil)); err != nil {
		errs = append(errs, fmt.Errorf("client: %w", err))
	}

	errs = append(errs, r.Six.check())
	return errors.Join(errs...)
}

// VLAN returns the VLAN of the bridge that the pod is in, or 0 for none.
func (r *Record) VLAN() uint16 {
	id, _ := strconv.ParseUint(strings.TrimPrefix(r.GatewayLink, r.Bridge+"."), 10, 16)
	return uint16(id)
}

// At returns the name of the host's link in the pod's network: the bridge, or its link in the pod's VLAN.
func (r *Record) At() string {
	return cmp.Or(r.GatewayLink, r.Bridge)
}
