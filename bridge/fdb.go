package bridge

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"

	"github.com/jsimonetti/rtnetlink/v2"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Constants of include/uapi/linux/neighbour.h.
const (
	nudNoARP     = 0x40 // NUD_NOARP: a static entry
	nudPermanent = 0x80 // NUD_PERMANENT: the MAC of the bridge or a port
	ntfSticky    = 0x40 // NTF_STICKY: frames from elsewhere do not move the entry (Linux 5.0)
)

// fdbMessage returns a request about the entry for the pod's MAC in the bridge's forwarding database (NTF_MASTER). It
// encodes the attributes itself, since the library would add an address and a link.
func (p *Port) fdbMessage(typ netlink.HeaderType, header netlink.HeaderFlags, index int, state uint16,
	flags uint8) (netlink.Message, error) {
	body := &rtnetlink.NeighMessage{Family: unix.AF_BRIDGE, Index: uint32(index), State: state,
		Flags: unix.NTF_MASTER | flags}
	return nl.Marshal(typ, header, body.MarshalBinary, func(ae *netlink.AttributeEncoder) {
		ae.Bytes(unix.NDA_LLADDR, p.PeerMAC)

		// Limit the entry to the pod's VLAN if the port has only one, since pods in different VLANs may have the same
		// MAC. Without NDA_VLAN the entry applies to all VLANs of the port.
		if p.VLAN.ID != 0 && len(p.VLAN.Trunk) == 0 {
			ae.Uint16(unix.NDA_VLAN, p.VLAN.ID)
		}
	})
}

// addStaticFDB adds a static entry for the pod's MAC. It replaces an entry that the bridge has learnt. If the MAC is
// the bridge's own or has a static entry for another port, it keeps the existing entry. If addStaticFDB replaced such
// an entry, the pod would get frames for others.
func (c *Conn) addStaticFDB(ctx context.Context, p *Port, index int) error {
	err := c.sendStaticFDB(ctx, p, index, netlink.Excl)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}

	existing, err := c.fdbEntry(ctx, p, index)
	switch {
	case errors.Is(err, fs.ErrNotExist): // the entry has just expired; add it below
	case err != nil:
		return err
	case existing.isStatic():
		return nil
	}

	return c.sendStaticFDB(ctx, p, index, netlink.Replace)
}

func (c *Conn) sendStaticFDB(ctx context.Context, p *Port, index int, flag netlink.HeaderFlags) error {
	var b nl.Batch
	m, err := p.fdbMessage(unix.RTM_NEWNEIGH, netlink.Create|flag, index, nudNoARP, ntfSticky)
	b.Add("add FDB entry", p.fdbName(), m, err)
	return c.nl.Do(ctx, &b)
}

func (p *Port) fdbName() nl.Name { return nl.Name(p.PeerMAC.String() + " of " + p.Name) }

// fdbEntry is an entry of the bridge's forwarding database.
type fdbEntry struct {
	port  int // index of a port, or of the bridge itself
	state uint16
}

// isStatic reports whether the entry neither expires nor moves to another port.
func (f fdbEntry) isStatic() bool { return f.state&(nudNoARP|nudPermanent) != 0 }

// fdbEntry returns the entry for the pod's MAC in the forwarding database of the port's bridge. If there is none, the
// error matches fs.ErrNotExist.
func (c *Conn) fdbEntry(ctx context.Context, p *Port, index int) (fdbEntry, error) {
	var f fdbEntry
	var b nl.Batch
	ask, err := p.fdbMessage(unix.RTM_GETNEIGH, 0, index, 0, 0)
	b.AddGet("get FDB entry", p.fdbName(), ask, err, func(m netlink.Message) error {
		if len(m.Data) < unix.SizeofNdMsg {
			return fmt.Errorf("%w: an FDB entry of %d bytes", nl.ErrMalformed, len(m.Data))
		}
		f.port = int(binary.NativeEndian.Uint32(m.Data[4:]))
		f.state = binary.NativeEndian.Uint16(m.Data[8:])
		return nil
	})

	return f, c.nl.Do(ctx, &b)
}

// lacksStaticFDB reports whether p.StaticFDB is set but the bridge has no static entry for the pod's MAC at the port.
// index is the index of the port.
func (c *Conn) lacksStaticFDB(ctx context.Context, p *Port, index int) (bool, error) {
	if !p.StaticFDB || len(p.PeerMAC) != 6 {
		return false, nil
	}
	f, err := c.fdbEntry(ctx, p, index)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	return err == nil && (!f.isStatic() || f.port != index), err
}
