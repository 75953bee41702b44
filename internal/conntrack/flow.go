package conntrack

import (
	"fmt"
	"net/netip"
	"strconv"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Flow is an entry of the connection tracking.
type Flow struct {
	// ID tells flows with the same tuple apart, those before from those after. The
	// kernel computes it of the tuple and of where the entry is in memory: it is the
	// same again where an entry takes its predecessor's place there.
	ID uint32
	// Proto is the IP protocol's number.
	Proto uint8
	// Zone is the zone of both directions; 0 is the default.
	Zone uint16
	// Status has the IPS_* bits (include/uapi/linux/netfilter/nf_conntrack_common.h).
	Status uint32
	// Orig is the tuple of the direction in which the flow began, before any
	// translation, and Reply that of the answers before theirs.
	Orig, Reply Tuple

	// tuple is the kernel's attribute that Orig was read from. It goes back as it is:
	// some protocols have more in it than addresses and ports.
	tuple []byte
}

// Tuple is one direction of a flow. Ports are 0 where the protocol has none.
type Tuple struct{ Src, Dst netip.AddrPort }

// String gives "source > destination".
func (t Tuple) String() string { return t.Src.String() + " > " + t.Dst.String() }

// encodeTuple writes what names the flow, whichever one has the tuple.
func (f *Flow) encodeTuple(ae *netlink.AttributeEncoder) {
	ae.Bytes(attrTupleOrig|netlink.Nested, f.tuple)
	if f.Zone != 0 {
		ae.Uint16(attrZone, f.Zone)
	}
}

// String gives the protocol and both tuples.
func (f Flow) String() string {
	return fmt.Sprintf("%s %s, answered %s", protoName(f.Proto), f.Orig, f.Reply)
}

func protoName(p uint8) string {
	switch p {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_SCTP:
		return "sctp"
	case unix.IPPROTO_ICMP:
		return "icmp"
	case unix.IPPROTO_ICMPV6:
		return "icmpv6"
	}
	return strconv.Itoa(int(p))
}

func hasPorts(p uint8) bool {
	switch p {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP, unix.IPPROTO_DCCP, unix.IPPROTO_UDPLITE:
		return true
	}
	return false
}
