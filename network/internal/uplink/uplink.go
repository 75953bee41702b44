package uplink

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/route"
)

// ErrRefused means that a NIC cannot be taken over as it is. Nothing was changed. The text of the error has advice.
var ErrRefused = errors.New("it cannot be taken over as it is")

// Uplink names a NIC, and the bridge that gets the NIC as a port.
type Uplink struct {
	// NIC is the interface that becomes a port. It must be an Ethernet device that is up.
	NIC string
	// Bridge is the name of the new bridge. Take creates it with the NIC's MAC and MTU.
	Bridge string
	// Alias is the alias of a new bridge: see bridge.Bridge.
	Alias string
}

func (u *Uplink) validate() error {
	switch {
	case !ident.IsLinkName(u.NIC):
		return fmt.Errorf("take over a NIC: %w: its name is %q", tombolo.ErrInvalid, u.NIC)
	case !ident.IsLinkName(u.Bridge) || u.Bridge == u.NIC:
		return fmt.Errorf("take over %s: %w: the bridge's name is %q", u.NIC, tombolo.ErrInvalid, u.Bridge)
	}
	return nil
}

// Conn works on the NICs of the calling thread's network namespace. For one NIC or bridge, only one caller in all
// processes may make changes at a time. The caller must ensure this with a lock.
type Conn struct {
	nl     *nl.Conn
	bridge *bridge.Conn
}

// On returns a Conn that uses an open socket of the namespace. The socket's owner still has to close it.
func On(s tombolo.Socket) *Conn {
	return &Conn{nl: nl.Of(s), bridge: bridge.On(s, nil)}
}

// recordVersion is the version of the records that we write.
const recordVersion = 1

// State is the progress of a takeover.
type State string

// The states of a takeover.
const (
	Taking    State = "taking"    // moving the NIC's addresses and routes to the bridge
	Taken     State = "taken"     // all addresses and routes are on the bridge
	Restoring State = "restoring" // moving back to the NIC
)

// Record is the content of the journal: the request, its progress, and the state before the takeover. Each step is
// planned from the record and the kernel's present state, so that it may be repeated.
type Record struct {
	Uplink
	State   State `json:"state"`
	Version int   `json:"version"`
	// Before is the state before the takeover.
	Before snapshot `json:"before"`
}

// Journal stores the record of one takeover, so that it survives a crash of the process. Save must replace the previous
// record atomically.
type Journal interface {
	Save(record []byte) error
	Remove() error
}

// ParseRecord parses the content of a Journal.
func ParseRecord(b []byte) (*Record, error) {
	var r Record
	err := json.Unmarshal(b, &r)
	if err == nil {
		err = r.validate()
	}
	if err != nil {
		return nil, fmt.Errorf("read the record of a takeover: %w", err)
	}
	return &r, nil
}

func (r *Record) validate() error {
	switch {
	case r.Version != recordVersion:
		return fmt.Errorf("%w: version %d, where this program knows %d", tombolo.ErrInvalid, r.Version, recordVersion)
	case r.Uplink.validate() != nil:
	case r.State == Taking, r.State == Taken, r.State == Restoring:
		return nil
	}
	return fmt.Errorf("%w: NIC %q, bridge %q, state %q", tombolo.ErrInvalid, r.NIC, r.Bridge, r.State)
}

func (r *Record) save(j Journal) error {
	b, err := json.Marshal(r)
	if err == nil {
		err = j.Save(b)
	}
	if err != nil {
		return fmt.Errorf("save the journal: %w", err)
	}
	return nil
}

// Take makes the NIC a port of the bridge, moves its addresses and routes there, and copies its neighbours, by the
// steps of Plan. If a step fails, or ctx ends, Take undoes all steps and removes the journal.
//
// If Take refuses the NIC before the first step, the error matches ErrRefused. If Take returns a record together with
// an error, the caller must call Restore to complete the undo.
func (c *Conn) Take(ctx context.Context, u Uplink, j Journal) (*Record, error) {
	if err := u.validate(); err != nil {
		return nil, err
	}

	s, err := c.snapshot(ctx, u.NIC, u.Bridge)
	if err != nil {
		return nil, fmt.Errorf("take over %s: %w", u.NIC, err)
	}

	if _, err := plan(s, u); err != nil {
		return nil, err
	}

	rec := &Record{Uplink: u, State: Taking, Version: recordVersion, Before: *s}
	if err = c.take(ctx, rec, j); err == nil {
		return rec, nil
	}

	err = fmt.Errorf("take over %s: %w", u.NIC, err)
	if undone := c.Restore(context.WithoutCancel(ctx), rec, j); undone != nil {
		return rec, errors.Join(err, fmt.Errorf("undo it: %w", undone))
	}

	return nil, err
}

// take runs the steps of a takeover. It saves the record in the journal before each step and after the last one.
func (c *Conn) take(ctx context.Context, rec *Record, j Journal) error {
	for _, st := range takeSteps(&rec.Uplink, &rec.Before.NIC) {
		if err := errors.Join(ctx.Err(), rec.save(j)); err != nil {
			return err
		}

		if err := c.step(ctx, rec, &st, moveToBridge); err != nil {
			return err
		}
	}

	rec.State = Taken
	return rec.save(j)
}

// step runs one step: its requests, which it plans by the present state in up to st.rounds rounds, and then its other
// work.
func (c *Conn) step(ctx context.Context, rec *Record, st *step, planned func(*snapshot, *Record) *move) error {
	var m *move
	var last error
	for range max(st.rounds, 1) {
		s, err := c.snapshot(ctx, rec.NIC, rec.Bridge)
		if err != nil {
			return fmt.Errorf("step %s: %w", st.name, err)
		}

		m = planned(s, rec)
		if st.requests == nil {
			break
		}

		requests := st.requests(m)
		if last = c.apply(ctx, requests); len(requests) == 0 {
			break
		}
	}

	if last == nil && st.work != nil {
		last = st.work(ctx, c, rec, m)
	}

	if last != nil {
		return fmt.Errorf("step %s: %w", st.name, last)
	}
	return nil
}

// makeBridge creates the bridge, or corrects it if it is down or its MAC is not the NIC's. It does not compare the
// MTU. It leaves a right bridge alone, since writing the MAC flushes the bridge's neighbours. In any case it copies
// the NIC's kernel parameters, and sets loose source checks.
func makeBridge(ctx context.Context, c *Conn, rec *Record, _ *move) error {
	nic := &rec.Before.NIC
	l, err := c.bridge.Link(ctx, rec.Bridge)
	if err != nil || l.Kind != "bridge" || !l.Up || !bytes.Equal(l.MAC, nic.MAC) {
		_, err = c.bridge.Ensure(ctx, bridge.Bridge{Name: rec.Bridge, Alias: rec.Alias, NoIPv6: true, MAC: nic.MAC,
			MTU: nic.MTU})
	}

	if err != nil {
		return err
	}
	return errors.Join(copySettings(rec.NIC, rec.Bridge), setSourceChecks(rec.Bridge, ""))
}

// waitUntilLocal waits until a link receives packets to its new IPv6 addresses. After a request has added an address, a
// worker of the kernel joins the address's neighbour discovery group and adds its local route. Before that, packets
// would be lost once the other link no longer has the address.
func waitUntilLocal(ctx context.Context, c *Conn, _ *Record, m *move) error {
	if m.from.Index == noLink {
		return nil
	}

	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	usable, err := addr.Listen(nil)
	if err != nil {
		return err
	}

	defer usable.Close()
	var added []netip.Addr
	for _, a := range m.addresses() {
		added = append(added, a.Prefix.Addr())
	}
	return usable.Wait(ctx, c.bridge.Addresses(), m.to.Index, added...)
}

// Restore moves the bridge's addresses and routes to the NIC, removes the NIC from the bridge, and removes the journal.
// It deletes the bridge unless other ports are on it. It continues after most errors. If an address or a route cannot
// move, it stops, so that the host stays reachable on the bridge. After an error the journal stays, and the caller may
// call Restore again. If the NIC no longer exists, Restore only deletes the bridge and removes the journal. After a
// crash, Restore undoes an interrupted takeover, or completes an interrupted restoration.
func (c *Conn) Restore(ctx context.Context, before *Record, j Journal) error {
	n := *before
	rec := &n
	rec.State = Restoring
	s, err := c.snapshot(ctx, rec.NIC, rec.Bridge)
	if isGone(err) {
		err = c.backWithoutNIC(ctx, rec)
	} else if err == nil {
		err = c.restore(ctx, rec, j, s.Bridge != nil)
	}

	if err != nil {
		return fmt.Errorf("give back %s: %w", rec.NIC, err)
	}

	if err := j.Remove(); err != nil {
		return fmt.Errorf("remove the journal: %w", err)
	}

	return nil
}

// restore moves addresses and routes from the bridge back to the NIC, by the steps of restoreSteps. If an address or a
// route cannot move, it stops, so that the rest stays reachable on the bridge. hasBridge is false if the bridge was not
// created yet, or another program deleted it.
func (c *Conn) restore(ctx context.Context, rec *Record, j Journal, hasBridge bool) error {
	var errs []error
	for _, st := range restoreSteps() {
		if err := rec.save(j); err != nil {
			errs = append(errs, err) // go on, so that the NIC is not left halfway
		}

		err := c.step(ctx, rec, &st, moveBack)
		if err == nil {
			continue
		}

		errs = append(errs, err)
		if st.rounds > 0 && hasBridge {
			// The kernel refused some route, so move the other routes back to the bridge. While the NIC is a port,
			// routes through the NIC work only as long as the NIC's neighbours are known.
			errs = append(errs, c.step(ctx, rec, &st, moveToBridge))
		}

		if st.rounds > 0 || st.name == "addresses" && hasBridge || ctx.Err() != nil {
			break // stop here: the rest stays reachable on the bridge
		}
	}

	return errors.Join(errs...)
}

// backWithoutNIC deletes the bridge of a NIC that was unplugged, unless the bridge has ports. Nothing can move back
// to that NIC.
func (c *Conn) backWithoutNIC(ctx context.Context, rec *Record) error {
	l, err := c.bridge.Link(ctx, rec.Bridge)
	if err == nil {
		var ports []bridge.Link
		if ports, err = c.bridge.Ports(ctx, l.Index); err == nil && len(ports) == 0 {
			err = c.bridge.Remove(ctx, rec.Bridge)
		}
	}

	return nl.PassAbsent(err)
}

// snapshot is the state of a NIC and its bridge at one moment, as far as planning needs it. It is stored as JSON.
type snapshot struct {
	NIC link.Info `json:"nic"`
	// Wireless is true if the NIC is a wireless device.
	Wireless bool `json:"wireless,omitempty"`
	// Bridge is nil if no link has the bridge's name.
	Bridge *link.Info `json:"bridge,omitempty"`
	// Links are the links on top of the NIC, the link that has the NIC as a port, and other ports of the bridge.
	Links []link.Info `json:"links,omitempty"`
	// Addresses are the addresses of the NIC and the bridge, in the kernel's order.
	Addresses []addr.Address `json:"addresses,omitempty"`
	// Routes are the routes of all tables through the NIC or the bridge, in the kernel's order. They lack the routes
	// that need not move (isKernelsOwn).
	Routes []route.Route `json:"routes,omitempty"`
	// Behind are IPv4 routes through other links in the same place as a route in Routes (see place). Now the kernel
	// prefers the route in Routes. After the move it would prefer the route in Behind.
	Behind []route.Route `json:"behind,omitempty"`
	// Neighbours are the neighbours on the NIC and the bridge, without multicast addresses.
	Neighbours []routing.NeighbourEntry `json:"neighbours,omitempty"`
	// Rules are the policy routing rules that name the NIC. Such a rule is a reason to refuse the takeover.
	Rules []routing.Rule `json:"rules,omitempty"`
}

// snapshot reads the present state of a NIC and a bridge. The bridge need not exist.
func (c *Conn) snapshot(ctx context.Context, nic, bridgeName string) (*snapshot, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}

	s := &snapshot{}
	if err := c.lookLinks(s, nic, bridgeName); err != nil {
		return nil, err
	}

	addresses, err := c.bridge.Addresses().List(ctx, addr.Filter{})
	s.Addresses = slices.DeleteFunc(addresses, func(a addr.Address) bool { return !s.owns(a.Link) })
	neighbours, neighboursErr := routing.Neighbours(c.nl)
	s.Neighbours = slices.DeleteFunc(neighbours,
		func(n routing.NeighbourEntry) bool { return !s.owns(n.Link) || n.Addr.IsMulticast() })
	rules, rulesErr := routing.Rules(c.nl)
	s.Rules = slices.DeleteFunc(rules, func(r routing.Rule) bool { return r.IIF != nic && r.OIF != nic })
	if err := errors.Join(err, neighboursErr, rulesErr, c.lookRoutes(ctx, s)); err != nil {
		return nil, fmt.Errorf("look at %s: %w", nic, err)
	}

	return s, nil
}

// lookLinks finds the NIC, the bridge, and the links that depend on them.
func (c *Conn) lookLinks(s *snapshot, nic, bridgeName string) error {
	var links []link.Info
	err := link.List(c.nl, "list links", "", 0, func(l *link.Info) {
		one := link.Info{
			Index: l.Index, Name: l.Name, Kind: l.Kind, Type: l.Type, MAC: l.MAC, MTU: l.MTU, Flags: l.Flags,
			Master: l.Master, PortOf: l.PortOf, Lower: l.Lower,
		}
		if l.Elsewhere || l.Kind == "veth" {
			one.Lower = 0 // an index of another namespace, or the other end
		}

		switch links = append(links, one); l.Name {
		case nic:
			s.NIC = one
		case bridgeName:
			s.Bridge = &one
		}
	})
	if err != nil {
		return err
	}

	if s.NIC.Index == 0 {
		return &tombolo.OpError{Op: "find link", Object: nic, Err: fs.ErrNotExist}
	}

	for _, l := range links {
		isPort := s.Bridge != nil && l.Master == s.Bridge.Index && l.Index != s.NIC.Index
		if isPort || l.Lower == s.NIC.Index || l.Index == s.NIC.Master {
			s.Links = append(s.Links, l)
		}
	}

	// A NIC with the entry phy80211 is a wireless device. sysfs shows the links of the namespace in whose context it
	// was mounted, so in another namespace Wireless may be false.
	_, err = os.Stat("/sys/class/net/" + nic + "/phy80211")
	s.Wireless = err == nil
	return nil
}

// owns reports whether a link is the NIC or the bridge.
func (s *snapshot) owns(index int) bool {
	return index == s.NIC.Index || s.Bridge != nil && index == s.Bridge.Index
}

func (c *Conn) lookRoutes(ctx context.Context, s *snapshot) error {
	all, err := c.bridge.Routes().List(ctx, route.Filter{})
	places := map[place]bool{}
	for _, r := range all {
		switch {
		case isKernelsOwn(&r):
		case usesLink(&r, s.NIC.Index), s.Bridge != nil && usesLink(&r, s.Bridge.Index):
			s.Routes = append(s.Routes, r)
			places[placeKey(&r)] = true
		case r.Family == unix.AF_INET && places[placeKey(&r)]:
			s.Behind = append(s.Behind, r)
		}
	}

	return err
}

// address returns the link's entry for an address, or nil if the link does not have the address.
func (s *snapshot) address(index int, a addr.Address) *addr.Address {
	for i := range s.Addresses {
		if have := &s.Addresses[i]; have.Link == index && have.Prefix == a.Prefix && have.Peer == a.Peer {
			return have
		}
	}
	return nil
}

// refuse returns an error with all reasons why the NIC cannot be taken over, each with advice.
func (s *snapshot) refuse(u *Uplink) error {
	var errs []error
	no := func(is bool, format string, args ...any) {
		if is {
			errs = append(errs, fmt.Errorf("%w: %s", ErrRefused, fmt.Sprintf(format, args...)))
		}
	}
	s.refuseNIC(no)
	no(s.Bridge != nil && s.NIC.Master == 0,
		"%s is there already; have your system make %s a port of it, with the host's addresses on %s, or delete it "+
			"(ip link delete %s), or name another bridge", u.Bridge, u.NIC, u.Bridge, u.Bridge)
	s.refuseManaged(no, u)
	s.refuseAbove(no)
	s.refuseRoutes(no)
	return errors.Join(errs...)
}

type refusal func(is bool, format string, args ...any)

// refuseNIC adds the reasons against the takeover that lie in the NIC itself, such as its kind or a missing carrier.
func (s *snapshot) refuseNIC(no refusal) {
	nic := &s.NIC
	no(nic.Type != unix.ARPHRD_ETHER,
		"%s is not Ethernet (its type is %d), and a bridge takes nothing else; name the NIC that leads to the LAN",
		nic.Name, nic.Type)
	no(s.Wireless,
		"%s is a Wi-Fi interface, and access points drop frames from other MACs; use a wired NIC",
		nic.Name)
	no(nic.Kind == "bridge", "%s is a bridge itself; name one of its ports, or put pods on it as it is", nic.Name)
	no(IsChild(nic.Kind), "%s is of kind %s, which cannot carry other MACs; name the NIC that it rests on", nic.Name,
		nic.Kind)

	masterName := fmt.Sprintf("link %d", nic.Master)
	for _, l := range s.Links {
		if l.Index == nic.Master {
			masterName = l.Name
		}
	}

	no(nic.PortOf == "bridge", "%s is a port of bridge %s already, which networks use as it is: name that one, and "+
		"nothing is taken over", nic.Name, masterName)
	no(nic.Master != 0 && nic.PortOf != "bridge", "%s is a port of %s (%s) already; name %[2]s as the NIC", nic.Name,
		masterName, nic.PortOf)
	no(!nic.Up(), "%s is down, and the program that manages it may want it so; set it up with `ip link set %[1]s up`",
		nic.Name)
	no(nic.Up() && nic.Flags&unix.IFF_LOWER_UP == 0,
		"%s has no carrier, so nothing could be tried; check its cable", nic.Name)
}

// IsChild reports whether kind is macvlan, macvtap, ipvlan or ipvtap. The NIC below such a link cannot be a bridge's
// port.
func IsChild(kind string) bool {
	return slices.Contains([]string{"macvlan", "macvtap", "ipvlan", "ipvtap"}, kind)
}

// refuseManaged adds a reason against the takeover if a DHCP client or router advertisements configured the NIC. It
// finds this by addresses with a limited lifetime, and by the protocol or lifetime of a default route. As a port of a
// bridge the NIC no longer receives DHCP and router advertisements, so the host would lose these settings.
func (s *snapshot) refuseManaged(no refusal, u *Uplink) {
	var lifetimes []string
	for _, a := range s.Addresses {
		if a.Link == s.NIC.Index && a.Valid != nil && !a.Prefix.Addr().IsLinkLocalUnicast() {
			lifetimes = append(lifetimes, fmt.Sprintf("the address %s for a limited time", a.Prefix))
		}
	}

	for _, r := range s.Routes {
		learnt := r.Protocol == unix.RTPROT_DHCP || r.Protocol == unix.RTPROT_RA || r.Expires != nil
		if usesLink(&r, s.NIC.Index) && r.Dst.Bits() == 0 && learnt {
			lifetimes = append(lifetimes, fmt.Sprintf("its default route by %s", r.Gateway))
		}
	}

	no(len(lifetimes) > 0, "a DHCP client or router advertisements gave %s %s, and no program would renew that on %s; "+
		"mode \"lan\" shares %s without taking it, and its manager goes on: do not take it, and name it as the "+
		"network's uplink",
		u.NIC, strings.Join(lifetimes, ", "), u.Bridge, u.NIC)
}

// refuseStale adds a reason against the takeover for each route of the NIC whose gateway is no longer in a network of
// the NIC. The kernel would not accept such a route again. refuseStale skips routes with several next hops.
func (s *snapshot) refuseStale(no refusal) {
	nic := s.NIC.Index
	for _, r := range s.Routes {
		if r.Link != nic || !r.Gateway.IsValid() || r.OnLink || r.Gateway.IsLinkLocalUnicast() {
			continue
		}

		near := slices.ContainsFunc(s.Addresses, func(a addr.Address) bool {
			return a.Link == nic && (a.Peer == r.Gateway || !a.Peer.IsValid() && a.Prefix.Contains(r.Gateway))
		}) || slices.ContainsFunc(s.Routes, func(to route.Route) bool {
			return to.Link == nic && !to.Gateway.IsValid() && to.Dst.Bits() > 0 && to.Dst.Contains(r.Gateway)
		})
		family, to := "", r.Dst.String()
		if r.Gateway.Is6() {
			family = "-6 "
		}
		if r.Dst.Bits() == 0 {
			to = "default"
		}
		no(!near, "the route to %s goes by %s, which is in no network of %s any more, so the kernel would not take "+
			"it on the bridge; delete it (ip %sroute delete %s via %[2]s dev %[3]s)", describe(&r), r.Gateway,
			s.NIC.Name, family, to)
	}
}

// refuseAbove adds a reason against the takeover for each link on top of the NIC, except VLANs, which go on working.
// Some links receive at the point where a bridge would, and the kernel permits only one receiver. Tunnels send through
// the NIC alone, and would be cut off.
func (s *snapshot) refuseAbove(no refusal) {
	for _, l := range s.Links {
		if l.Lower != s.NIC.Index || l.Kind == "vlan" {
			continue
		}
		receives := IsChild(l.Kind) || l.Kind == "macsec"
		no(receives, "%s, of kind %s, rests on %s, which then cannot be a port; delete it, and create it on the "+
			"bridge afterwards", l.Name, l.Kind, s.NIC.Name)
		no(!receives, "the tunnel %s, of kind %s, sends by %s alone and would be cut off; make it again without a "+
			"link, or delete it", l.Name, l.Kind, s.NIC.Name)
	}
}

// refuseRoutes adds a reason against the takeover for each route or rule that the takeover would break. It also adds
// one for each route of another link that would then come first.
func (s *snapshot) refuseRoutes(no refusal) {
	for _, r := range s.Routes {
		no(r.NexthopID != 0 && usesLink(&r, s.NIC.Index),
			"the route to %s goes by nexthop object %d, which stays on %s and stops working there; name its "+
				"gateway instead",
			describe(&r), r.NexthopID, s.NIC.Name)
	}

	for _, r := range s.Rules {
		no(true, "the rule %q names %s, which packets no longer come in by; delete it, and add it for the bridge "+
			"afterwards", r, s.NIC.Name)
	}

	s.refuseStale(no)
	for _, r := range s.Behind {
		no(true, "another link has a route to %s too, with the same metric, and would come first; give one of the "+
			"two another metric", describe(&r))
	}
}

func describe(r *route.Route) string {
	if r.Dst.Bits() == 0 {
		return "everywhere"
	}
	return r.Dst.String()
}

// copySettings copies the kernel parameters (conf and neigh) of a NIC to a bridge. It leaves out parameters that cannot
// be read, or that a bridge does not have. It also leaves out a fixed list, such as rp_filter and arp_filter, which
// setSourceChecks sets.
func copySettings(nic, bridgeName string) error {
	const root = "/proc/sys/"
	others := []string{"base_reachable_time", "retrans_time", "unres_qlen", // others show these values in a better unit
		"mc_forwarding", "stable_secret", "addr_gen_mode", "mtu", "rp_filter", "arp_filter"}
	paths, _ := filepath.Glob(root + "net/ipv?/*/" + nic + "/*")
	var errs []error
	for _, path := range paths {
		from := strings.TrimPrefix(path, root)
		value, err := sysctl.Read(from)
		if err != nil || slices.Contains(others, filepath.Base(path)) {
			continue
		}
		to := strings.Replace(from, "/"+nic+"/", "/"+bridgeName+"/", 1)
		if _, err := sysctl.Ensure(to, value); !isGone(err) {
			errs = append(errs, err)
		}
	}

	return errors.Join(errs...)
}

// setSourceChecks gives a bridge the NIC's parameters rp_filter and arp_filter. Without a NIC it sets loose ones. These
// are for the time when packets come in by the bridge and their replies leave by the NIC, or the reverse. A strict
// source check would then drop these packets, and arp_filter would leave ARP requests unanswered.
func setSourceChecks(bridgeName, nic string) (err error) {
	for name, value := range map[string]string{"rp_filter": "2", "arp_filter": "0"} {
		if nic != "" {
			value, err = sysctl.Read(sysctl.Link("ipv4", nic, name))
		}
		if err == nil {
			_, err = sysctl.Ensure(sysctl.Link("ipv4", bridgeName, name), value)
		}
		if err != nil && !isGone(err) {
			return err
		}
	}

	return nil
}
