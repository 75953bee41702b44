package lease

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/dhcp6"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// State is the state of a lease record.
type State string

const (
	// Adding means that an ADD is acquiring the lease, or died while it was acquiring it.
	Adding State = "adding"

	// Bound means that a pod has the lease, and the keeper (tombolod) renews it.
	Bound State = "bound"

	// Expired means that the pod's lease ran out, or that a server refused to renew it. The keeper tries to get
	// another. Record.Lease is the last lease.
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

	// Token is a new random text for each call of Create. It distinguishes the record from a later one with the same
	// name.
	Token string `json:"token"`

	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"` // in the pod
	Pod         string `json:"pod,omitempty"`

	NetNS       string `json:"netns,omitempty"`       // path, as the runtime gave it; paths are reused
	NetNSCookie uint64 `json:"netnsCookie,omitempty"` // SO_NETNS_COOKIE, never reused within a boot
	Boot        string `json:"boot,omitempty"`        // the kernel's boot id
	// Booted is the time of the boot, by the same wall clock as the other times in the file. Store sets and uses it.
	Booted time.Time `json:"booted,omitzero"`

	HostIf string `json:"hostIf,omitempty"` // the host's end of the pod's link
	Bridge string `json:"bridge,omitempty"` // the bridge that HostIf is a port of
	// GatewayLink is the name of the host's link in the pod's network, if that is not the bridge. It is the shared NIC
	// (package share), or the host's link in the pod's VLAN. The host need not have a link in the VLAN.
	GatewayLink string `json:"gatewayLink,omitempty"`

	Client Client `json:"client"`
	// Lease is the pod's IPv4 lease. In the state Adding, it is the client's last lease, whose address the ADD requests
	// again, or nil.
	Lease  *dhcpc.Lease `json:"lease,omitempty"`
	Policy Policy       `json:"policy,omitzero"`
	// Applied lists the parts of the lease that the pod has. While the keeper removes parts of an earlier lease, it
	// lists these parts too.
	Applied Applied `json:"applied,omitzero"`
	// Removed lists the addresses and routes that the pod's owner removed, including DHCPv6 addresses. The pod does
	// not get them again.
	Removed Applied `json:"removed,omitzero"`

	// Formed lists the addresses that the pod formed from router advertisements. It is empty until the ADD or the
	// keeper has found one, and if the pod has lost all of them. The attachment then keeps its former addresses on
	// record.
	Formed []netip.Prefix `json:"formed,omitzero"`

	// Six is the state of the pod's DHCPv6. It is nil if the pod does not use DHCPv6.
	Six *Six `json:"six,omitempty"`

	Error string `json:"error,omitempty"` // the problem that the keeper has with the lease now
	Note  string `json:"note,omitempty"`  // why the lease is not renewed yet, while time is left

}

// Client holds a DHCP client's identity and the parameters of its requests.
type Client struct {
	dhcpc.Config
	// MAC is stored in place of Config.MAC, which has no JSON form.
	MAC dhcpc.Hex `json:"mac"`
	// Timeout is stored in place of Config.Timeout, which has no JSON form either. 0 means the client's default.
	Timeout time.Duration `json:"timeout,omitempty"`
	// Sticky is set if the identity belongs to the pod and not to its container. The lease is then not released when
	// the pod ends, and its record stays across a boot.
	Sticky bool `json:"sticky,omitempty"`
}

// DHCPConfig returns the client's configuration, without Dial and Refuse. The client requests the address of the lease
// hint or, if hint is nil, the configured Address.
func (c *Client) DHCPConfig(hint *dhcpc.Lease) *dhcpc.Config {
	cfg := c.Config
	cfg.MAC, cfg.Timeout = net.HardwareAddr(c.MAC), c.Timeout
	if hint != nil {
		cfg.Address = hint.Address.Addr()
	}
	return &cfg
}

// ClientOf returns the part of a client's configuration that a record stores.
func ClientOf(cfg *dhcpc.Config) Client {
	c := Client{Config: *cfg, MAC: dhcpc.Hex(cfg.MAC), Timeout: cfg.Timeout}
	c.Config.MAC, c.Config.Timeout, c.Retransmit, c.Dial, c.Refuse = nil, 0, 0, nil, nil
	return c
}

// key returns the text that identifies the client to a server: the client identifier or, without one, the MAC. A client
// identifier made from a MAC (RFC 2132) begins with a type byte, so it differs from the MAC.
func (c *Client) key() string {
	if len(c.ClientID) > 0 {
		return c.ClientID.String()
	}
	return c.MAC.String()
}

// Hash returns the record's name, which is the attachment's hash. In the state Sticky, the name derives from the client
// instead, since the pod's next container does not know the hash of the previous one.
func (r *Record) Hash() string {
	if r.State == Sticky {
		// No interface's name is empty, so this differs from every attachment's hash.
		return ident.Hash(r.Network, r.Client.ClientID.String(), "")
	}
	return ident.Hash(r.Network, r.ContainerID, r.IfName)
}

// Expires returns the end of the lease. It returns the zero time if there is no lease, or if the lease never ends.
func (r *Record) Expires() time.Time {
	if r.Lease == nil {
		return time.Time{}
	}
	return r.Lease.Expire
}

// Intended returns the addresses, routes and MTU that the pod must get from a lease. The policy selects them. Addresses
// and routes that the pod's owner removed are left out. If the owner removed the IPv4 address, only the MTU is left.
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

// Wants6 reports whether the pod may get an address by DHCPv6. It must not get one if the pod's owner has removed an
// IPv6 address. Wants6 does not check whether the pod uses DHCPv6.
func (r *Record) Wants6() bool {
	return !slices.ContainsFunc(r.Removed.Addresses, func(p netip.Prefix) bool { return p.Addr().Is6() })
}

// encode returns the content of a record's file. It returns an error if the record is invalid or too long.
func encode(r *Record) ([]byte, error) {
	return state.EncodeChecked(&r.Version, r, file.MaxRecord)
}

// decode parses the content of a record's file. If the record is damaged, the error matches file.ErrDamaged. If a newer
// version wrote it, the error matches state.ErrVersion. The keeper then does not touch the record, and the lease runs
// out unless that version is installed again.
func decode(data []byte) (*Record, error) {
	r := new(Record)
	return r, state.Decode(data, &r.Version, r)
}

// Check returns an error if the record is invalid.
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

	_, err := dhcpc.NewMachine(r.Client.DHCPConfig(nil)) // checks the fields of the client
	errs = append(errs, state.WithOperation(err, "client"), state.WithOperation(r.Six.check(), "DHCPv6"))
	return errors.Join(errs...)
}

// At returns the name of the host's link in the pod's network. This is the shared NIC (package share), the host's link
// in the pod's VLAN, or the bridge.
func (r *Record) At() string {
	return cmp.Or(r.GatewayLink, r.Bridge)
}

// Clock returns the kernel's boot id and the time since the boot. The time includes suspensions.
type Clock func() (boot string, up time.Duration, _ error)

// kernelClock returns a Clock that reads the boot id once, and CLOCK_BOOTTIME in each call.
func kernelClock() Clock {
	id := sync.OnceValues(state.BootID)
	return func() (string, time.Duration, error) {
		boot, err := id()
		return boot, state.Since(unix.CLOCK_BOOTTIME), err
	}
}

// In a record's file, a lease's times are wall clock times. The file also has the time of the boot by the same clock
// (Booted). Within that boot only the difference between a time and Booted counts, so setting the clock does no harm.
// After another boot, the times count unchanged. In memory, times have readings of the process's monotonic clock.

// toDisk encodes a record for its file. In the result, all times are wall clock times in UTC, and Booted is the time of
// the boot. It returns the errors of Clock and of encode.
func (d *Store) toDisk(r *Record) ([]byte, error) {
	_, up, err := d.Clock()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	wall := now.Round(0).UTC()
	out := r.withTimes(func(t time.Time) time.Time { return wall.Add(t.Sub(now)) })
	out.Booted = wall.Add(-up)
	return encode(out)
}

// fromDisk decodes a record's file. In the result, all times have readings of the process's monotonic clock. It returns
// the errors of decode and of Clock.
func (d *Store) fromDisk(data []byte) (*Record, error) {
	r, err := decode(data)
	boot, up, clockErr := d.Clock()
	if err := cmp.Or(err, clockErr); err != nil {
		return nil, err
	}

	booted := time.Now().Add(-up)
	from := r.Booted
	if r.Boot != boot || from.IsZero() {
		from = booted.Round(0)
	}
	return r.withTimes(func(t time.Time) time.Time { return booted.Add(t.Sub(from)) }), nil
}

// withTimes returns a copy of the record in which change has converted all times of the leases and of Six.Information,
// except zero times.
func (r *Record) withTimes(change func(time.Time) time.Time) *Record {
	to := func(times ...*time.Time) {
		for _, t := range times {
			if !t.IsZero() {
				*t = change(*t)
			}
		}
	}

	out := *r
	out.Lease, out.Six = clone(r.Lease), clone(r.Six)
	if l := out.Lease; l != nil {
		to(&l.Obtained, &l.Renew, &l.Rebind, &l.Expire)
	}

	if out.Six == nil {
		return &out
	}

	out.Six.Lease, out.Six.Information = clone(out.Six.Lease), clone(out.Six.Information)
	if l := out.Six.Lease; l != nil {
		to(&l.Obtained, &l.Renew, &l.Rebind, &l.Preferred, &l.Expire)
	}
	if i := out.Six.Information; i != nil {
		to(&i.Until)
	}
	return &out
}

// clone returns a copy of *p, or nil if p is nil.
func clone[T any](p *T) *T {
	if p == nil {
		return nil
	}
	return new(*p)
}

// TimeLeft returns the remaining time of a DHCPv4 or DHCPv6 lease as text.
func TimeLeft(l interface{ Left(time.Time) time.Duration }, now time.Time) string {
	switch left := l.Left(now); {
	case left < 0:
		return "for ever"
	case left > 0:
		return left.Truncate(time.Second).String()
	}
	return "ended"
}

// Six is the DHCPv6 part of a record. Only the keeper speaks DHCPv6, since the codec would slow the plugin down. ADD
// writes the client's identity, and usually waits for the keeper's result. DEL sends the message in Release unchanged.
type Six struct {
	DUID dhcpc.Hex `json:"duid"`
	IAID uint32    `json:"iaid"`
	// Lease is the pod's lease. It is nil before the first lease and after the loss of one.
	Lease *dhcp6.Lease6 `json:"lease,omitempty"`
	// Address is the pod's last address, which the client requests again.
	Address netip.Addr `json:"address,omitzero"`
	// Release is the encoded RELEASE message for Lease.
	Release dhcpc.Hex `json:"release,omitempty"`
	// Checking is set while the pod has Lease's address only for duplicate address detection. The record must already
	// name the address, since the firewall drops the pod's queries about other addresses.
	Checking bool   `json:"checking,omitempty"`
	Error    string `json:"error,omitempty"` // the present problem
	Note     string `json:"note,omitempty"`  // why the lease is not renewed yet, while time is left
	// Stateless is set if the pod gets its addresses from router advertisements, and only DNS settings (Information) by
	// DHCPv6.
	Stateless   bool         `json:"stateless,omitempty"`
	Information *NameService `json:"information,omitempty"`
}

// NameService holds the DNS settings that DHCPv6 gives to a pod without a DHCPv6 lease.
type NameService struct {
	DNS    []netip.Addr `json:"dns,omitempty"`
	Search []string     `json:"search,omitempty"`
	Until  time.Time    `json:"until"` // the time to request them again
}

// SixOf returns the DHCPv6 identity for a DHCPv4 client. The DUID contains a 16-byte hash of the client identifier. If
// the client has none, or one made from its MAC, the DUID contains the MAC.
func SixOf(c *Client) *Six {
	s := &Six{IAID: 1}
	const ethernet, byLinkLayer = 1, 3
	if len(c.ClientID) == 0 || c.ClientID[0] == ethernet {
		s.DUID = append(dhcpc.Hex{0, byLinkLayer, 0, ethernet}, c.MAC...)
		return s
	}
	sum := sha256.Sum256(append([]byte("tombolo duid "), c.ClientID...))
	s.DUID = dhcp6.DUID([16]byte(sum[:16]))
	return s
}

// Leased6 returns the pod's DHCPv6 address with a prefix length of 128, or the zero Prefix if the pod has none.
func (r *Record) Leased6() netip.Prefix {
	if r.Six == nil || r.Six.Lease == nil {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(r.Six.Lease.Address, r.Six.Lease.Address.BitLen())
}

// Releases6 reports whether the DHCPv6 lease must be released when the pod ends. The lease of a sticky client is not
// released, but runs out.
func (r *Record) Releases6(now time.Time) bool {
	return r.Six != nil && len(r.Six.Release) > 0 && r.Six.Lease.Left(now) != 0 && !r.Client.Sticky
}

// check returns an error if the DHCPv6 part is invalid.
func (s *Six) check() error {
	switch {
	case s == nil:
		return nil
	case s.Lease == nil && len(s.Release) > 0:
		return errors.New("it has a RELEASE and no lease")
	case len(s.DUID) < 3 || len(s.DUID) > 130 || s.Address.IsValid() && !s.Address.Is6():
		return fmt.Errorf("DUID %s, address %s", s.DUID, s.Address)
	case s.Lease != nil:
		return s.Lease.Validate()
	}

	return nil
}

// Config returns the configuration of the DHCPv6 client. hostName is the name that it sends to servers.
func (s *Six) Config(hostName string) *dhcp6.Config {
	return &dhcp6.Config{DUID: s.DUID, IAID: s.IAID, Address: s.Address, HostName: hostName, RapidCommit: true,
		DetectConflicts: true}
}
