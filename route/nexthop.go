package route

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

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
	// Protocol says who made it; 0 is ProtocolTombolo when it is added.
	Protocol Protocol
	// Flags are the kernel's own, and not sent.
	Flags Flags
	// Encapsulated says that the kernel wraps what is sent here, in a way that this
	// package has no field for. Such an object cannot be added.
	Encapsulated bool
}

// NexthopMember is one of a group.
type NexthopMember struct {
	ID uint32
	// Weight is this one's share of the flows: 1 to 256, 0 is 1. Linux 6.12 has more,
	// which are not read right here.
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

	nhGroupLen       = 8 // sizeof struct nexthop_grp
	nhGroupResilient = 1 // NEXTHOP_GRP_TYPE_RES
	nhMsgLen         = 8 // sizeof struct nhmsg
)

var (
	errNexthopID     = errors.New("a nexthop object needs a number")
	errNexthopFamily = errors.New("a nexthop object without a gateway needs its family")
	errNexthopRes    = errors.New("this package cannot say what buckets the group has")
	errNexthopEncap  = errors.New("this package cannot say how the object encapsulates")
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
// applies, by number. Where the kernel has no such objects, there are none.
func (c *Conn) NexthopObjects(f NexthopFilter) ([]NexthopObject, error) {
	if err := c.usable(); err != nil {
		return nil, err
	}

	var list []NexthopObject
	err := c.nl.Dump("list nexthop objects", unix.RTM_GETNEXTHOP, func(e *nl.Encoder) {
		nhmsg{}.encode(e)
		if f.Link != 0 {
			e.Uint32(nhaLink, uint32(f.Link))
		}
	}, func(m nl.Message) error {
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
	if err := c.usable(); err != nil {
		return err
	}

	var b nl.Batch
	n.AppendAdd(&b)
	return c.nl.Execute(&b)
}

// ReplaceNexthopObject adds an object, or changes the one of its number, and with
// it each route that has it.
func (c *Conn) ReplaceNexthopObject(n NexthopObject) error {
	if err := c.usable(); err != nil {
		return err
	}

	var b nl.Batch
	n.AppendReplace(&b)
	return c.nl.Execute(&b)
}

// DelNexthopObject deletes an object by its number, and the routes that have it. The
// error matches fs.ErrNotExist where there is none.
func (c *Conn) DelNexthopObject(id uint32) error {
	if err := c.usable(); err != nil {
		return err
	}

	var b nl.Batch
	NexthopObject{ID: id}.AppendDel(&b)
	return c.nl.Execute(&b)
}

// RemoveNexthopObject is DelNexthopObject for which an object that is not there is
// success.
func (c *Conn) RemoveNexthopObject(id uint32) error {
	if err := c.usable(); err != nil {
		return err
	}
	return absentIsSuccess(c.DelNexthopObject(id))
}

// AppendAdd appends the request of Conn.AddNexthopObject to a batch, for packages of
// this module.
func (n NexthopObject) AppendAdd(b *nl.Batch) {
	n.Protocol = n.protocol()
	b.Request("add nexthop object", &n, unix.RTM_NEWNEXTHOP, unix.NLM_F_CREATE|unix.NLM_F_EXCL, n.encode)
}

// AppendReplace appends the request of Conn.ReplaceNexthopObject to a batch, for
// packages of this module.
func (n NexthopObject) AppendReplace(b *nl.Batch) {
	n.Protocol = n.protocol()
	b.Request("replace nexthop object", &n, unix.RTM_NEWNEXTHOP, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, n.encode)
}

// AppendDel appends the request of Conn.DelNexthopObject to a batch, for packages of
// this module.
func (n NexthopObject) AppendDel(b *nl.Batch) {
	b.Request("delete nexthop object", &n, unix.RTM_DELNEXTHOP, 0, func(e *nl.Encoder) {
		nhmsg{}.encode(e)
		e.Uint32(nhaID, n.ID)
	})
}

// nhmsg is struct nhmsg.
type nhmsg struct {
	family, scope, protocol uint8
	flags                   uint32
}

func (m nhmsg) encode(e *nl.Encoder) {
	h := [nhMsgLen]byte{m.family, m.scope, m.protocol}
	binary.NativeEndian.PutUint32(h[4:], m.flags)
	e.Raw(h[:])
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

func (n *NexthopObject) encode(e *nl.Encoder) {
	h := nhmsg{family: n.family(), protocol: uint8(n.Protocol)}
	switch {
	case n.ID == 0:
		e.Fail(errNexthopID)
	case n.Encapsulated:
		e.Fail(errNexthopEncap)
	case n.Resilient:
		e.Fail(errNexthopRes)
	case len(n.Group) > 0:
		h.family = unix.AF_UNSPEC
	case h.family == 0:
		e.Fail(errNexthopFamily)
	}
	if n.OnLink {
		h.flags = uint32(onLink)
	}
	h.encode(e)
	e.Uint32(nhaID, n.ID)
	if n.FDB {
		e.Flag(nhaFDB)
	}
	switch {
	case len(n.Group) > 0:
		n.encodeGroup(e)
		return
	case n.Blackhole:
		e.Flag(nhaBlackhole)
		return
	case n.Link != 0:
		e.Uint32(nhaLink, uint32(n.Link))
	}
	if n.Gateway.IsValid() {
		e.Addr(nhaGateway, n.Gateway)
	}
}

func (n *NexthopObject) encodeGroup(e *nl.Encoder) {
	b := make([]byte, 0, nhGroupLen*len(n.Group))
	for _, m := range n.Group {
		if m.Weight < 0 || m.Weight > 256 {
			e.Fail(fmt.Errorf("weight %d of a group's member is not within 1 and 256", m.Weight))
			return
		}
		b = binary.NativeEndian.AppendUint32(b, m.ID)
		b = append(b, uint8(max(m.Weight, 1)-1), 0, 0, 0)
	}
	e.Bytes(nhaGroup, b)
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
	attrs := nl.ParseAttrs(data[nhMsgLen:])
	for attrs.Next() {
		var err error
		switch attrs.Type {
		case nhaID:
			n.ID = attrs.Uint32()
		case nhaGroup:
			n.Group, err = decodeGroup(attrs.Data)
		case nhaGroupType:
			n.Resilient = attrs.Uint16() == nhGroupResilient
		case nhaBlackhole:
			n.Blackhole = true
		case nhaLink:
			n.Link = int(int32(attrs.Uint32()))
		case nhaGateway:
			n.Gateway = attrs.Addr()
		case nhaEncap:
			n.Encapsulated = true
		case nhaFDB:
			n.FDB = true
		}
		if err != nil {
			return NexthopObject{}, err
		}
	}
	if err := attrs.Err(); err != nil {
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
		list = append(list, NexthopMember{ID: binary.NativeEndian.Uint32(b), Weight: int(b[4]) + 1})
	}
	return list, nil
}
