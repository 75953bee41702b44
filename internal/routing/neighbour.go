package routing

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"github.com/jsimonetti/rtnetlink/v2"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

const (
	ndaFlagsExt = 15 // NDA_FLAGS_EXT, Linux 5.16
	ntfExtShift = 8  // NTF_EXT_SHIFT: the kernel's position of that attribute's flags
)

// NeighbourEntry is an entry in the neighbour table of a link, which is the ARP cache for IPv4 and the neighbour cache
// for IPv6.
type NeighbourEntry struct {
	Addr netip.Addr
	MAC  net.HardwareAddr // empty until the neighbour has answered
	Link int              // the link's index
	// State is the kernel's state of the entry. In a request, 0 means Permanent.
	State State
	Flags NeighbourFlags
	// Other holds attributes (NDA_*) that this package has no field for. Requests contain them unchanged.
	Other []netlink.Attribute
}

// State is the state of a neighbour entry (NUD_* of linux/neighbour.h).
type State uint16

// These are some states of a neighbour entry.
const (
	Reachable State = unix.NUD_REACHABLE // confirmed recently
	Stale     State = unix.NUD_STALE     // must be confirmed at its next use
	Delay     State = unix.NUD_DELAY     // used, and waiting for a confirmation
	Probe     State = unix.NUD_PROBE     // the kernel is asking
	Failed    State = unix.NUD_FAILED    // did not answer
	NoARP     State = unix.NUD_NOARP     // never asked, may be evicted
	Permanent State = unix.NUD_PERMANENT // set by a program: never asked, never evicted
)

// NeighbourFlags are the flags of a neighbour entry. The lower eight bits are NTF_*, and the others NTF_EXT_*.
type NeighbourFlags uint32

// Use makes the kernel resolve the MAC at once, as for a packet to the neighbour.
const Use NeighbourFlags = unix.NTF_USE

// String returns the neighbour's name for errors, such as "10.1.0.2 on link 3".
func (n NeighbourEntry) String() string { return n.Addr.String() + " on link " + strconv.Itoa(n.Link) }

// Neighbours returns the neighbour entries of all links.
func Neighbours(c *nl.Conn) ([]NeighbourEntry, error) {
	var list []NeighbourEntry
	ask, err := nl.Marshal(unix.RTM_GETNEIGH, 0, (&rtnetlink.NeighMessage{}).MarshalBinary, nil)
	err = c.List(context.Background(), "list neighbours", ask, err, func(m netlink.Message) error {
		if m.Header.Type != unix.RTM_NEWNEIGH {
			return nil
		}
		n, known, err := decodeNeighbour(m.Data)
		if known {
			list = append(list, n)
		}
		return err
	})

	return list, err
}

// Find returns the neighbour entry of an address on a link (Linux 5.0). If there is none, the error matches
// fs.ErrNotExist.
func Find(c *nl.Conn, link int, a netip.Addr) (NeighbourEntry, error) {
	want := NeighbourEntry{Addr: a, Link: link}
	var got NeighbourEntry
	m, err := want.identity(unix.RTM_GETNEIGH)
	var b nl.Batch
	b.AddGet("find neighbour", &want, m, err, func(m netlink.Message) error {
		var err error
		got, _, err = decodeNeighbour(m.Data)
		return err
	})
	err = c.Execute(&b)
	return got, err
}

// Replace adds entries. It overwrites existing entries with the same addresses. op names the work in errors.
func Replace(conn *nl.Conn, op string, entries ...NeighbourEntry) error {
	var b nl.Batch
	for _, entry := range entries {
		m, err := entry.ReplaceMessage()
		b.Add(op, entry, m, err)
	}
	return conn.Execute(&b)
}

// ReplaceMessage returns a request that adds an entry, or overwrites the existing entry of the same address. It is
// for callers that send several requests in one datagram.
func (n NeighbourEntry) ReplaceMessage() (netlink.Message, error) {
	return n.newMessage(netlink.Create | netlink.Replace)
}

// DelMessage returns a request that deletes the entry of an address on a link. If there is no entry, the kernel's
// answer is an error that matches fs.ErrNotExist.
func (n NeighbourEntry) DelMessage() (netlink.Message, error) { return n.identity(unix.RTM_DELNEIGH) }

// identity returns a request about the entry of an address. The library's encoder would add attributes that the
// kernel refuses in a strict get.
func (n *NeighbourEntry) identity(typ netlink.HeaderType) (netlink.Message, error) {
	body := &rtnetlink.NeighMessage{Family: uint16(nl.FamilyOf(n.Addr)), Index: nl.Index(n.Link)}
	return nl.Marshal(typ, 0, body.MarshalBinary,
		func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, unix.NDA_DST, n.Addr) })
}

// newMessage returns a request that contains the entry. It encodes an IPv4 address in 4 bytes: from 16 bytes the
// kernel would use only the first four. The library does not support an entry without a MAC.
func (n *NeighbourEntry) newMessage(flags netlink.HeaderFlags) (netlink.Message, error) {
	body := &rtnetlink.NeighMessage{
		Family: uint16(nl.FamilyOf(n.Addr)), Index: nl.Index(n.Link), State: uint16(n.State), Flags: uint8(n.Flags),
	}
	if n.State == 0 {
		body.State = uint16(Permanent)
	}

	if len(n.MAC) > 0 && n.Addr.IsValid() {
		body.Attributes = &rtnetlink.NeighAttributes{Address: n.Addr.AsSlice(), LLAddress: n.MAC,
			IfIndex: nl.Index(n.Link)}
	}

	return nl.Marshal(unix.RTM_NEWNEIGH, flags, body.MarshalBinary, func(ae *netlink.AttributeEncoder) {
		if body.Attributes == nil {
			nl.PutAddr(ae, unix.NDA_DST, n.Addr)
		}
		if more := n.Flags >> ntfExtShift; more != 0 {
			ae.Uint32(ndaFlagsExt, uint32(more))
		}
		nl.PutOther(ae, n.Other)
	})
}

// decodeNeighbour parses the data of an RTM_NEWNEIGH. known is false if the family is neither IPv4 nor IPv6, as for a
// bridge's forwarding table.
func decodeNeighbour(data []byte) (n NeighbourEntry, known bool, _ error) {
	if len(data) < unix.SizeofNdMsg {
		return NeighbourEntry{}, false, fmt.Errorf("%w: a neighbour of %d bytes", nl.ErrMalformed, len(data))
	}

	family := data[0]
	if family != unix.AF_INET && family != unix.AF_INET6 {
		return NeighbourEntry{}, false, nil
	}

	n = NeighbourEntry{
		Link:  int(int32(binary.NativeEndian.Uint32(data[4:]))),
		State: State(binary.NativeEndian.Uint16(data[8:])),
		Flags: NeighbourFlags(data[10]),
	}
	err := nl.Decode(data[unix.SizeofNdMsg:], func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.NDA_DST:
			ad.Do(nl.Addr(&n.Addr))
		case unix.NDA_LLADDR:
			n.MAC = ad.Bytes()
		case ndaFlagsExt:
			n.Flags |= NeighbourFlags(ad.Uint32()) << ntfExtShift
		case unix.NDA_CACHEINFO, unix.NDA_PROBES: // computed by the kernel
		case unix.NDA_UNSPEC, unix.NDA_IFINDEX: // rtnetlink writes these into each request
		default:
			n.Other = append(n.Other, nl.Keep(ad))
		}
	})
	if err != nil {
		return NeighbourEntry{}, false, err
	}

	if !n.Addr.IsValid() || nl.FamilyOf(n.Addr) != family {
		return NeighbourEntry{}, false, fmt.Errorf("%w: family %d, neighbour %s", nl.ErrMalformed, family, n.Addr)
	}

	return n, true, nil
}
