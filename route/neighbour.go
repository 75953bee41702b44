package route

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

const ndaProtocol = 12 // NDA_PROTOCOL, Linux 5.0

// Neighbour is an entry of the neighbour table of a link: the ARP cache of IPv4,
// and that of neighbour discovery of IPv6.
type Neighbour struct {
	Addr netip.Addr
	MAC  net.HardwareAddr // empty while it is being looked for
	Link int              // the link's index
	// State is how sure the kernel is of the MAC; 0 is Permanent when it is written.
	State State
	Flags NeighbourFlags
	// Protocol says who made the entry. The kernel sets none; nor does this package.
	Protocol Protocol
}

// State is the state of a neighbour (NUD_* of linux/neighbour.h).
type State uint16

// The states.
const (
	Incomplete State = unix.NUD_INCOMPLETE // being looked for
	Reachable  State = unix.NUD_REACHABLE  // confirmed lately
	Stale      State = unix.NUD_STALE      // to be confirmed at its next use
	Delay      State = unix.NUD_DELAY      // used, and waiting for a confirmation
	Probe      State = unix.NUD_PROBE      // being asked
	Failed     State = unix.NUD_FAILED     // did not answer
	NoARP      State = unix.NUD_NOARP      // never to be asked, may be evicted
	Permanent  State = unix.NUD_PERMANENT  // set by hand: never asked, never evicted
)

// NeighbourFlags are the flags of a neighbour (NTF_*).
type NeighbourFlags uint8

// The flags.
const (
	Proxy           NeighbourFlags = unix.NTF_PROXY // answer for this address; such entries are in a table of their own
	Router          NeighbourFlags = unix.NTF_ROUTER
	ExternalLearned NeighbourFlags = unix.NTF_EXT_LEARNED // kept up to date by a program
)

// String names the neighbour as errors do: "10.1.0.2 on link 3".
func (n Neighbour) String() string { return n.Addr.String() + " on link " + strconv.Itoa(n.Link) }

// NeighbourFilter says which neighbours to list. The zero value of a field is any.
type NeighbourFilter struct {
	Family uint8 // unix.AF_INET or unix.AF_INET6
	Link   int   // a link's index
	// Proxy is for those with the flag Proxy, and only those: they are in a table of
	// their own.
	Proxy bool
}

// Neighbours gives the neighbours that match a filter, which the kernel applies. A
// link that is not there has none.
func (c *Conn) Neighbours(f NeighbourFilter) ([]Neighbour, error) {
	if err := c.usable(); err != nil {
		return nil, err
	}

	var list []Neighbour
	err := c.nl.Dump("list neighbours", unix.RTM_GETNEIGH, func(e *nl.Encoder) {
		// Strict checking refuses a link in the header: it has to be an attribute.
		header := ndmsg{family: f.Family}
		if f.Proxy {
			header.flags = Proxy
		}
		header.encode(e)
		if f.Link != 0 {
			e.Uint32(unix.NDA_IFINDEX, uint32(f.Link))
		}
	}, func(m nl.Message) error {
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

// Neighbour gives the entry of an address on a link (Linux 5.0). The error matches
// fs.ErrNotExist where there is none.
func (c *Conn) Neighbour(link int, a netip.Addr) (Neighbour, error) {
	if err := c.usable(); err != nil {
		return Neighbour{}, err
	}

	want := Neighbour{Addr: a, Link: link}
	var got Neighbour
	var b nl.Batch
	b.Get("find neighbour", &want, unix.RTM_GETNEIGH, 0, func(e *nl.Encoder) {
		ndmsg{family: familyOf(a), link: link}.encode(e)
		e.Addr(unix.NDA_DST, a)
	}, func(m nl.Message) error {
		var err error
		got, _, err = decodeNeighbour(m.Data)
		return err
	})
	err := c.nl.Execute(&b)
	return got, err
}

// AddNeighbour adds an entry. The error matches fs.ErrExist where the link has one
// for the address, in whatever state.
func (c *Conn) AddNeighbour(n Neighbour) error {
	if err := c.usable(); err != nil {
		return err
	}

	var b nl.Batch
	n.AppendAdd(&b)
	return c.nl.Execute(&b)
}

// ReplaceNeighbour adds an entry or overwrites the one of its address.
func (c *Conn) ReplaceNeighbour(n Neighbour) error {
	if err := c.usable(); err != nil {
		return err
	}

	var b nl.Batch
	n.AppendReplace(&b)
	return c.nl.Execute(&b)
}

// DelNeighbour deletes the entry of an address on a link. The error matches
// fs.ErrNotExist where there is none.
func (c *Conn) DelNeighbour(n Neighbour) error {
	if err := c.usable(); err != nil {
		return err
	}

	var b nl.Batch
	n.AppendDel(&b)
	return c.nl.Execute(&b)
}

// RemoveNeighbour is DelNeighbour for which an entry or a link that is not there
// is success.
func (c *Conn) RemoveNeighbour(n Neighbour) error {
	if err := c.usable(); err != nil {
		return err
	}
	return absentIsSuccess(c.DelNeighbour(n))
}

// AppendAdd appends the request of Conn.AddNeighbour to a batch, for packages of
// this module.
func (n Neighbour) AppendAdd(b *nl.Batch) {
	b.Request("add neighbour", &n, unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_EXCL, n.encode)
}

// AppendReplace appends the request of Conn.ReplaceNeighbour to a batch, for
// packages of this module.
func (n Neighbour) AppendReplace(b *nl.Batch) {
	b.Request("replace neighbour", &n, unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, n.encode)
}

// AppendDel appends the request of Conn.DelNeighbour to a batch, for packages of
// this module.
func (n Neighbour) AppendDel(b *nl.Batch) {
	b.Request("delete neighbour", &n, unix.RTM_DELNEIGH, 0, func(e *nl.Encoder) {
		ndmsg{family: familyOf(n.Addr), link: n.Link, flags: n.Flags & Proxy}.encode(e)
		e.Addr(unix.NDA_DST, n.Addr)
	})
}

// ndmsg is struct ndmsg (include/uapi/linux/neighbour.h).
type ndmsg struct {
	family uint8
	link   int
	state  State
	flags  NeighbourFlags
}

func (m ndmsg) encode(e *nl.Encoder) {
	h := [unix.SizeofNdMsg]byte{m.family}
	binary.NativeEndian.PutUint32(h[4:], uint32(m.link))
	binary.NativeEndian.PutUint16(h[8:], uint16(m.state))
	h[10] = uint8(m.flags)
	e.Raw(h[:])
}

// encode writes the address as it is: 4 bytes for IPv4. Of 16 the kernel would take
// the first four.
func (n *Neighbour) encode(e *nl.Encoder) {
	state := n.State
	if state == 0 {
		state = Permanent
	}
	ndmsg{family: familyOf(n.Addr), link: n.Link, state: state, flags: n.Flags}.encode(e)
	e.Addr(unix.NDA_DST, n.Addr)
	if len(n.MAC) > 0 {
		e.Bytes(unix.NDA_LLADDR, n.MAC)
	}
	if n.Protocol != 0 {
		e.Uint8(ndaProtocol, uint8(n.Protocol))
	}
}

// decodeNeighbour reads the data of an RTM_NEWNEIGH. known is false for the
// families that this package leaves alone, such as a bridge's forwarding table.
func decodeNeighbour(data []byte) (n Neighbour, known bool, _ error) {
	if len(data) < unix.SizeofNdMsg {
		return Neighbour{}, false, fmt.Errorf("%w: a neighbour of %d bytes", nl.ErrMalformed, len(data))
	}
	family := data[0]
	if family != unix.AF_INET && family != unix.AF_INET6 {
		return Neighbour{}, false, nil
	}
	n = Neighbour{
		Link:  int(int32(binary.NativeEndian.Uint32(data[4:]))),
		State: State(binary.NativeEndian.Uint16(data[8:])),
		Flags: NeighbourFlags(data[10]),
	}
	attrs := nl.ParseAttrs(data[unix.SizeofNdMsg:])
	for attrs.Next() {
		switch attrs.Type {
		case unix.NDA_DST:
			n.Addr = attrs.Addr()
		case unix.NDA_LLADDR:
			n.MAC = net.HardwareAddr(append([]byte(nil), attrs.Data...))
		case ndaProtocol:
			n.Protocol = Protocol(attrs.Uint8())
		}
	}
	if err := attrs.Err(); err != nil {
		return Neighbour{}, false, err
	}
	if !n.Addr.IsValid() || familyOf(n.Addr) != family {
		return Neighbour{}, false, fmt.Errorf("%w: family %d, neighbour %s", nl.ErrMalformed, family, n.Addr)
	}
	return n, true, nil
}
