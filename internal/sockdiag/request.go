package sockdiag

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// question is one dump: sockets of one protocol and family; of these, where it is not 0, those
// at a port.
type question struct {
	proto  uint8
	family uint8
	port   uint16
}

// ask makes the questions of what is wanted.
func ask(wants []Want) ([]question, error) {
	var list []question
	add := func(q question) {
		if !slices.Contains(list, q) {
			list = append(list, q)
		}
	}
	port := onlyPort(wants)
	for _, w := range wants {
		if err := w.check(); err != nil {
			return nil, err
		}
		if !w.Addr.IsValid() || w.Addr.Unmap().Is4() {
			add(question{proto: w.Proto, family: unix.AF_INET, port: port})
		}
		// IPv6 sockets may take IPv4 too.
		add(question{proto: w.Proto, family: unix.AF_INET6, port: port})
	}
	return list, nil
}

// onlyPort gives the port that is wanted, or 0 if several are: the kernel has a field for one,
// and more would take a program.
func onlyPort(wants []Want) uint16 {
	if len(wants) == 0 || slices.ContainsFunc(wants, func(w Want) bool { return w.Port != wants[0].Port }) {
		return 0
	}
	return wants[0].Port
}

// String gives protocol and family.
func (q *question) String() string {
	family := "IPv4"
	if q.family == unix.AF_INET6 {
		family = "IPv6"
	}
	if q.port != 0 {
		return fmt.Sprintf("%s sockets of %s at port %d", protoName(q.proto), family, q.port)
	}
	return fmt.Sprintf("%s sockets of %s", protoName(q.proto), family)
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

const reqLen = 56 // struct inet_diag_req_v2

// message has struct inet_diag_req_v2.
func (q *question) message() (netlink.Message, error) {
	b := make([]byte, reqLen)
	b[0], b[1] = q.family, q.proto
	binary.NativeEndian.PutUint32(b[4:], 1<<state(q.proto))
	binary.BigEndian.PutUint16(b[8:], q.port)
	return nl.Encode(unix.SOCK_DIAG_BY_FAMILY, 0, b, nil)
}
