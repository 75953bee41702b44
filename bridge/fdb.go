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

// Values of include/uapi/linux/neighbour.h.
const (
	nudNoARP     = 0x40 // NUD_NOARP: static, in an FDB
	nudPermanent = 0x80 // NUD_PERMANENT: the bridge's own MAC, or a port's
	ntfSticky    = 0x40 // NTF_STICKY: frames that come in elsewhere do not move it (Linux 5.0)
)

// fdbMessage is about an entry of a MAC that the port's bridge holds (NTF_MASTER). The
// library's attributes have an address and a link beside the MAC.
func (p *Port) fdbMessage(typ netlink.HeaderType, header netlink.HeaderFlags, index int, state uint16, flags uint8) (netlink.Message, error) {
	body := &rtnetlink.NeighMessage{Family: unix.AF_BRIDGE, Index: uint32(index), State: state, Flags: unix.NTF_MASTER | flags}
	return nl.Marshal(typ, header, body.MarshalBinary, func(ae *netlink.AttributeEncoder) {
		ae.Bytes(unix.NDA_LLADDR, p.PeerMAC)
		// Pods of two VLANs may have one MAC. Without a VLAN the entry is for all VLANs that the port is in.
		if p.VLAN.ID != 0 && len(p.VLAN.Trunk) == 0 {
			ae.Uint16(unix.NDA_VLAN, p.VLAN.ID)
		}
	})
}

// addStaticFDB enters the pod's MAC for good. An entry of the MAC that the bridge has learnt is replaced. An entry
// of the bridge's own MAC, or one that a program entered for another port, stays: a pod with such a MAC would get
// frames that are not its own.
func (c *Conn) addStaticFDB(ctx context.Context, p *Port, index int) error {
	err := c.sendStaticFDB(ctx, p, index, netlink.Excl)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	there, err := c.fdbEntry(ctx, p, index)
	switch {
	case errors.Is(err, fs.ErrNotExist): // It has aged out meanwhile.
	case err != nil:
		return err
	case there.static():
		return nil
	}
	return c.sendStaticFDB(ctx, p, index, netlink.Replace)
}

func (c *Conn) sendStaticFDB(ctx context.Context, p *Port, index int, flag netlink.HeaderFlags) error {
	var b nl.Batch
	m, err := p.fdbMessage(unix.RTM_NEWNEIGH, netlink.Create|flag, index, nudNoARP, ntfSticky)
	b.Add("add FDB entry", p.fdbName(), m, err)
	return c.execute(ctx, &b)
}

func (p *Port) fdbName() nl.Name { return nl.Name(p.PeerMAC.String() + " of " + p.Name) }

// fdbEntry is what a bridge knows of a MAC.
type fdbEntry struct {
	port  int // or the bridge itself
	state uint16
}

// static says whether it neither ages nor is learnt anew.
func (f fdbEntry) static() bool { return f.state&(nudNoARP|nudPermanent) != 0 }

// fdbEntry gets what the bridge of a port knows of the pod's MAC.
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
	return f, c.execute(ctx, &b)
}

// lacksStaticFDB reports whether the bridge lacks the port's static entry of the pod's MAC.
func (c *Conn) lacksStaticFDB(ctx context.Context, p *Port, index int) (bool, error) {
	if !p.StaticFDB || len(p.PeerMAC) != 6 {
		return false, nil
	}
	f, err := c.fdbEntry(ctx, p, index)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	return err == nil && (!f.static() || f.port != index), err
}
