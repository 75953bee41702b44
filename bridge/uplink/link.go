package uplink

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

const skipStats = 1 << 3 // RTEXT_FILTER_SKIP_STATS

// Link is a network interface as far as a takeover is concerned with it.
type Link struct {
	Index int    `json:"index"`
	Name  string `json:"name"`
	Kind  string `json:"kind,omitempty"` // "bridge", "veth", "vlan", …; empty for hardware and loopback
	// Type is what is on the wire (ARPHRD_*): 1 is Ethernet.
	Type uint16 `json:"type"`
	MAC  string `json:"mac,omitempty"`
	MTU  int    `json:"mtu"`
	// Flags are those of the kernel (IFF_*), IFF_LOWER_UP, the carrier, included.
	Flags uint32 `json:"flags"`
	// Master is the index of the bridge, bond or the like that it is a port of, and
	// PortOf what kind that is.
	Master int    `json:"master,omitempty"`
	PortOf string `json:"portOf,omitempty"`
	// Lower is the index of the link that it rests on (a VLAN's, a macvlan's, a
	// tunnel's) where that is in the same namespace.
	Lower int `json:"lower,omitempty"`
	// Remote says of a VXLAN tunnel that it has a remote end or a group of its own, rather
	// than entries of its forwarding table alone.
	Remote bool   `json:"remote,omitempty"`
	Alias  string `json:"alias,omitempty"`
	// XDP says that an XDP program is attached.
	XDP bool `json:"xdp,omitempty"`
	// Wireless says that it is a wireless device.
	Wireless bool `json:"wireless,omitempty"`
	// STP and VLANFiltering are those of a bridge.
	STP           bool `json:"stp,omitempty"`
	VLANFiltering bool `json:"vlanFiltering,omitempty"`
}

// Up says that it was set up (IFF_UP).
func (l Link) Up() bool { return l.Flags&unix.IFF_UP != 0 }

// Carrier says that there is something at the other end (IFF_LOWER_UP).
func (l Link) Carrier() bool { return l.Flags&unix.IFF_LOWER_UP != 0 }

// links lists all of the namespace.
func (c *Conn) links(ctx context.Context) ([]Link, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var list []Link
	err := c.nl.Dump("list links", unix.RTM_GETLINK, func(e *nl.Encoder) {
		linkHeader(e, 0)
		// Without the counters an answer is half as long.
		e.Uint32(unix.IFLA_EXT_MASK, skipStats)
	}, func(m nl.Message) error {
		if m.Header.Type != unix.RTM_NEWLINK {
			return nil
		}
		l, err := decodeLink(m.Data)
		list = append(list, l)
		return err
	})
	return list, err
}

// index gives a link's index by its name, 0 where there is none.
func (c *Conn) index(ctx context.Context, name string) (int, error) {
	l, err := c.bridge.Link(ctx, name)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return l.Index, nil
}

// linkHeader appends struct ifinfomsg (include/uapi/linux/rtnetlink.h).
func linkHeader(e *nl.Encoder, index int) {
	var b [unix.SizeofIfInfomsg]byte
	binary.NativeEndian.PutUint32(b[4:], uint32(index))
	e.Raw(b[:])
}

// appendMaster makes a link a port of another, or with 0 of none. Nothing else of
// it is touched; above all it stays up.
func appendMaster(b *nl.Batch, name string, index, master int) {
	b.Request("set master of", nl.Name(name), unix.RTM_NEWLINK, 0, func(e *nl.Encoder) {
		linkHeader(e, index)
		e.Uint32(unix.IFLA_MASTER, uint32(master))
	})
}

// decodeLink reads the data of an RTM_NEWLINK.
func decodeLink(b []byte) (Link, error) {
	if len(b) < unix.SizeofIfInfomsg {
		return Link{}, fmt.Errorf("%w: a link of %d bytes", nl.ErrMalformed, len(b))
	}
	l := Link{
		Type:  binary.NativeEndian.Uint16(b[2:]),
		Index: int(int32(binary.NativeEndian.Uint32(b[4:]))),
		Flags: binary.NativeEndian.Uint32(b[8:]),
	}
	elsewhere := false
	attrs := nl.ParseAttrs(b[unix.SizeofIfInfomsg:])
	for attrs.Next() {
		var err error
		switch attrs.Type {
		case unix.IFLA_IFNAME:
			l.Name = attrs.String()
		case unix.IFLA_ADDRESS:
			l.MAC = macString(attrs.Data)
		case unix.IFLA_MTU:
			l.MTU = int(attrs.Uint32())
		case unix.IFLA_MASTER:
			l.Master = int(attrs.Uint32())
		case unix.IFLA_LINK:
			l.Lower = int(attrs.Uint32())
		case unix.IFLA_LINK_NETNSID:
			elsewhere = true // Lower is an index of another namespace
		case unix.IFLA_IFALIAS:
			l.Alias = attrs.String()
		case unix.IFLA_XDP:
			l.XDP, err = decodeXDP(attrs.Nested())
		case unix.IFLA_LINKINFO:
			err = l.decodeInfo(attrs.Nested())
		}
		if err != nil {
			return Link{}, err
		}
	}
	if elsewhere || l.Kind == "veth" {
		l.Lower = 0 // of a veth it is the other end
	}
	return l, attrs.Err()
}

func decodeXDP(attrs *nl.Attrs) (attached bool, _ error) {
	for attrs.Next() {
		if attrs.Type == unix.IFLA_XDP_ATTACHED {
			attached = attrs.Uint8() != 0
		}
	}
	return attached, attrs.Err()
}

func (l *Link) decodeInfo(attrs *nl.Attrs) error {
	for attrs.Next() {
		switch attrs.Type {
		case unix.IFLA_INFO_KIND:
			l.Kind = attrs.String()
		case unix.IFLA_INFO_SLAVE_KIND:
			l.PortOf = attrs.String()
		case unix.IFLA_INFO_DATA:
			// The kernel writes the kind first; each kind numbers its own.
			if err := l.decodeData(attrs.Nested()); err != nil {
				return err
			}
		}
	}
	return attrs.Err()
}

func (l *Link) decodeData(attrs *nl.Attrs) error {
	if l.Kind != "bridge" && l.Kind != "vxlan" {
		return nil
	}
	for attrs.Next() {
		switch {
		case l.Kind == "vxlan" && attrs.Type == unix.IFLA_VXLAN_LINK:
			l.Lower = int(attrs.Uint32())
		case l.Kind == "vxlan" && (attrs.Type == unix.IFLA_VXLAN_GROUP || attrs.Type == unix.IFLA_VXLAN_GROUP6):
			l.Remote = true
		case l.Kind == "bridge" && attrs.Type == unix.IFLA_BR_STP_STATE:
			l.STP = attrs.Uint32() != 0
		case l.Kind == "bridge" && attrs.Type == unix.IFLA_BR_VLAN_FILTERING:
			l.VLANFiltering = attrs.Uint8() != 0
		}
	}
	return attrs.Err()
}

// find gives the link of a name.
func find(list []Link, name string) *Link {
	i := slices.IndexFunc(list, func(l Link) bool { return l.Name == name })
	if i < 0 {
		return nil
	}
	return &list[i]
}

func macString(b []byte) string { return net.HardwareAddr(b).String() }
