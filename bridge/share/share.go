package share

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// Conn shares NICs of one network namespace, over the socket of another Conn. Its methods may be called from several
// goroutines, though not for one bridge at a time.
type Conn struct{ nl *nl.Conn }

// On makes a Conn over an open socket (bridge.Conn's Socket), which stays its owner's.
func On(s tombolo.Socket) *Conn { return &Conn{nl.Of(s)} }

// Share names a NIC and the bridge that it connects to the LAN.
type Share struct {
	// NIC is an Ethernet link of the host: hardware, a bond, a team, a VLAN or a veth.
	NIC string
	// Bridge exists already. It gets no address and answers no ARP.
	Bridge string
	// Alias names the owner of the pair, in at most 200 bytes.
	Alias string
	// Group is the group of links of the port (nft.ShareGroup); 0 is the kernel's default.
	Group uint32
}

// ErrUnfit is the cause of an error about a NIC that cannot be shared.
var ErrUnfit = errors.New("the link cannot be shared")

// ErrForeign is the cause of an error about a link of the pair's name that belongs to another program.
var ErrForeign = errors.New("the link belongs to another owner")

const (
	aliasMax = 200
	// wasPromiscuous ends the alias of the outer end if the NIC was promiscuous before, and is to stay so.
	wasPromiscuous = " promiscuous"

	filterHandle = 1

	reversePathFilter = 8 // IPV4_DEVCONF_RP_FILTER of include/uapi/linux/ip.h
	reversePathLoose  = 2
)

// Pair returns the names of a bridge's veth pair: the outer end, where the program is, and the port on the bridge.
func Pair(bridge string) (outer, port string) {
	return "veth" + ident.Hash(bridge, "share", "outer"), "veth" + ident.Hash(bridge, "share", "port")
}

// found is what the kernel has of a Share.
type found struct {
	nic, bridge, outer, port *link.Link // outer and port are nil if they do not exist
	program                  string     // the name of the program at the outer end
}

// Ensure makes what is missing of a Share, corrects what differs, and reports whether it changed anything. If the NIC
// or the bridge does not exist the error matches fs.ErrNotExist.
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
	if err := c.setPair(ctx, s, have); err != nil {
		return true, err
	}
	if have.program != programName(have.nic) {
		if err := c.setProgram(ctx, have); err != nil {
			return true, err
		}
	}
	return true, c.setPromiscuous(ctx, have.nic, true)
}

// Check compares a Share with the kernel.
func (c *Conn) Check(ctx context.Context, s Share) ([]tombolo.Difference, error) {
	have, err := c.look(ctx, s)
	if err != nil {
		return nil, err
	}
	return s.differences(have), nil
}

// Remove deletes the pair, and the NIC is no longer promiscuous, unless it was so before. The bridge stays. It is no
// error if the pair, the NIC or the bridge does not exist.
func (c *Conn) Remove(ctx context.Context, s Share) error {
	if err := s.validate(); err != nil {
		return err
	}

	var list [2]*link.Link
	outer, _ := Pair(s.Bridge)
	for i, name := range []string{outer, s.NIC} {
		l, err := c.find(ctx, name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		list[i] = l
	}
	pair, nic := list[0], list[1]
	if pair == nil {
		return nil
	}
	if err := s.checkOwner(pair); err != nil {
		return err
	}
	if nic != nil && !strings.HasSuffix(pair.Alias, wasPromiscuous) {
		if err := c.setPromiscuous(ctx, nic, false); err != nil {
			return err
		}
	}

	var b nl.Batch
	link.Request{Index: pair.Index}.Delete(&b, pair.Name)
	if err := tc.Execute(ctx, c.nl, &b); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (s Share) validate() error {
	if !ident.IsLinkName(s.NIC) || !ident.IsLinkName(s.Bridge) {
		return fmt.Errorf("%w: share %q by the bridge %q: these are no names of links", tombolo.ErrInvalid, s.NIC, s.Bridge)
	}
	if len(s.Alias) > aliasMax {
		return fmt.Errorf("%w: an alias of %d bytes, where %d is the most", tombolo.ErrInvalid, len(s.Alias), aliasMax)
	}
	return nil
}

// look reads all parts of a Share. It refuses a NIC that cannot be shared, and a pair of another owner.
func (c *Conn) look(ctx context.Context, s Share) (*found, error) {
	if err := nl.Usable(ctx, c.nl); err != nil {
		return nil, err
	}
	if err := s.validate(); err != nil {
		return nil, err
	}

	var have found
	var err error
	if have.nic, err = c.find(ctx, s.NIC); err != nil {
		return nil, err
	}
	if have.bridge, err = c.find(ctx, s.Bridge); err != nil {
		return nil, err
	}
	if err := refuse(have.nic, have.bridge); err != nil {
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

	filters, _, err := tc.Link{Name: outer, Index: have.outer.Index}.Filters(ctx, c.nl, tc.Ingress)
	for _, f := range filters {
		if f.Kind == "bpf" && f.Direct && f.Handle == filterHandle {
			have.program = f.Name
		}
	}
	return &have, err
}

// find asks for one link. The error matches fs.ErrNotExist if there is none.
func (c *Conn) find(ctx context.Context, name string) (*link.Link, error) {
	var l link.Link
	var b nl.Batch
	link.Get(&b, name, 0, &l)
	if err := tc.Execute(ctx, c.nl, &b); err != nil {
		return nil, err
	}
	return &l, nil
}

// refuse returns an error if the NIC cannot be shared by this bridge.
func refuse(nic, bridge *link.Link) error {
	unfit := func(format string, args ...any) error {
		return &tombolo.OpError{Op: "share", Object: nic.Name, Err: fmt.Errorf("%w: %s", ErrUnfit, fmt.Sprintf(format, args...))}
	}

	// sysfs shows the links of the namespace that it was mounted in.
	_, err := os.Stat("/sys/class/net/" + nic.Name + "/phy80211")
	switch {
	case err == nil:
		return unfit("it is a Wi-Fi interface, and access points drop what other MACs send; use a wired NIC")
	case nic.Type != unix.ARPHRD_ETHER || len(nic.MAC) != 6:
		return unfit("it is no Ethernet link")
	case bridge.Kind != "bridge":
		return unfit("%s is no bridge", bridge.Name)
	case nic.Index == bridge.Index:
		return unfit("it is the bridge itself")
	case nic.Master != 0 && nic.PortOf == "bridge":
		return unfit("it is the port of a bridge already: use that bridge")
	case nic.Master != 0:
		return unfit("it is a part of another link (kind %s): share that link", nic.PortOf)
	}
	return nil
}

func (s Share) checkOwner(outer *link.Link) error {
	if outer.Kind == "veth" && (outer.Alias == s.Alias || outer.Alias == s.Alias+wasPromiscuous) {
		return nil
	}
	return &tombolo.OpError{Op: "share", Object: s.NIC, Err: fmt.Errorf(
		"%w: %s is of kind %q and has the alias %q", ErrForeign, outer.Name, outer.Kind, outer.Alias)}
}

// programName is what the kernel keeps with the program: for which index and MAC it was made.
func programName(nic *link.Link) string {
	return "share " + strconv.Itoa(nic.Index) + " " + nic.MAC.String()
}

// differences compares what the kernel has with what Ensure makes.
func (s Share) differences(have *found) []tombolo.Difference {
	var list []tombolo.Difference
	differs := func(object, what, want, got string) {
		if want != got {
			list = append(list, tombolo.Difference{Object: object, What: what, Want: want, Have: got})
		}
	}
	flag := func(l *link.Link, bit uint32) string { return strconv.FormatBool(l.Flags&bit != 0) }

	outer, port := Pair(s.Bridge)
	if have.outer == nil {
		differs("share of "+s.NIC, "veth pair", outer+" and "+port, "")
		return list
	}
	differs("link "+s.Bridge, "ARP", "false", strconv.FormatBool(have.bridge.Flags&unix.IFF_NOARP == 0))
	for _, l := range []*link.Link{have.outer, have.port} {
		differs("link "+l.Name, "MTU", strconv.Itoa(have.nic.MTU), strconv.Itoa(l.MTU))
		differs("link "+l.Name, "up", "true", flag(l, unix.IFF_UP))
	}
	differs("link "+outer, "ARP", "false", strconv.FormatBool(have.outer.Flags&unix.IFF_NOARP == 0))
	differs("link "+port, "bridge", strconv.Itoa(have.bridge.Index), strconv.Itoa(have.port.Master))
	differs("link "+outer, "program", programName(have.nic), have.program)
	differs("link "+s.NIC, "promiscuous", "true", flag(have.nic, unix.IFF_PROMISC))
	return list
}

// makePair makes the veth pair, down, and notes in its alias whether the NIC was promiscuous.
func (c *Conn) makePair(ctx context.Context, s Share, have *found) (*found, error) {
	alias := s.Alias
	if have.nic.Flags&unix.IFF_PROMISC != 0 {
		alias += wasPromiscuous
	}
	outer, port := Pair(s.Bridge)

	var b nl.Batch
	link.Request{
		Name: outer, MTU: &have.nic.MTU, MAC: ident.RandomMAC(),
		Peer: &link.Request{Name: port, MTU: &have.nic.MTU, MAC: ident.RandomMAC()},
	}.Create(&b, "add link", outer)
	link.Request{Name: outer, Alias: &alias}.Set(&b, "set link", outer)
	if err := tc.Execute(ctx, c.nl, &b); err != nil {
		return nil, err
	}
	return c.look(ctx, s)
}

// setPair sets both ends and the bridge. The outer end is up last, when the port is on the bridge.
func (c *Conn) setPair(ctx context.Context, s Share, have *found) error {
	set := func(b *nl.Batch, l *link.Link, r link.Request) {
		r.Index = l.Index
		r.Flags |= unix.IFF_UP
		r.Change |= unix.IFF_UP
		r.Set(b, "set link", l.Name)
	}
	loose := []link.Parameter{{ID: reversePathFilter, Value: reversePathLoose}}

	// Without link-local addresses the ends neither send nor answer on the LAN. A kernel without IPv6 refuses the request.
	var b nl.Batch
	for _, l := range []*link.Link{have.outer, have.port} {
		link.Request{Index: l.Index, NoLinkLocal: true}.Set(&b, "set link", l.Name)
	}
	if err := tc.Execute(ctx, c.nl, &b); err != nil && !errors.Is(err, unix.EAFNOSUPPORT) {
		return err
	}

	b.Reset()
	set(&b, have.bridge, link.Request{Flags: unix.IFF_NOARP, Change: unix.IFF_NOARP, IPv4: loose})
	port := link.Request{MTU: &have.nic.MTU, Group: &s.Group}
	if have.port.Master != have.bridge.Index {
		port.Master = &have.bridge.Index
	}
	set(&b, have.port, port)
	set(&b, have.outer, link.Request{MTU: &have.nic.MTU, Flags: unix.IFF_NOARP, Change: unix.IFF_NOARP})
	return tc.Execute(ctx, c.nl, &b)
}

// setProgram puts the program for this NIC at the outer end. It replaces an earlier one without a gap.
func (c *Conn) setProgram(ctx context.Context, have *found) error {
	fd, err := load(program(have.nic.Index, have.nic.MAC))
	if err != nil {
		return err
	}
	defer unix.Close(fd)

	at := tc.Link{Name: have.outer.Name, Index: have.outer.Index}
	var b nl.Batch
	at.AddClsact(&b)
	if err := tc.Execute(ctx, c.nl, &b); err != nil && !errors.Is(err, fs.ErrExist) {
		return tc.Unsupported(err, "sch_ingress")
	}
	b.Reset()
	at.SetObject(&b, filterHandle, fd, programName(have.nic))
	return tc.Unsupported(tc.Execute(ctx, c.nl, &b), "cls_bpf")
}

func (c *Conn) setPromiscuous(ctx context.Context, nic *link.Link, on bool) error {
	if on == (nic.Flags&unix.IFF_PROMISC != 0) {
		return nil
	}
	r := link.Request{Index: nic.Index, Change: unix.IFF_PROMISC}
	if on {
		r.Flags = unix.IFF_PROMISC
	}
	var b nl.Batch
	r.Set(&b, "set link", nic.Name)
	return tc.Execute(ctx, c.nl, &b)
}
