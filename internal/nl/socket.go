package nl

import (
	"context"
	"errors"
	"fmt"
	"math"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/netns"
)

// Dial opens a netlink socket for a protocol, such as unix.NETLINK_ROUTE or unix.NETLINK_NETFILTER. It enables
// extended acknowledgements and strict checking of requests. The socket works on the network namespace ns, from any
// thread. If ns is nil, it works on the calling thread's namespace. If ns is not nil, Dial needs CAP_SYS_ADMIN. Most
// requests need CAP_NET_ADMIN.
func Dial(protocol int, ns *netns.NS) (*Conn, error) {
	t, err := Open(protocol, ns)
	if err != nil {
		return nil, err
	}
	return New(t), nil
}

// Open opens the socket for Dial. Fake kernels that pass requests on to the real kernel call it directly.
func Open(protocol int, ns *netns.NS) (Transport, error) {
	var s *socket
	err := inNamespace(ns, func() error {
		var err error
		s, err = newSocket(protocol)
		return err
	})
	if err != nil {
		return nil, &tombolo.OpError{Op: "open netlink socket", Err: err}
	}
	return s, nil
}

// Dialer opens sockets in place of Dial, for tests that put faults between a program and the kernel. inPod is set for
// the socket of a pod's namespace, where the Dialer is called.
type Dialer func(protocol int, inPod bool) (*Conn, error)

type dialerKey struct{}

// WithDialer returns a context that passes a Dialer to network.Open.
func WithDialer(ctx context.Context, dial Dialer) context.Context {
	return context.WithValue(ctx, dialerKey{}, dial)
}

// DialerOf returns the Dialer of a context, or nil if it has none.
func DialerOf(ctx context.Context) Dialer {
	dial, _ := ctx.Value(dialerKey{}).(Dialer)
	return dial
}

// inNamespace calls open in the network namespace ns, or in the calling thread's namespace if ns is nil.
func inNamespace(ns *netns.NS, open func() error) error {
	if ns == nil {
		return open()
	}
	return ns.Do(open)
}

// socket is a netlink socket that does not use the runtime's poller. The kernel processes requests to rtnetlink and
// nfnetlink within sendmsg, and queues the answers before sendmsg returns. So nothing ever waits. A poller would cost
// a short-lived plugin dozens of context switches.
type socket struct {
	fd         int
	answerable int // length of the longest datagram that the receive buffer was enlarged for
	debug      *debugger
}

func newSocket(protocol int) (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}

	options := []int{unix.NETLINK_EXT_ACK, unix.NETLINK_CAP_ACK}
	if protocol == unix.NETLINK_ROUTE {
		// Without this option, the kernel ignores filters in requests for lists of IPv4 and IPv6 objects (Linux
		// 4.20).
		options = append(options, unix.NETLINK_GET_STRICT_CHK)
	}

	for _, o := range options {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, o, 1); err != nil {
			unix.Close(fd)
			return nil, fmt.Errorf("set netlink option %d: %w", o, err)
		}
	}

	return &socket{fd: fd, debug: newDebugger(protocol, fd)}, nil
}

const (
	// roomToSend is the length in bytes of a datagram that certainly fits into a default send buffer (212,992 bytes).
	// For a longer datagram, Send enlarges the buffer.
	roomToSend = 128 << 10
	// roomToAnswer is the length in bytes of a datagram whose answers certainly fit into a default receive buffer.
	// The kernel queues all answers before the first one is read.
	roomToAnswer = 2 << 10
	// answerFactor is an upper bound for the size of the answers divided by the size of the request. An
	// acknowledgement takes 27 times the space, and a bridge port that is requested by name takes 100 times the
	// space.
	answerFactor = 128
)

func (s *socket) Send(b []byte) error {
	if err := s.makeRoom(len(b)); err != nil {
		return fmt.Errorf("a batch of %d bytes needs larger buffers: %w", len(b), err)
	}
	s.debug.print("send", b)
	return ignoringEINTR(func() error {
		return unix.Sendto(s.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	})
}

// makeRoom enlarges the socket's buffers for a datagram of n bytes. With CAP_NET_ADMIN in the initial user namespace,
// the options SO_SNDBUFFORCE and SO_RCVBUFFORCE may exceed net.core.wmem_max and rmem_max. The kernel doubles the
// sizes.
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
		return nil // the buffer may suffice; if not, Receive reports it
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

		// Ignore messages from other processes, since any process in the network namespace can send to a netlink
		// socket. Messages from the kernel have the port 0.
		if port == 0 {
			s.debug.print("recv", b[:n])
			return n, nil
		}
	}
}

func (s *socket) Close() error { return unix.Close(s.fd) }

// ignoringEINTR calls fn again as long as a signal interrupts it.
func ignoringEINTR(fn func() error) error {
	for {
		if err := fn(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// AttachFilter attaches a BPF filter to a socket. The socket then receives only packets that the filter accepts.
func AttachFilter(fd int, program []bpf.RawInstruction) error {
	code := make([]unix.SockFilter, len(program))
	for i, in := range program {
		code[i] = unix.SockFilter{Code: in.Op, Jt: in.Jt, Jf: in.Jf, K: in.K}
	}
	err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]})
	if err != nil {
		return fmt.Errorf("attach filter: %w", err)
	}
	return nil
}
