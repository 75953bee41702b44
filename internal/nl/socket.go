package nl

import (
	"errors"
	"fmt"
	"math"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/netns"
)

// Dial opens a netlink socket of a protocol (unix.NETLINK_ROUTE,
// unix.NETLINK_NETFILTER) with extended acknowledgements and strict checking of
// requests. It belongs to a namespace, whichever thread uses it; nil is that of the
// calling thread. It needs CAP_SYS_ADMIN where a namespace is given; what is sent over
// it will in general need CAP_NET_ADMIN.
func Dial(protocol int, ns *netns.NS) (*Conn, error) {
	t, err := Open(protocol, ns)
	if err != nil {
		return nil, err
	}
	return New(t), nil
}

// Open opens the socket of Dial alone, for a fake kernel that passes requests on.
func Open(protocol int, ns *netns.NS) (Transport, error) {
	var s *socket
	err := in(ns, func() error {
		var err error
		s, err = newSocket(protocol)
		return err
	})
	if err != nil {
		return nil, &tombolo.OpError{Op: "open netlink socket", Err: err}
	}
	return s, nil
}

// in calls open in a namespace; nil is that of the calling thread.
func in(ns *netns.NS, open func() error) error {
	if ns == nil {
		return open()
	}
	return ns.Do(open)
}

// socket is a netlink socket that the runtime's poller does not know. Requests to
// rtnetlink and nfnetlink are carried out within sendmsg, and their answers are
// queued by the time it returns, so nothing ever waits; the poller would cost a
// short-lived plugin dozens of context switches.
type socket struct {
	fd         int
	answerable int // the length of the longest datagram that room has been made for
}

func newSocket(protocol int) (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	options := []int{unix.NETLINK_EXT_ACK, unix.NETLINK_CAP_ACK}
	if protocol == unix.NETLINK_ROUTE {
		// Without it, IPv4 and IPv6 disregard the filters of a dump (Linux 4.20).
		options = append(options, unix.NETLINK_GET_STRICT_CHK)
	}
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, o, 1); err != nil {
			unix.Close(fd)
			return nil, fmt.Errorf("set netlink option %d: %w", o, err)
		}
	}
	return &socket{fd: fd}, nil
}

const (
	// roomToSend is the part of a socket's default send buffer (212,992 bytes) that a
	// datagram may take; a longer one asks for more first.
	roomToSend = 128 << 10
	// roomToAnswer is the length of a datagram whose answers are sure to fit into the
	// default receive buffer, in which all are queued before the first is read.
	roomToAnswer = 2 << 10
	// answerFactor is how much more room answers take than requests: 27 times for an
	// acknowledgement, 100 for a bridge port that is asked for by name.
	answerFactor = 128
)

func (s *socket) Send(b []byte) error {
	if err := s.makeRoom(len(b)); err != nil {
		return fmt.Errorf("a batch of %d bytes needs larger buffers: %w", len(b), err)
	}
	return ignoringEINTR(func() error {
		return unix.Sendto(s.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	})
}

// makeRoom raises the socket's limits for a long datagram. FORCE goes past
// net.core.wmem_max and rmem_max, with CAP_NET_ADMIN in the initial user
// namespace; the kernel doubles the figures.
func (s *socket) makeRoom(n int) error {
	if n > roomToSend {
		if err := unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, n); err != nil {
			return err
		}
	}
	if n <= max(roomToAnswer, s.answerable) {
		return nil
	}
	err := unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, min(n*answerFactor/2, math.MaxInt32/2))
	if errors.Is(err, unix.EPERM) {
		return nil // it may do without: only Receive can tell
	}
	s.answerable = n
	return err
}

func (s *socket) Receive(b []byte) (int, error) {
	for {
		n, port, err := receive(s.fd, b, unix.MSG_DONTWAIT|unix.MSG_TRUNC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if errors.Is(err, unix.EAGAIN) {
			return 0, ErrEmpty
		}
		if err != nil {
			return 0, err
		}
		if n > len(b) {
			return 0, fmt.Errorf("%w: a datagram of %d bytes, where %d fit", ErrMalformed, n, len(b))
		}
		// Any process of the namespace may send to a netlink socket; the kernel's
		// port is 0.
		if port == 0 {
			return n, nil
		}
	}
}

func (s *socket) Close() error { return unix.Close(s.fd) }

func ignoringEINTR(fn func() error) error {
	for {
		if err := fn(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// AttachFilter has a socket get only what a program takes.
func AttachFilter(fd int, program []bpf.RawInstruction) error {
	code := make([]unix.SockFilter, len(program))
	for i, in := range program {
		code[i] = unix.SockFilter{Code: in.Op, Jt: in.Jt, Jf: in.Jf, K: in.K}
	}
	err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]})
	if err != nil {
		return fmt.Errorf("attach filter: %w", err)
	}
	return nil
}
