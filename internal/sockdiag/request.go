package sockdiag

import (
	"encoding/binary"
	"fmt"
	"slices"
	"sort"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// question is one dump: sockets of one protocol and family, at any of some ports, or
// bound to a link.
type question struct {
	proto  uint8
	family uint8
	ports  []uint16
	link   int
}

// portsAtOnce bounds the filter of one question: 12 bytes a port, where the kernel's
// jumps reach 64 KiB.
const portsAtOnce = 1000

// ask makes the questions of what is wanted.
func ask(wants []Want) ([]question, error) {
	var list []question
	for _, w := range wants {
		if err := w.check(); err != nil {
			return nil, err
		}
	}
	for _, proto := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP} {
		var v4, all []uint16
		for _, w := range wants {
			if w.Proto != proto {
				continue
			}
			all = append(all, w.Port)
			if !w.Addr.IsValid() || w.Addr.Unmap().Is4() {
				v4 = append(v4, w.Port)
			}
		}
		list = append(list, chunks(proto, unix.AF_INET, v4)...)
		// IPv6 sockets may take IPv4 too.
		list = append(list, chunks(proto, unix.AF_INET6, all)...)
	}
	return list, nil
}

func chunks(proto, family uint8, ports []uint16) []question {
	sort.Slice(ports, func(i, j int) bool { return ports[i] < ports[j] })
	var list []question
	for part := range slices.Chunk(slices.Compact(ports), portsAtOnce) {
		list = append(list, question{proto: proto, family: family, ports: part})
	}
	return list
}

// String gives protocol, family and ports.
func (q *question) String() string {
	family := "IPv4"
	if q.family == unix.AF_INET6 {
		family = "IPv6"
	}
	switch {
	case q.link != 0:
		return fmt.Sprintf("%s sockets of %s on link %d", protoName(q.proto), family, q.link)
	case len(q.ports) == 1:
		return fmt.Sprintf("%s sockets of %s at port %d", protoName(q.proto), family, q.ports[0])
	}
	return fmt.Sprintf("%s sockets of %s at %d ports", protoName(q.proto), family, len(q.ports))
}

// The states of sockets (include/net/tcp_states.h). UDP has two of TCP's: CLOSE, and
// ESTABLISHED when it is connected.
const (
	stateClose  = 7
	stateListen = 10
)

// state is the one in which a socket of the protocol receives from anybody.
func state(proto uint8) uint8 {
	if proto == unix.IPPROTO_UDP {
		return stateClose
	}
	return stateListen
}

const (
	reqLen      = 56 // struct inet_diag_req_v2
	reqBytecode = 1  // INET_DIAG_REQ_BYTECODE
	everyState  = 1<<32 - 1
)

// message has struct inet_diag_req_v2. The kernel has a field for one port; more need a
// program. SCTP disregards that, and lists all that listen.
func (q *question) message() (netlink.Message, error) {
	b := make([]byte, reqLen)
	b[0], b[1] = q.family, q.proto
	states := uint32(1) << state(q.proto)
	if q.link != 0 {
		states = everyState
	}
	binary.NativeEndian.PutUint32(b[4:], states)
	if len(q.ports) == 1 {
		binary.BigEndian.PutUint16(b[8:], q.ports[0])
	}
	return nl.Encode(unix.SOCK_DIAG_BY_FAMILY, 0, b, func(ae *netlink.AttributeEncoder) {
		switch {
		case q.link != 0:
			ae.Bytes(reqBytecode, boundTo(q.link))
		case len(q.ports) > 1:
			ae.Bytes(reqBytecode, program(q.ports))
		}
	})
}

// Instructions of a filter (INET_DIAG_BC_*). Each is struct inet_diag_bc_op: code,
// and how far to go on in bytes, by "yes" or by "no".
const (
	opJump     = 1  // INET_DIAG_BC_JMP: by "no", always
	opDevice   = 9  // INET_DIAG_BC_DEV_COND: its index is the next instruction
	opSourceIs = 11 // INET_DIAG_BC_S_EQ: the port is in the "no" of the next instruction
	opLen      = 4
	perPort    = 3 * opLen
)

// program accepts a socket that has any of the ports: one that ends exactly at the
// end is accepted, one that jumps past it is not.
//
//	is it ports[0]? no: go on with the next comparison
//	jump to the end
//	is it ports[1]? …
//	is it the last? no: jump past the end
func program(ports []uint16) []byte {
	b := make([]byte, 0, perPort*len(ports))
	end := perPort*len(ports) - opLen
	op := func(code, yes uint8, no uint16) {
		b = append(b, code, yes)
		b = binary.NativeEndian.AppendUint16(b, no)
	}
	for _, port := range ports {
		op(opSourceIs, 2*opLen, perPort)
		op(0, 0, port)
		if len(b) < end {
			op(opJump, opLen, uint16(end-len(b)))
		}
	}
	return b
}

// boundTo accepts a socket that is bound to a link: "no" jumps past the end.
func boundTo(link int) []byte {
	b := []byte{opDevice, 2 * opLen}
	b = binary.NativeEndian.AppendUint16(b, 3*opLen)
	return binary.NativeEndian.AppendUint32(b, uint32(link))
}
