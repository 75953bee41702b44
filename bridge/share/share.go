package share

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/diff"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// Conn connects bridges to the LANs of NICs that the host keeps using, in one network namespace. It uses the socket of
// another connection. Several goroutines may call its methods, but not for the same bridge at the same time.
type Conn struct {
	nl    *nl.Conn
	links *bridge.Conn
}

// On returns a Conn that uses an open socket, such as bridge.Conn's Socket. The socket's owner still has to close it.
func On(s tombolo.Socket) *Conn { return &Conn{nl.Of(s), bridge.On(s, nil)} }

// Share describes a NIC of the host and the bridge to connect to its LAN.
type Share struct {
	// NIC is the name of an Ethernet link of the host, such as hardware, a bond, a team, a VLAN or a veth.
	NIC string
	// Bridge is the name of an existing bridge. Ensure disables ARP on it, since the host has no address there.
	Bridge string
	// Alias marks the owner of the veth pair, in at most 200 bytes.
	Alias string
	// Promiscuous states that the NIC was promiscuous before the first Ensure. If set, Remove keeps the NIC
	// promiscuous.
	Promiscuous bool
}

// ErrUnfit is wrapped by errors about a NIC that cannot be shared. It is also wrapped if Share.Bridge is not a bridge,
// or if a link of another program has the name of our veth pair.
var ErrUnfit = errors.New("the link cannot be shared")

const (
	aliasMax = 200

	filterHandle = 1

	reversePathFilter = 8 // IPV4_DEVCONF_RP_FILTER of include/uapi/linux/ip.h
	reversePathLoose  = 2
)

// Pair returns the names of the two ends of a bridge's veth pair. port is on the bridge, and the BPF program runs
// there. outer is the other end.
func Pair(bridgeName string) (outer, port string) {
	return bridge.HostName(bridgeName, "share", "outer"), bridge.HostName(bridgeName, "share", "port")
}

// installation holds the kernel's state of a Share.
type installation struct {
	nic, bridge, outer, port *link.Info // outer and port are nil if they do not exist
	program                  string     // programName of the port's filter; empty if the filter does not exist
}

// Ensure creates the missing parts of a Share, corrects differences, and reports whether it changed anything. If the
// NIC or the bridge does not exist, the error matches fs.ErrNotExist.
func (c *Conn) Ensure(ctx context.Context, s Share) (changed bool, _ error) {
	have, err := c.look(ctx, s)
	if err != nil {
		return false, err
	}

	if len(s.differences(have)) == 0 {
		return false, nil
	}

	if have.outer == nil {
		if have, err = c.makePair(ctx, s, have); err != nil {
			return false, err
		}
	}

	// Attach the program before the port is up, so that Ready does not need to look for it.
	if have.program != programName(have.nic.Index, have.nic.MAC) {
		if err := c.setProgram(ctx, have); err != nil {
			return true, err
		}
	}

	if err := c.setPair(ctx, s, have); err != nil {
		return true, err
	}

	return true, c.setPromiscuous(ctx, have.nic)
}

// Find returns the NIC of the Share, even if the NIC was renamed after Ensure. If it does not exist, the error
// matches fs.ErrNotExist.
func (c *Conn) Find(ctx context.Context, s Share) (*bridge.Link, error) {
	if err := s.validate(); err != nil {
		return nil, err
	}

	nic, err := c.links.Link(ctx, s.NIC)
	if !errors.Is(err, fs.ErrNotExist) {
		return nic, err
	}

	outer, _ := Pair(s.Bridge)
	pair, pairErr := c.links.Link(ctx, outer)
	if pairErr != nil {
		return nil, errors.Join(err, pairErr)
	}

	var index int
	if _, scanErr := fmt.Sscanf(strings.TrimPrefix(pair.Alias, s.Alias), " share %d ", &index); scanErr != nil {
		return nil, err
	}

	if nic, renamedErr := c.links.LinkByIndex(ctx, index); renamedErr == nil {
		return nic, nil
	}

	return nil, err
}

// Ready returns the index of the pair's outer end if the Share needs no Ensure, and 0 if it does. nic is the result of
// Find. Ready sends two requests in one round trip. Unlike Check, it ignores the BPF program, the flag IFF_NOARP and
// the index of the port's bridge.
func (c *Conn) Ready(ctx context.Context, s Share, nic *bridge.Link) (outer int, _ error) {
	if err := s.validate(); err != nil {
		return 0, err
	}

	var b nl.Batch
	var out, inner link.Info
	outerName, portName := Pair(s.Bridge)
	only := []uint16{unix.IFLA_IFALIAS, unix.IFLA_MTU, unix.IFLA_GROUP, unix.IFLA_LINKINFO}
	link.Get(&b, outerName, 0, &out, only...)
	link.Get(&b, portName, 0, &inner, only...)
	if err := c.nl.Do(ctx, &b); errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}

	const works = unix.IFF_UP | unix.IFF_LOWER_UP
	noted := s.Alias + " " + programName(nic.Index, nic.MAC)
	if nic.Promiscuous && out.Flags&inner.Flags&works == works && out.MTU == nic.MTU && inner.MTU == nic.MTU &&
		inner.PortOf == "bridge" && inner.Group == ident.ShareGroup && out.Alias == noted {
		return out.Index, nil
	}

	return 0, nil
}

// Probe returns an error if the NIC cannot be shared, or if the kernel refuses to load the BPF program. It changes
// nothing.
func (c *Conn) Probe(ctx context.Context, nic string) error {
	l, err := c.find(ctx, nic)
	if err != nil {
		return err
	}

	if err := refuseNIC(l); err != nil {
		return err
	}

	fd, err := load(program(l.Index, l.MAC))
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// Check compares a Share with the kernel's state, and returns the differences. A renamed NIC is no difference: see
// Find.
func (c *Conn) Check(ctx context.Context, s Share) ([]tombolo.Difference, error) {
	have, err := c.look(ctx, s)
	if err != nil {
		return nil, err
	}
	return s.differences(have), nil
}

// Remove deletes the veth pair and enables ARP on the bridge again. It ends the NIC's promiscuous mode, unless
// Share.Promiscuous is set, even if the pair is already gone. It does not delete the bridge. It is no error if the
// pair, the NIC or the bridge does not exist. If the pair belongs to another owner, Remove changes nothing, and the
// error matches ErrUnfit.
func (c *Conn) Remove(ctx context.Context, s Share) error {
	if err := s.validate(); err != nil {
		return err
	}

	outer, _ := Pair(s.Bridge)
	pair, findErr := c.find(ctx, outer)
	if findErr == nil {
		findErr = s.checkOwner(pair)
	}

	if err := nl.PassAbsent(findErr); err != nil {
		return err
	}

	if err := nl.PassAbsent(c.restore(ctx, s)); err != nil || findErr != nil {
		return err
	}

	return link.Delete(ctx, c.nl, pair.Index, pair.Name)
}

// restore ends the NIC's promiscuous mode, unless Share.Promiscuous is set, and enables ARP on the bridge.
func (c *Conn) restore(ctx context.Context, s Share) error {
	nic, err := c.Find(ctx, s)
	if err == nil && nic.Promiscuous && !s.Promiscuous {
		err = link.Request{Index: nic.Index, Change: unix.IFF_PROMISC}.Apply(ctx, c.nl, "set link", nic.Name)
	}

	if err := nl.PassAbsent(err); err != nil {
		return err
	}

	l, err := c.find(ctx, s.Bridge)
	if err != nil || l.Kind != "bridge" {
		return err
	}

	return link.Request{Index: l.Index, Change: unix.IFF_NOARP}.Apply(ctx, c.nl, "set link", l.Name)
}

func (s Share) validate() error {
	if !ident.IsLinkName(s.NIC) || !ident.IsLinkName(s.Bridge) {
		return fmt.Errorf("%w: share %q by the bridge %q: not names of links"+ident.LinkNameForm,
			tombolo.ErrInvalid, s.NIC, s.Bridge)
	}
	if len(s.Alias) > aliasMax {
		return fmt.Errorf("%w: an alias of %d bytes, where %d is the most", tombolo.ErrInvalid, len(s.Alias), aliasMax)
	}
	return nil
}

// look reads the kernel's state of a Share. It returns an error if the NIC cannot be shared, or if the veth pair
// belongs to another owner.
func (c *Conn) look(ctx context.Context, s Share) (*installation, error) {
	if err := s.validate(); err != nil {
		return nil, err
	}

	var have installation
	nic, err := c.Find(ctx, s)
	if err != nil {
		return nil, err
	}

	if have.nic, err = c.find(ctx, nic.Name); err != nil {
		return nil, err
	}

	if have.bridge, err = c.find(ctx, s.Bridge); err != nil {
		return nil, err
	}

	switch {
	case have.bridge.Kind != "bridge":
		err = unfit(have.nic, "%s is no bridge", s.Bridge)
	case have.nic.Index == have.bridge.Index:
		err = unfit(have.nic, "it is the bridge itself")
	default:
		err = refuseNIC(have.nic)
	}

	if err != nil {
		return nil, err
	}

	outer, port := Pair(s.Bridge)
	if have.outer, err = c.find(ctx, outer); errors.Is(err, fs.ErrNotExist) {
		return &have, nil
	} else if err != nil {
		return nil, err
	}

	if err := s.checkOwner(have.outer); err != nil {
		return nil, err
	}

	if have.port, err = c.find(ctx, port); err != nil {
		return nil, err
	}

	filters, _, err := tc.Device{Name: port, Index: have.port.Index}.Filters(ctx, c.nl, tc.Egress)
	for _, f := range filters {
		if f.Kind == "bpf" && f.Direct && f.Handle == filterHandle {
			have.program = f.Name
		}
	}

	return &have, err
}

// find returns the link with the given name. If it does not exist, the error matches fs.ErrNotExist. An alternative
// name is an error.
func (c *Conn) find(ctx context.Context, name string) (*link.Info, error) {
	l, err := link.Find(ctx, c.nl, name, 0)
	if err == nil && l.Name != name {
		err = &tombolo.OpError{Op: "get link", Object: name, Err: link.Alternative(l.Name)}
	}

	if err != nil {
		return nil, err
	}

	return l, nil
}

func unfit(nic *link.Info, format string, args ...any) error {
	return &tombolo.OpError{Op: "share", Object: nic.Name,
		Err: fmt.Errorf("%w: %s", ErrUnfit, fmt.Sprintf(format, args...))}
}

// refuseNIC returns an error if the NIC cannot be shared with any bridge.
func refuseNIC(nic *link.Info) error {
	// A link with the entry phy80211 in /sys is a Wi-Fi interface. The check works only if /sys was mounted in the
	// link's network namespace.
	_, err := os.Stat("/sys/class/net/" + nic.Name + "/phy80211")
	switch {
	case err == nil:
		return unfit(nic, "it is a Wi-Fi interface, and access points drop what other MACs send; use a wired NIC")
	case nic.Type != unix.ARPHRD_ETHER || len(nic.MAC) != 6:
		return unfit(nic, "it is no Ethernet link (its type is %d); name the NIC that leads to the LAN", nic.Type)
	case nic.Kind == "bridge":
		return unfit(nic,
			"it is a bridge, which pods can use as it is: name it as the bridge, and one of its ports as the NIC")
	case slices.Contains([]string{"macvlan", "macvtap", "ipvlan", "ipvtap"}, nic.Kind):
		return unfit(nic, "it is of kind %s, which cannot carry other MACs; name the NIC that it rests on", nic.Kind)
	case nic.Master != 0 && nic.PortOf == "bridge":
		return unfit(nic, "it is the port of a bridge already: use that bridge")
	case nic.Master != 0:
		return unfit(nic, "it is a part of another link (kind %s): share that link", nic.PortOf)
	}

	return nil
}

func (s Share) checkOwner(outer *link.Info) error {
	if outer.Kind == "veth" && strings.HasPrefix(outer.Alias, s.Alias+" share ") {
		return nil
	}
	return &tombolo.OpError{Op: "share", Object: s.NIC, Err: fmt.Errorf(
		"%w: its pair would have the name of %s, which is of kind %q, has the alias %q, and belongs to another program",
		ErrUnfit, outer.Name, outer.Kind, outer.Alias)}
}

// programName returns the name that the kernel stores with the port's filter (TCA_BPF_NAME). It contains the NIC's
// index and MAC, which the BPF program depends on.
func programName(index int, mac net.HardwareAddr) string {
	return "share " + strconv.Itoa(index) + " " + mac.String()
}

// differences compares the state in the kernel with the state that Ensure sets.
func (s Share) differences(have *installation) []tombolo.Difference {
	var list diff.List
	outer, port := Pair(s.Bridge)
	if have.outer == nil {
		list.Add("share of "+s.NIC, "veth pair", outer+" and "+port, "")
		return list
	}

	list.Flag("link "+s.Bridge, "ARP", false, have.bridge.Flags&unix.IFF_NOARP == 0)
	for _, l := range []*link.Info{have.outer, have.port} {
		list.Number("link "+l.Name, "MTU", have.nic.MTU, l.MTU)
		list.Up("link "+l.Name, l.Up())
	}

	list.Flag("link "+outer, "ARP", false, have.outer.Flags&unix.IFF_NOARP == 0)
	list.Number("link "+port, "bridge", have.bridge.Index, have.port.Master)
	list.Number("link "+port, "group", int(ident.ShareGroup), int(have.port.Group))
	list.Add("link "+port, "program", programName(have.nic.Index, have.nic.MAC), have.program)
	list.Add("link "+outer, "alias", s.note(have.nic), have.outer.Alias)
	list.Flag("link "+s.NIC, "promiscuous mode", true, have.nic.Flags&unix.IFF_PROMISC != 0)
	return list
}

// note returns the alias of the outer end. It contains the owner, and the index and MAC of the NIC.
func (s Share) note(nic *link.Info) string { return s.Alias + " " + programName(nic.Index, nic.MAC) }

// makePair creates the veth pair and returns the new state. The pair stays down.
func (c *Conn) makePair(ctx context.Context, s Share, have *installation) (*installation, error) {
	outer, port := Pair(s.Bridge)
	var b nl.Batch
	link.Request{
		Name: outer, MTU: &have.nic.MTU, MAC: ident.RandomMAC(),
		Peer: &link.Request{Name: port, MTU: &have.nic.MTU, MAC: ident.RandomMAC()},
	}.Create(&b, "add link", outer)
	link.Request{Name: outer, Alias: new(s.note(have.nic))}.Set(&b, "set link", outer)
	if err := c.nl.Do(ctx, &b); err != nil {
		return nil, err
	}
	return c.look(ctx, s)
}

// setPair configures both ends of the pair and the bridge. It sets the outer end up last, after the port is on the
// bridge.
func (c *Conn) setPair(ctx context.Context, s Share, have *installation) error {
	set := func(b *nl.Batch, l *link.Info, r link.Request) {
		r.Index = l.Index
		r.Flags |= unix.IFF_UP
		r.Change |= unix.IFF_UP
		r.Set(b, "set link", l.Name)
	}
	loose := []link.Parameter{{ID: reversePathFilter, Value: reversePathLoose}}

	// Let the ends have no link-local addresses, so that they send nothing to the LAN by themselves. Ignore that a
	// kernel without IPv6 rejects the request.
	var b nl.Batch
	for _, l := range []*link.Info{have.outer, have.port} {
		link.Request{Index: l.Index, NoLinkLocal: true}.Set(&b, "set link", l.Name)
	}

	if err := c.nl.Do(ctx, &b); err != nil && !errors.Is(err, unix.EAFNOSUPPORT) {
		return err
	}

	b.Reset()
	set(&b, have.bridge, link.Request{Flags: unix.IFF_NOARP, Change: unix.IFF_NOARP, IPv4: loose})
	port := link.Request{MTU: &have.nic.MTU, Group: new(ident.ShareGroup)}
	if have.port.Master != have.bridge.Index {
		port.Master = &have.bridge.Index
	}

	set(&b, have.port, port)
	alias := s.note(have.nic)
	set(&b, have.outer, link.Request{MTU: &have.nic.MTU, Alias: &alias, Flags: unix.IFF_NOARP, Change: unix.IFF_NOARP})
	return c.nl.Do(ctx, &b)
}

// setProgram attaches the BPF program to the port. It replaces an earlier program atomically.
func (c *Conn) setProgram(ctx context.Context, have *installation) error {
	fd, err := load(program(have.nic.Index, have.nic.MAC))
	if err != nil {
		return err
	}
	defer unix.Close(fd)

	at := tc.Device{Name: have.port.Name, Index: have.port.Index}
	var b nl.Batch
	at.AddClsact(&b)
	if err := c.nl.Do(ctx, &b); err != nil && !errors.Is(err, fs.ErrExist) {
		return tc.Unsupported(err, "sch_ingress")
	}

	b.Reset()
	at.SetObject(&b, filterHandle, fd, programName(have.nic.Index, have.nic.MAC))
	return tc.Unsupported(c.nl.Do(ctx, &b), "cls_bpf")
}

func (c *Conn) setPromiscuous(ctx context.Context, nic *link.Info) error {
	if nic.Flags&unix.IFF_PROMISC != 0 {
		return nil
	}

	r := link.Request{Index: nic.Index, Flags: unix.IFF_PROMISC, Change: unix.IFF_PROMISC}
	return r.Apply(ctx, c.nl, "set link", nic.Name)
}
