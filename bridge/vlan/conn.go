package vlan

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/jsimonetti/rtnetlink/v2/driver"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/diff"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/printable"
)

// ErrUnsupported is the cause of an error if the kernel's bridges do not support VLANs.
var ErrUnsupported = errors.New("this kernel's bridges know no VLANs: it was built without " +
	"CONFIG_BRIDGE_VLAN_FILTERING or CONFIG_VLAN_8021Q, so use a kernel that has both, or leave VLANs out of the " +
	"configuration")

// unsupported adds ErrUnsupported to the kernel's error EOPNOTSUPP. It returns other errors unchanged.
func unsupported(err error) error {
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	return err
}

// Conn manages the VLANs of bridges in one network namespace. It uses the socket of another connection. Several
// goroutines may call its methods at the same time. Errors from the kernel are, or wrap, a *tombolo.OpError.
type Conn struct{ nl *nl.Conn }

// On returns a Conn that uses an open socket. The socket's owner still has to close it.
func On(s tombolo.Socket) *Conn { return &Conn{nl.Of(s)} }

// Probe returns an error that matches ErrUnsupported if the kernel's bridges do not support VLANs. It creates nothing.
// It needs CAP_NET_ADMIN, so that the kernel loads its modules.
func (c *Conn) Probe(ctx context.Context) error {
	for _, kind := range []string{"bridge", "vlan"} {
		if err := unsupported(link.Probe(c.nl, kind)); errors.Is(err, ErrUnsupported) {
			return err
		}
	}

	if _, err := c.get(ctx, loopback, Membership{}); errors.Is(err, ErrUnsupported) {
		return err // a kernel with the feature returns another error: loopback is no bridge port
	}
	return nil
}

const loopback = 1 // the loopback link's index in every namespace, include/net/flow.h

// Ensure puts the port with the given index into the VLANs of m. It removes the port from all other VLANs, unless
// m.KeepDefault is set. It reports whether it changed anything. It needs CAP_NET_ADMIN.
func (c *Conn) Ensure(ctx context.Context, port int, m Membership) (changed bool, _ error) {
	have, err := c.get(ctx, port, m)
	if err != nil {
		return false, err
	}

	del, add := m.changes(have)
	if len(del)+len(add) == 0 {
		return false, nil
	}
	return true, c.change(port, del, add)
}

// Join adds the port with the given index to further VLANs, with tagged frames. VLANs that the port is already in
// stay unchanged. Join reports whether it changed anything. It needs CAP_NET_ADMIN.
func (c *Conn) Join(ctx context.Context, port int, list ...Range) (changed bool, _ error) {
	add, err := c.Outside(ctx, port, list...)
	if err != nil || len(add) == 0 {
		return false, err
	}
	return true, c.change(port, nil, taggedEntries(add))
}

// Outside returns the VLANs of list that the port with the given index is not in.
func (c *Conn) Outside(ctx context.Context, port int, list ...Range) ([]Range, error) {
	have, err := c.get(ctx, port, Membership{Trunk: list})
	if err != nil {
		return nil, err
	}

	add := taggedEntries(list)
	for id := range have {
		delete(add, id)
	}

	var out []Range
	for _, r := range add.runs() {
		out = append(out, r.Range)
	}

	return out, nil
}

// Leave removes the port with the given index from VLANs. It is no error if the link does not exist or is no port.
// Leave needs CAP_NET_ADMIN.
func (c *Conn) Leave(ctx context.Context, port int, list ...Range) error {
	if err := check(Membership{Trunk: list}); err != nil || len(list) == 0 {
		return err
	}
	err := c.change(port, taggedEntries(list), nil)
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) {
		return nil // there is no such link, or it is no port
	}
	return err
}

// Check compares the VLANs of the port with the given index with m, and returns the differences. name is the port's
// name for the texts of the differences.
func (c *Conn) Check(ctx context.Context, port int, name string, m Membership) ([]tombolo.Difference, error) {
	have, err := c.get(ctx, port, m)
	if err != nil {
		return nil, err
	}

	if del, add := m.changes(have); len(del)+len(add) == 0 {
		return nil, nil
	}
	return []tombolo.Difference{{Object: "port " + name, What: "VLANs", Want: m.String(), Have: have.String()}}, nil
}

// check returns an error if the membership is not valid.
func check(m Membership) error {
	if err := m.Check(); err != nil {
		return &tombolo.OpError{Op: "set VLANs", Object: m.String(), Err: err}
	}
	return nil
}

// Constants of include/uapi/linux/if_bridge.h.
const (
	dbEntry      = 1 // BRIDGE_VLANDB_ENTRY, one for each entry
	dbEntryInfo  = 1 // BRIDGE_VLANDB_ENTRY_INFO: struct bridge_vlan_info
	dbEntryRange = 2 // BRIDGE_VLANDB_ENTRY_RANGE: the last VLAN of the entry
	headerLen    = 8 // struct br_vlan_msg: family, 3 bytes, the link's index
)

func header(port int) []byte {
	b := make([]byte, headerLen)
	b[0] = unix.AF_BRIDGE
	binary.NativeEndian.PutUint32(b[4:], uint32(port))
	return b
}

// get returns the VLANs of a port. For a bridge, it returns the VLANs of the bridge itself (Linux 5.6). If the
// membership that the caller compares them with is not valid, get sends nothing and returns an error.
func (c *Conn) get(ctx context.Context, port int, expected Membership) (entries, error) {
	if err := check(expected); err != nil {
		return nil, err
	}

	m, err := nl.Encode(unix.RTM_GETVLAN, 0, header(port), nil)
	list := entries{}
	err = c.nl.List(ctx, "list VLANs of link", m, err, func(m netlink.Message) error {
		if len(m.Data) < headerLen {
			return fmt.Errorf("%w: VLANs of %d bytes", nl.ErrMalformed, len(m.Data))
		}
		return nl.Decode(m.Data[headerLen:], list.decode)
	})
	return list, unsupported(err)
}

// decode adds one entry of the kernel's answer to e.
func (e entries) decode(ad *netlink.AttributeDecoder) {
	if ad.Type() != dbEntry {
		return
	}

	info, end := nl.Find(ad.Bytes(), dbEntryInfo), nl.Find(ad.Bytes(), dbEntryRange)
	if len(info) < 4 {
		return
	}

	number := binary.NativeEndian.Uint16
	first := number(info[2:])
	last := first
	if len(end) == 2 {
		last = number(end)
	}

	for id := first; id <= min(last, maxID); id++ {
		e[id] = number(info) & (flagPVID | flagUntagged)
	}
}

// change deletes VLANs of a port and adds others, in one sendmsg.
func (c *Conn) change(port int, del, add entries) error {
	var b nl.Batch
	for _, part := range []struct {
		typ  netlink.HeaderType
		list entries
	}{{unix.RTM_DELVLAN, del}, {unix.RTM_NEWVLAN, add}} {
		if len(part.list) == 0 {
			continue
		}
		m, err := nl.Encode(part.typ, 0, header(port), func(ae *netlink.AttributeEncoder) {
			for _, r := range part.list.runs() {
				nl.Nested(ae, dbEntry, r.encode)
			}
		})
		b.Add("set VLANs of link", nl.Name(strconv.Itoa(port)), m, err)
	}

	return unsupported(c.nl.Execute(&b))
}

func (r entryRange) encode(ae *netlink.AttributeEncoder) {
	info := binary.NativeEndian.AppendUint16(nil, r.flags)
	ae.Bytes(dbEntryInfo, binary.NativeEndian.AppendUint16(info, r.First))
	if r.Last > r.First {
		ae.Uint16(dbEntryRange, r.Last)
	}
}

// Link describes the host's link in a VLAN of a bridge.
type Link struct {
	Bridge int    // index of the bridge
	Name   string // name of the link, 1 to 15 bytes
	ID     uint16 // 1 to 4094
	MTU    int    // in bytes
	// MAC is the link's MAC. It must be the bridge's MAC: the bridge passes no unicast frames for other MACs to the
	// host. If nil, the link keeps its MAC.
	MAC   net.HardwareAddr
	Alias string // the alias of a new link, which marks its owner
}

// EnsureLink adds the bridge itself to a VLAN, and creates or corrects the host's link in this VLAN. It sets the link
// up. A new link gets no link-local address. EnsureLink reports whether it changed anything. It needs CAP_NET_ADMIN.
//
// If a link with this name exists with another kind, VLAN or bridge, the error matches fs.ErrExist. EnsureLink leaves
// any veth link with this name unchanged, since another program may have connected it to the VLAN. If another program
// has renamed our link, EnsureLink deletes it and creates a new one.
func (c *Conn) EnsureLink(ctx context.Context, l Link) (changed bool, _ error) {
	have, err := c.link(&l)
	missing := errors.Is(err, fs.ErrNotExist)
	if err != nil && !missing {
		return false, err
	}

	if !missing && have.Kind == "veth" {
		return false, nil
	}

	if changed, err = c.Join(ctx, l.Bridge, Range{l.ID, l.ID}); err != nil {
		return false, err
	}

	if !missing && have.Up() && have.MTU == l.MTU && l.hasMAC(have) {
		return changed, nil
	}

	var b nl.Batch
	if missing {
		if err := c.deleteRenamed(ctx, &l); err != nil {
			return changed, err
		}
		link.Request{Name: l.Name, Lower: l.Bridge, Kind: "vlan", Data: &driver.Vlan{ID: &l.ID}}.Create(&b, "add link",
			l.Name)
		link.Request{Name: l.Name, Alias: &l.Alias, NoLinkLocal: hasIPv6(l.MTU)}.Set(&b, "set link", l.Name)
	}

	set := link.Request{Name: l.Name, MTU: &l.MTU, Flags: unix.IFF_UP, Change: unix.IFF_UP}
	if !missing && !l.hasMAC(have) {
		set.MAC = l.MAC
	}

	set.Set(&b, "set link", l.Name)
	err = c.nl.Execute(&b)
	if missing && b.Err(0) == nil && errors.Is(b.Err(1), unix.EAFNOSUPPORT) {
		err = b.Err(2) // the kernel has no IPv6
		var again nl.Batch
		link.Request{Name: l.Name, Alias: &l.Alias}.Set(&again, "set link", l.Name)
		err = errors.Join(err, c.nl.Execute(&again))
	}

	return true, unsupported(err)
}

// deleteRenamed deletes l's link if another program has renamed it. It recognizes the link by bridge, VLAN and alias. A
// bridge can have only one link in each VLAN.
func (c *Conn) deleteRenamed(ctx context.Context, l *Link) error {
	renamed := 0
	err := link.List(c.nl, "list VLAN links", "vlan", 0, func(have *link.Info) {
		if have.Lower == l.Bridge && have.VLAN == l.ID && have.Alias == l.Alias {
			renamed = have.Index
		}
	})
	if err != nil || renamed == 0 {
		return err
	}
	return link.Delete(ctx, c.nl, renamed, l.Name)
}

func (l *Link) hasMAC(have *link.Info) bool { return l.MAC == nil || bytes.Equal(l.MAC, have.MAC) }

// hasIPv6 reports whether the kernel enables IPv6 on a link with this MTU (RFC 8200, section 5).
func hasIPv6(mtu int) bool { return mtu >= 1280 }

// link returns the existing link with l's name. If there is none, the error matches fs.ErrNotExist. If that link is not
// in l's VLAN, the error matches fs.ErrExist. A veth link counts as in the VLAN. If l.ID is not valid, the error
// matches tombolo.ErrInvalid.
func (c *Conn) link(l *Link) (*link.Info, error) {
	if err := check(Membership{ID: l.ID}); err != nil {
		return nil, err
	}
	have, err := link.Find(context.Background(), c.nl, l.Name, 0)
	if err != nil {
		return nil, err
	}
	if have.Kind == "veth" || have.Kind == "vlan" && have.Lower == l.Bridge && have.VLAN == l.ID {
		return have, nil
	}
	return nil, &tombolo.OpError{Op: "make link", Object: l.Name, Err: fmt.Errorf(
		"%w: it is of kind %q, and not in VLAN %d of the bridge: delete the link, or choose another bridge",
		fs.ErrExist, have.Kind, l.ID)}
}

// CheckLink compares the host's link with l, and returns the differences. Of a veth link it checks only that it is up.
func (c *Conn) CheckLink(ctx context.Context, l Link) ([]tombolo.Difference, error) {
	object := "link " + l.Name
	have, err := c.link(&l)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return []tombolo.Difference{{Object: object, What: "link", Want: l.Name}}, nil
	case errors.Is(err, fs.ErrExist):
		return []tombolo.Difference{{Object: object, What: "link", Want: fmt.Sprintf("in VLAN %d of the bridge", l.ID),
			Have: "another", Remedy: tombolo.RemedyConfigure}}, nil
	case err != nil:
		return nil, err
	}

	var list diff.List
	list.Up(object, have.Up())
	if have.Kind == "veth" {
		return list, nil
	}

	list.Number(object, "MTU", l.MTU, have.MTU)
	if !l.hasMAC(have) {
		list.Add(object, "MAC", l.MAC.String(), have.MAC.String())
	}

	lacking, err := c.Outside(ctx, l.Bridge, Range{l.ID, l.ID})
	if len(lacking) > 0 {
		list.Add(object, "the bridge's membership in VLAN", lacking[0].String(), "")
	}

	return list, err
}

// RemoveLink deletes the host's link and then removes the bridge from the VLAN. RemoveLink changes nothing and returns
// nil if no link with this name is in the VLAN, or if it has another alias or is a veth.
func (c *Conn) RemoveLink(ctx context.Context, l Link) error {
	have, err := c.link(&l)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrExist) {
		return nil
	}

	if err != nil || have.Kind != "vlan" || have.Alias != l.Alias {
		return err
	}

	if err := link.Delete(ctx, c.nl, have.Index, l.Name); err != nil {
		return err
	}

	return c.Leave(ctx, l.Bridge, Range{l.ID, l.ID})
}

// maxID is the last VLAN number; the first is 1.
const maxID = 4094

// Range is a range of VLAN IDs from First to Last, both included.
type Range struct{ First, Last uint16 }

// String returns the range as text, such as "7" or "7-9".
func (r Range) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// Membership lists the VLANs of a port. With the zero Membership, Conn.Ensure removes the port from all VLANs, and
// bridge.Port leaves it in the default VLAN.
type Membership struct {
	// ID is the VLAN of the port's untagged frames, in both directions. It is 1 to 4094. 0 means 1 if Trunk is not
	// empty.
	ID uint16 `json:"id,omitempty"`
	// Trunk lists the VLANs whose frames are tagged, in both directions. If Trunk contains ID, frames of ID are still
	// untagged.
	Trunk Ranges `json:"trunk,omitempty"`
	// KeepDefault keeps the port in other VLANs that it is already in, such as the bridge's default VLAN.
	KeepDefault bool `json:"keepDefault,omitempty"`
}

// IsZero reports whether the membership contains no VLAN. It ignores KeepDefault.
func (m Membership) IsZero() bool { return m.ID == 0 && len(m.Trunk) == 0 }

// Check returns an error that matches tombolo.ErrInvalid if a VLAN ID is out of range, or if a range ends before it
// begins.
func (m Membership) Check() error {
	if m.ID > maxID {
		return fmt.Errorf("%w: VLAN %d, where 1 to %d are VLANs", tombolo.ErrInvalid, m.ID, maxID)
	}
	for _, r := range m.Trunk {
		if r.First == 0 || r.Last > maxID || r.First > r.Last {
			return fmt.Errorf("%w: VLANs %s, where 1 to %d are VLANs", tombolo.ErrInvalid, r, maxID)
		}
	}
	return nil
}

// Ranges is a list of ranges of VLAN IDs. Its text form is "2-4,100".
type Ranges []Range

// String returns the ranges as text, such as "2-4,100".
func (l Ranges) String() string { return printable.List(l, ",") }

// MarshalText returns the same text as String.
func (l Ranges) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText parses a text such as "2-4,100". If the text has another form, is empty, or contains a number that is
// no VLAN ID, the error matches tombolo.ErrInvalid.
func (l *Ranges) UnmarshalText(text []byte) error {

	var list Ranges
	for one := range strings.SplitSeq(string(text), ",") {
		first, last, isRange := strings.Cut(one, "-")
		if !isRange {
			last = first
		}

		a, errA := strconv.ParseUint(first, 10, 16)
		b, errB := strconv.ParseUint(last, 10, 16)
		r := Range{uint16(a), uint16(b)}
		if errA != nil || errB != nil || (Membership{Trunk: Ranges{r}}).Check() != nil {
			return fmt.Errorf("%w: %q names no VLANs", tombolo.ErrInvalid, one)
		}
		list = append(list, r)
	}

	*l = list
	return nil
}

// Constants of include/uapi/linux/if_bridge.h.
const (
	flagPVID     = 0x2 // BRIDGE_VLAN_INFO_PVID: untagged frames belong to this VLAN
	flagUntagged = 0x4 // BRIDGE_VLAN_INFO_UNTAGGED: outgoing frames lose their tag
)

// entries maps the VLAN IDs of a port to their flags in the kernel.
type entries map[uint16]uint16

// entries converts the membership to the kernel's form.
func (m Membership) entries() entries {
	list := taggedEntries(m.Trunk)
	if !m.IsZero() {
		list[max(m.ID, 1)] = flagPVID | flagUntagged
	}
	return list
}

// taggedEntries returns entries for the VLANs in list, with tagged frames.
func taggedEntries(list []Range) entries {
	e := entries{}
	for _, r := range list {
		for id := int(r.First); id <= int(r.Last); id++ {
			e[uint16(id)] = 0
		}
	}
	return e
}

// changes compares existing entries with the membership. It returns the entries to delete and to add.
func (m Membership) changes(have entries) (del, add entries) {
	del, add = maps.Clone(have), m.entries()
	maps.DeleteFunc(del, func(id, _ uint16) bool {
		_, ok := add[id]
		return ok || m.KeepDefault
	})
	maps.DeleteFunc(add, func(id, flags uint16) bool {
		there, ok := have[id]
		return ok && there == flags
	})
	return del, add
}

// entryRange is a range of consecutive VLANs with the same flags.
type entryRange struct {
	Range
	flags uint16
}

// runs returns the entries as a sorted list of ranges of consecutive VLANs with equal flags. A VLAN with flagPVID has a
// range of its own.
func (e entries) runs() []entryRange {
	var list []entryRange
	for _, id := range slices.Sorted(maps.Keys(e)) {
		if last := len(list) - 1; last >= 0 && list[last].Last+1 == id && list[last].flags == e[id] &&
			e[id]&flagPVID == 0 {
			list[last].Last = id
			continue
		}
		list = append(list, entryRange{Range{id, id}, e[id]})
	}

	return list
}

// String returns the entries in the words of `bridge vlan add`, such as "100 pvid untagged, 200-300". It returns "none"
// if there are no entries.
func (e entries) String() string {
	var texts []string
	for _, r := range e.runs() {
		text := r.Range.String()
		if r.flags&flagPVID != 0 {
			text += " pvid"
		}
		if r.flags&flagUntagged != 0 {
			text += " untagged"
		}
		texts = append(texts, text)
	}

	if len(texts) == 0 {
		return "none"
	}

	return strings.Join(texts, ", ")
}

// String returns the VLANs in the words of `bridge vlan add`, such as "100 pvid untagged, 200-300", or "none".
func (m Membership) String() string { return m.entries().String() }
