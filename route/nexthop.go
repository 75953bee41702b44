package route

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// NexthopObject is a next hop that has a number, by which routes share it (Linux
// 5.3): Route.NexthopID. To replace it moves all of those routes at once.
type NexthopObject struct {
	// ID is the number, not 0.
	ID uint32
	// Family is unix.AF_INET or unix.AF_INET6; 0 is that of Gateway. A group has none.
	Family uint8
	// Gateway is the next hop, and Link the index of the link to send to. With a Link
	// alone, destinations are neighbours themselves.
	Gateway netip.Addr
	Link    int
	// OnLink says that Gateway is on Link though no route says so.
	OnLink bool
	// Blackhole drops what is sent here, in place of Gateway and Link.
	Blackhole bool
	// FDB makes it one for the forwarding tables of VXLAN links.
	FDB bool
	// Group are the objects to choose from for each flow, in place of all of these.
	Group []NexthopMember
	// Resilient says of a group that flows keep their member when others come and go
	// (NEXTHOP_GRP_TYPE_RES, Linux 5.13). Its buckets are not shown here, and such a
	// group cannot be added.
	Resilient bool
	// Protocol is its origin; 0 is ProtocolTombolo when it is added.
	Protocol Protocol
	// Flags are the kernel's own, and not sent.
	Flags Flags
	// Other are attributes (NHA_*) that the kernel gave and this package has no field
	// for: encapsulation. They are sent as they are.
	Other []netlink.Attribute
}

// NexthopMember is one of a group.
type NexthopMember struct {
	ID uint32
	// Weight is this one's share of the flows: 1 to 256, or since Linux 6.12 to 65535;
	// 0 is 1.
	Weight int
}

// Attributes of include/uapi/linux/nexthop.h, and their values.
const (
	nhaID        = 1  // NHA_ID
	nhaGroup     = 2  // NHA_GROUP: an array of struct nexthop_grp
	nhaGroupType = 3  // NHA_GROUP_TYPE
	nhaBlackhole = 4  // NHA_BLACKHOLE
	nhaLink      = 5  // NHA_OIF
	nhaGateway   = 6  // NHA_GATEWAY
	nhaEncap     = 8  // NHA_ENCAP
	nhaFDB       = 11 // NHA_FDB
	nhaOpFlags   = 14 // NHA_OP_FLAGS
	nhaStats     = 15 // NHA_GROUP_STATS
	nhaStatsUsed = 17 // NHA_HW_STATS_USED

	nhGroupLen       = 8 // sizeof struct nexthop_grp
	nhGroupResilient = 1 // NEXTHOP_GRP_TYPE_RES
	nhMsgLen         = 8 // sizeof struct nhmsg
)

const (
	errNexthopID     = nl.Invalid("a nexthop object needs a number")
	errNexthopFamily = nl.Invalid("a nexthop object without a gateway needs its family")
	errNexthopRes    = nl.Invalid("this package cannot say what buckets the group has")
)

// String names the object as errors do: "7: via 10.1.0.1 on link 3".
func (n NexthopObject) String() string {
	var b strings.Builder
	b.WriteString(strconv.FormatUint(uint64(n.ID), 10))
	b.WriteByte(':')
	switch {
	case n.Blackhole:
		b.WriteString(" blackhole")
	case len(n.Group) > 0:
		b.WriteString(" group")
		for _, m := range n.Group {
			b.WriteString(" " + strconv.FormatUint(uint64(m.ID), 10))
		}
	}
	writeHop(&b, n.Gateway, n.Link)
	return b.String()
}

// NexthopFilter says which nexthop objects to list. The zero value of a field is
// any.
type NexthopFilter struct {
	Link int // a link's index
}

// NexthopObjects gives the nexthop objects that match a filter, which the kernel
// applies, by number. A kernel without such objects has none.
func (c *Conn) NexthopObjects(f NexthopFilter) ([]NexthopObject, error) {
	if err := c.usable(); err != nil {
		return nil, err
	}

	var list []NexthopObject
	ask, err := nl.Encode(unix.RTM_GETNEXTHOP, 0, nhmsg(0, 0, 0), func(ae *netlink.AttributeEncoder) {
		if f.Link != 0 {
			ae.Uint32(nhaLink, nl.Index(f.Link))
		}
	})
	err = c.nl.List("list nexthop objects", ask, err, func(m netlink.Message) error {
		if m.Header.Type != unix.RTM_NEWNEXTHOP {
			return nil
		}
		n, err := decodeNexthop(m.Data)
		list = append(list, n)
		return err
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	return list, err
}

// AddNexthopObject adds an object. The error matches fs.ErrExist where its number is
// taken.
func (c *Conn) AddNexthopObject(n NexthopObject) error {
	m, err := n.AddMessage()
	return c.change("add nexthop object", &n, m, err)
}

// ReplaceNexthopObject adds an object, or changes the one of its number, and with
// it each route that has it.
func (c *Conn) ReplaceNexthopObject(n NexthopObject) error {
	m, err := n.ReplaceMessage()
	return c.change("replace nexthop object", &n, m, err)
}

// DelNexthopObject deletes an object by its number, and the routes that have it. The
// error matches fs.ErrNotExist where there is none.
func (c *Conn) DelNexthopObject(id uint32) error {
	n := NexthopObject{ID: id}
	m, err := n.DelMessage()
	return c.change("delete nexthop object", &n, m, err)
}

// RemoveNexthopObject is DelNexthopObject for which an object that is not there is
// success.
func (c *Conn) RemoveNexthopObject(id uint32) error {
	if err := c.usable(); err != nil {
		return err
	}
	return absentIsSuccess(c.DelNexthopObject(id))
}

// AddMessage gives the request of Conn.AddNexthopObject, for callers that put several
// requests into one datagram.
func (n NexthopObject) AddMessage() (netlink.Message, error) {
	n.Protocol = n.protocol()
	return n.message(netlink.Create | netlink.Excl)
}

// ReplaceMessage gives the request of Conn.ReplaceNexthopObject.
func (n NexthopObject) ReplaceMessage() (netlink.Message, error) {
	n.Protocol = n.protocol()
	return n.message(netlink.Create | netlink.Replace)
}

// DelMessage gives the request of Conn.DelNexthopObject.
func (n NexthopObject) DelMessage() (netlink.Message, error) {
	return nl.Encode(unix.RTM_DELNEXTHOP, 0, nhmsg(0, 0, 0), func(ae *netlink.AttributeEncoder) { ae.Uint32(nhaID, n.ID) })
}

// nhmsg is struct nhmsg.
func nhmsg(family, protocol uint8, flags Flags) []byte {
	h := [nhMsgLen]byte{family, 0, protocol}
	binary.NativeEndian.PutUint32(h[4:], uint32(flags))
	return h[:]
}

func (n *NexthopObject) family() uint8 {
	if n.Family == 0 && n.Gateway.IsValid() {
		return familyOf(n.Gateway)
	}
	return n.Family
}

func (n *NexthopObject) protocol() Protocol {
	if n.Protocol == 0 {
		return ProtocolTombolo
	}
	return n.Protocol
}

func (n *NexthopObject) message(flags netlink.HeaderFlags) (netlink.Message, error) {
	family := n.family()
	switch {
	case n.ID == 0:
		return netlink.Message{}, errNexthopID
	case n.Resilient:
		return netlink.Message{}, errNexthopRes
	case len(n.Group) > 0:
		family = unix.AF_UNSPEC
	case family == 0:
		return netlink.Message{}, errNexthopFamily
	}
	var hop Flags
	if n.OnLink {
		hop = onLink
	}
	return nl.Encode(unix.RTM_NEWNEXTHOP, flags, nhmsg(family, uint8(n.Protocol), hop), n.attributes)
}

func (n *NexthopObject) attributes(ae *netlink.AttributeEncoder) {
	ae.Uint32(nhaID, n.ID)
	ae.Flag(nhaFDB, n.FDB)
	nl.PutOther(ae, n.Other)
	switch {
	case len(n.Group) > 0:
		ae.Do(nhaGroup, n.group)
		return
	case n.Blackhole:
		ae.Flag(nhaBlackhole, true)
		return
	case n.Link != 0:
		ae.Uint32(nhaLink, nl.Index(n.Link))
	}
	if n.Gateway.IsValid() {
		nl.PutAddr(ae, nhaGateway, n.Gateway)
	}
}

// group is an array of struct nexthop_grp.
func (n *NexthopObject) group() ([]byte, error) {
	b := make([]byte, 0, nhGroupLen*len(n.Group))
	for _, m := range n.Group {
		if m.Weight < 0 || m.Weight > 0xffff {
			return nil, nl.Invalid(fmt.Sprintf("weight %d of a group's member is not within 1 and 65535", m.Weight))
		}
		weight := max(m.Weight, 1) - 1
		b = binary.NativeEndian.AppendUint32(b, m.ID)
		b = append(b, uint8(weight&0xff), uint8(weight>>8), 0, 0)
	}
	return b, nil
}

// decodeNexthop reads the data of an RTM_NEWNEXTHOP.
func decodeNexthop(data []byte) (NexthopObject, error) {
	if len(data) < nhMsgLen {
		return NexthopObject{}, fmt.Errorf("%w: a nexthop object of %d bytes", nl.ErrMalformed, len(data))
	}
	n := NexthopObject{
		Family:   data[0],
		Protocol: Protocol(data[2]),
		Flags:    Flags(binary.NativeEndian.Uint32(data[4:])),
	}
	n.OnLink = n.Flags&onLink != 0
	err := nl.Decode(data[nhMsgLen:], func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case nhaID:
			n.ID = ad.Uint32()
		case nhaGroup:
			ad.Do(func(b []byte) error {
				var err error
				n.Group, err = decodeGroup(b)
				return err
			})
		case nhaGroupType:
			n.Resilient = ad.Uint16() == nhGroupResilient
		case nhaBlackhole:
			n.Blackhole = true
		case nhaLink:
			n.Link = int(int32(ad.Uint32()))
		case nhaGateway:
			ad.Do(nl.Addr(&n.Gateway))
		case nhaFDB:
			n.FDB = true
		case nhaOpFlags, nhaStats, nhaStatsUsed: // the kernel's own
		case nhaEncap: // listed without a flag that a request has to have
			n.Other = append(n.Other, netlink.Attribute{Type: nhaEncap | netlink.Nested, Data: ad.Bytes()})
		default:
			n.Other = append(n.Other, nl.Keep(ad))
		}
		return nil
	})
	if err != nil {
		return NexthopObject{}, err
	}
	if n.ID == 0 {
		return NexthopObject{}, fmt.Errorf("%w: a nexthop object without a number", nl.ErrMalformed)
	}
	if n.Gateway.IsValid() && familyOf(n.Gateway) != n.Family {
		return NexthopObject{}, fmt.Errorf("%w: family %d, gateway %s", nl.ErrMalformed, n.Family, n.Gateway)
	}
	return n, nil
}

func decodeGroup(b []byte) ([]NexthopMember, error) {
	if len(b)%nhGroupLen != 0 || len(b) == 0 {
		return nil, fmt.Errorf("%w: a group of %d bytes", nl.ErrMalformed, len(b))
	}
	var list []NexthopMember
	for ; len(b) > 0; b = b[nhGroupLen:] {
		weight := int(b[4]) + int(b[5])<<8 + 1
		if weight > 0xffff { // which no kernel takes (nexthop_grp_weight() of net/nexthop.h)
			return nil, fmt.Errorf("%w: a group's member of weight %d", nl.ErrMalformed, weight)
		}
		list = append(list, NexthopMember{ID: binary.NativeEndian.Uint32(b), Weight: weight})
	}
	return list, nil
}
