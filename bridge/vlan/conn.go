package vlan

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strconv"

	"github.com/jsimonetti/rtnetlink/v2/driver"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// ErrUnsupported says that the kernel's bridges know no VLANs.
var ErrUnsupported = errors.New("this kernel's bridges know no VLANs: it was built without CONFIG_BRIDGE_VLAN_FILTERING, so use a kernel that has it, or leave VLANs out of the configuration")

// Conn works on the VLANs of one network namespace's bridges, over a socket of another's. Its
// methods may be called from several goroutines. Their errors are *tombolo.OpError.
type Conn struct{ nl *nl.Conn }

// On makes a Conn over a socket that is open already, and stays with its owner.
func On(s tombolo.Socket) *Conn { return &Conn{nl.Of(s)} }

// Probe asks whether the kernel's bridges know VLANs, without making anything: where not,
// the error matches ErrUnsupported. It needs CAP_NET_ADMIN, for which the kernel loads what
// it has as modules.
func (c *Conn) Probe(ctx context.Context) error {
	for _, kind := range []string{"bridge", "vlan"} {
		if errors.Is(link.Probe(c.nl, kind), unix.EOPNOTSUPP) {
			return ErrUnsupported
		}
	}
	if _, err := c.get(loopback); errors.Is(err, unix.EOPNOTSUPP) {
		return ErrUnsupported // any other says that loopback is no port
	}
	return nil
}

const loopback = 1 // LOOPBACK_IFINDEX, include/net/flow.h: in every namespace

// Ensure puts a port, by its index, into the VLANs of a membership, and takes it out of all
// others unless they are kept. It says whether anything was changed. It needs CAP_NET_ADMIN.
func (c *Conn) Ensure(ctx context.Context, port int, m Membership) (changed bool, _ error) {
	if err := c.check(ctx, m); err != nil {
		return false, err
	}
	have, err := c.get(port)
	if err != nil {
		return false, err
	}
	del, add := m.changes(have)
	if len(del)+len(add) == 0 {
		return false, nil
	}
	return true, c.change(port, del, add)
}

// Join puts a port, by its index, into VLANs besides those that it is in, with their tags on.
// One that it is in already stays as it is. It says whether anything was changed. It needs
// CAP_NET_ADMIN.
func (c *Conn) Join(ctx context.Context, port int, list ...Range) (changed bool, _ error) {
	add, err := c.Outside(ctx, port, list...)
	if err != nil || len(add) == 0 {
		return false, err
	}
	return true, c.change(port, nil, tagged(add))
}

// Outside gives those of some VLANs that a port, by its index, is not in.
func (c *Conn) Outside(ctx context.Context, port int, list ...Range) ([]Range, error) {
	if err := c.check(ctx, Membership{Trunk: list}); err != nil {
		return nil, err
	}
	have, err := c.get(port)
	if err != nil {
		return nil, err
	}
	add := tagged(list)
	for id := range have {
		delete(add, id)
	}
	var out []Range
	for _, r := range add.runs() {
		out = append(out, r.Range)
	}
	return out, nil
}

// Leave takes a port, by its index, out of VLANs. One that is gone is success. It needs
// CAP_NET_ADMIN.
func (c *Conn) Leave(ctx context.Context, port int, list ...Range) error {
	if err := c.check(ctx, Membership{Trunk: list}); err != nil || len(list) == 0 {
		return err
	}
	err := c.change(port, tagged(list), nil)
	if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) {
		return nil // no link, or no port
	}
	return err
}

// Check compares a port, by its index, with a membership; name is the port's in what it
// gives. None is what should be.
func (c *Conn) Check(ctx context.Context, port int, name string, m Membership) ([]tombolo.Difference, error) {
	if err := c.check(ctx, m); err != nil {
		return nil, err
	}
	have, err := c.get(port)
	if err != nil {
		return nil, err
	}
	if del, add := m.changes(have); len(del)+len(add) == 0 {
		return nil, nil
	}
	return []tombolo.Difference{{Object: "port " + name, What: "VLANs", Want: m.String(), Have: have.String()}}, nil
}

func (c *Conn) check(ctx context.Context, m Membership) error {
	if err := m.Check(); err != nil {
		return &tombolo.OpError{Op: "set VLANs", Object: m.String(), Err: err}
	}
	return nil
}

// Of include/uapi/linux/if_bridge.h.
const (
	dbEntry      = 1 // BRIDGE_VLANDB_ENTRY, as often as there are entries
	dbEntryInfo  = 1 // BRIDGE_VLANDB_ENTRY_INFO: struct bridge_vlan_info
	dbEntryRange = 2 // BRIDGE_VLANDB_ENTRY_RANGE: the last of it
	headerLen    = 8 // struct br_vlan_msg: family, 3 bytes, the link's index
)

func header(port int) []byte {
	b := make([]byte, headerLen)
	b[0] = unix.AF_BRIDGE
	binary.NativeEndian.PutUint32(b[4:], uint32(port))
	return b
}

// get lists the VLANs of a port, or of a bridge as a port of itself (Linux 5.6).
func (c *Conn) get(port int) (entries, error) {
	m, err := nl.Encode(unix.RTM_GETVLAN, 0, header(port), nil)
	list := entries{}
	err = c.nl.List("list VLANs of link", m, err, func(m netlink.Message) error {
		if len(m.Data) < headerLen {
			return fmt.Errorf("%w: VLANs of %d bytes", nl.ErrMalformed, len(m.Data))
		}
		return nl.Decode(m.Data[headerLen:], list.decode)
	})
	return list, err
}

// decode reads one entry.
func (e entries) decode(ad *netlink.AttributeDecoder) error {
	if ad.Type() != dbEntry {
		return nil
	}
	var flags, first, last uint16
	ad.Do(func(b []byte) error {
		return nl.Decode(b, func(ad *netlink.AttributeDecoder) error {
			switch ad.Type() {
			case dbEntryInfo:
				info := ad.Bytes()
				if len(info) < 4 {
					return fmt.Errorf("%w: a VLAN of %d bytes", nl.ErrMalformed, len(info))
				}
				flags, first = binary.NativeEndian.Uint16(info), binary.NativeEndian.Uint16(info[2:])
			case dbEntryRange:
				last = ad.Uint16()
			}
			return nil
		})
	})
	for id := int(first); id <= max(int(first), int(last)) && id <= MaxID; id++ {
		e[uint16(id)] = flags & (flagPVID | flagUntagged)
	}
	return nil
}

// change deletes VLANs of a port, and adds some, in one sendmsg.
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
				ae.Nested(dbEntry, r.encode)
			}
		})
		b.Add("set VLANs of link", nl.Name(strconv.Itoa(port)), m, err)
	}
	return c.nl.Execute(&b)
}

func (r run) encode(ae *netlink.AttributeEncoder) error {
	info := binary.NativeEndian.AppendUint16(nil, r.flags)
	ae.Bytes(dbEntryInfo, binary.NativeEndian.AppendUint16(info, r.First))
	if r.Last > r.First {
		ae.Uint16(dbEntryRange, r.Last)
	}
	return nil
}

// Link is the host's in a VLAN of a bridge.
type Link struct {
	Bridge int    // its index
	Name   string // of the link, 1 to 15 bytes
	ID     uint16 // 1 to 4094
	MTU    int    // in bytes
	// MAC is the bridge's, which takes in frames for no other; nil leaves the link with what it has.
	MAC   net.HardwareAddr
	Alias string // given to a new link, so that it is known whose it is
}

// EnsureLink puts a bridge into a VLAN as a port of itself, and makes the host's link there,
// up and without a link-local address. It says whether anything was changed. A link of the
// name that is of another kind, VLAN or bridge is an error that matches fs.ErrExist, but for a
// veth: another program may have made that, which has the other end in the VLAN. It needs
// CAP_NET_ADMIN.
func (c *Conn) EnsureLink(ctx context.Context, l Link) (changed bool, _ error) {
	if err := c.check(ctx, Membership{ID: l.ID}); err != nil {
		return false, err
	}
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
		link.Request{Name: l.Name, Lower: l.Bridge, Kind: "vlan", Data: &driver.Vlan{ID: &l.ID}}.Create(&b, "add link", l.Name)
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
	return true, err
}

func (l *Link) hasMAC(have *link.Link) bool { return l.MAC == nil || bytes.Equal(l.MAC, have.MAC) }

// hasIPv6 says whether the kernel has IPv6 on a link of an MTU at all (RFC 8200, section 5).
func hasIPv6(mtu int) bool { return mtu >= 1280 }

// link looks the link up, and refuses one of the name that is another.
func (c *Conn) link(l *Link) (*link.Link, error) {
	have, err := link.Find(c.nl, l.Name)
	if err != nil {
		return nil, err
	}
	if have.Kind == "veth" || have.Kind == "vlan" && have.Lower == l.Bridge && have.VLAN == l.ID {
		return have, nil
	}
	return nil, &tombolo.OpError{Op: "make link", Object: l.Name, Err: fmt.Errorf(
		"%w: it is of kind %q, and not in VLAN %d of the bridge: delete the link, or choose another bridge", fs.ErrExist, have.Kind, l.ID)}
}

// CheckLink compares what EnsureLink makes with what is there. None is what should be.
func (c *Conn) CheckLink(ctx context.Context, l Link) ([]tombolo.Difference, error) {
	if err := c.check(ctx, Membership{ID: l.ID}); err != nil {
		return nil, err
	}
	object := "link " + l.Name
	have, err := c.link(&l)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return []tombolo.Difference{{Object: object, What: "link", Want: l.Name}}, nil
	case errors.Is(err, fs.ErrExist):
		return []tombolo.Difference{{Object: object, What: "link", Want: fmt.Sprintf("in VLAN %d of the bridge", l.ID), Have: "another", Remedy: tombolo.RemedyConfigure}}, nil
	case err != nil:
		return nil, err
	}
	var list []tombolo.Difference
	if !have.Up() {
		list = append(list, tombolo.Difference{Object: object, What: "link", Want: "up", Have: "down"})
	}
	if have.Kind == "veth" {
		return list, nil
	}
	if have.MTU != l.MTU {
		list = append(list, tombolo.Difference{Object: object, What: "MTU", Want: strconv.Itoa(l.MTU), Have: strconv.Itoa(have.MTU)})
	}
	if !l.hasMAC(have) {
		list = append(list, tombolo.Difference{Object: object, What: "MAC", Want: l.MAC.String(), Have: have.MAC.String()})
	}
	lacking, err := c.Outside(ctx, l.Bridge, Range{l.ID, l.ID})
	if len(lacking) > 0 {
		list = append(list, tombolo.Difference{Object: object, What: "the bridge's membership in VLAN", Want: lacking[0].String()})
	}
	return list, err
}

// RemoveLink deletes the host's link in a VLAN, if it has the alias, and takes the bridge out of that VLAN. It is
// no error if the link is gone.
func (c *Conn) RemoveLink(ctx context.Context, l Link) error {
	if err := c.check(ctx, Membership{ID: l.ID}); err != nil {
		return err
	}
	have, err := c.link(&l)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil || have.Kind != "vlan" || have.Alias != l.Alias {
		return err
	}
	var b nl.Batch
	link.Request{Index: have.Index}.Delete(&b, l.Name)
	if err := c.nl.Execute(&b); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return c.Leave(ctx, l.Bridge, Range{l.ID, l.ID})
}
