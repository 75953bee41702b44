package nl

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/netns"
)

// Dial opens a netlink socket for a protocol, such as unix.NETLINK_ROUTE or unix.NETLINK_NETFILTER. It enables extended
// acknowledgements and, for NETLINK_ROUTE, strict checking of requests. The socket works on the network namespace ns,
// from any thread. If ns is nil, it works on the calling thread's namespace. If ns is not nil, Dial needs
// CAP_SYS_ADMIN. Changes, and all requests to NETLINK_NETFILTER, need CAP_NET_ADMIN.
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
	err := inNamespace(ns, func() (err error) {
		s, err = newSocket(protocol)
		return err
	})
	if err != nil {
		return nil, &tombolo.OpError{Op: "open netlink socket", Err: err}
	}
	return s, nil
}

// Dialer opens sockets in place of Dial, for tests that put faults between a program and the kernel. inPod is true if
// the socket is for a pod's network namespace. The calling thread is then in that namespace.
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
// nfnetlink within sendmsg, and queues the answers before sendmsg returns. So Receive never waits. A poller would cost
// a short-lived CNI plugin dozens of context switches.
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
	// answerFactor is an upper bound for the size of the answers divided by the size of the request. An acknowledgement
	// takes up to 27 times the space of its request. The description of a bridge port takes 100 times the space of a
	// request by name.
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
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return 0, ErrEmpty
		case err != nil:
			return 0, err
		case n > len(b):
			return 0, fmt.Errorf("%w: a datagram of %d bytes, where %d fit", ErrMalformed, n, len(b))
		case port == 0:
			// Ignore messages from other processes: one with CAP_NET_ADMIN can send to any netlink socket in the
			// network namespace. Messages from the kernel have the port 0.
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

// The following methods send no netlink messages, but use ioctls and socket options. Some are about network interfaces
// (netdevice(7)), and some about the network namespace of the socket. A fake Transport supports none of them.

// NetNSCookie returns the cookie of the socket's network namespace without entering the namespace (see
// netns.NS.Cookie). If the transport is not a socket, it returns 0.
func (c *Conn) NetNSCookie() (uint64, error) {
	s, ok := c.t.(*socket)
	if !ok {
		return 0, nil
	}
	cookie, err := unix.GetsockoptUint64(s.fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, &tombolo.OpError{Op: "read cookie of network namespace of", Object: "netlink socket", Err: err}
	}
	return cookie, nil
}

// LinkIndex returns the index of a link in the socket's network namespace. If the link does not exist, the error
// matches ENODEV. LinkIndex takes a tenth of the time of a netlink request, since the kernel does not return the
// link's attributes. If known is false, the transport does not support it, and the caller must send a netlink
// request.
func (c *Conn) LinkIndex(name string) (index int, known bool, _ error) {
	s, ok := c.t.(*socket)
	if !ok {
		return 0, false, nil
	}

	request, err := unix.NewIfreq(name)
	if err == nil {
		err = ignoringEINTR(func() error { return unix.IoctlIfreq(s.fd, unix.SIOCGIFINDEX, request) })
	}

	if err != nil {
		return 0, true, &tombolo.OpError{Op: "get link", Object: name, Err: err}
	}
	return int(request.Uint32()), true, nil
}

// Within calls fn on a thread in the socket's network namespace. It uses the calling thread if that is already in the
// namespace, or if the transport is not a socket.
func (c *Conn) Within(fn func() error) error {
	s, ok := c.t.(*socket)
	if !ok {
		return fn()
	}

	own, err := unix.IoctlRetInt(s.fd, siocGSKNS)
	if err != nil {
		return &tombolo.OpError{Op: "find network namespace of", Object: "netlink socket", Err: err}
	}
	defer unix.Close(own)
	var here, there unix.Stat_t
	if err := errors.Join(unix.Stat("/proc/thread-self/ns/net", &here), unix.Fstat(own, &there)); err != nil {
		return &tombolo.OpError{Op: "compare network namespaces", Err: err}
	}

	if here.Ino == there.Ino && here.Dev == there.Dev {
		return fn()
	}

	ns, err := netns.Open("/proc/thread-self/fd/" + strconv.Itoa(own))
	if err != nil {
		return err
	}
	defer ns.Close()
	return ns.Do(fn)
}

const siocGSKNS = 0x894c // from include/uapi/linux/sockios.h (Linux 4.10); needs CAP_NET_ADMIN

// RefreshCarrier makes the kernel notice immediately that a link has a carrier. Before that, a link that was set up
// without a carrier sends nothing. The kernel's worker for this (linkwatch) may be some milliseconds late. On Linux
// 6.8 and later, the request ETHTOOL_GLINK does the worker's job for the link. On older kernels, RefreshCarrier waits
// for the worker, up to carrierPatience. It returns no error, since the caller could do nothing about it.
func (c *Conn) RefreshCarrier(link string) {
	s, ok := c.t.(*socket)
	if !ok {
		return
	}

	if up, err := s.ethtool(link, unix.ETHTOOL_GLINK, 0); err != nil || up == 0 {
		return
	}

	flags, err := unix.NewIfreq(link)
	if err != nil {
		return
	}

	for pause, end := 50*time.Microsecond, time.Now().Add(carrierPatience); ; pause = min(2*pause, time.Millisecond) {
		if err := unix.IoctlIfreq(s.fd, unix.SIOCGIFFLAGS, flags); err != nil && err != unix.EINTR {
			return
		}

		// The wait is over when the worker has set IFF_RUNNING, which it does after it has noticed the carrier.
		if got := flags.Uint16(); got&unix.IFF_UP == 0 || got&unix.IFF_RUNNING != 0 || time.Now().After(end) {
			return
		}
		time.Sleep(pause)
		_, _ = s.ethtool(link, unix.ETHTOOL_GLINK, 0) // waits for a lock that the worker holds while it runs
	}
}

// carrierPatience is the longest time that RefreshCarrier waits for the worker. The worker needs much less on a machine
// that is not overloaded.
const carrierPatience = 100 * time.Millisecond

// StopTxOffload turns off transmit checksum offload (ETHTOOL_STXCSUM) and scatter-gather (ETHTOOL_SSG) of a link in the
// socket's network namespace. The kernel then computes all checksums before the link sends. It also copies memory pages
// that the sender could still change. Turning the offloads on again needs CAP_NET_ADMIN in that namespace.
func (c *Conn) StopTxOffload(link string) error {
	return c.setOffloads("turn off offloads of link", link, 0, unix.ETHTOOL_STXCSUM, unix.ETHTOOL_SSG)
}

// StartGRO turns on GRO for a veth link in the socket's network namespace (ETHTOOL_SGRO). The link then joins TCP
// segments that its peer sends one by one. The kernel then also verifies their checksums.
func (c *Conn) StartGRO(link string) error {
	return c.setOffloads("turn on GRO of link", link, 1, unix.ETHTOOL_SGRO)
}

// setOffloads sets offloads of a link by ethtool requests. A value of 1 turns them on, and 0 off.
func (c *Conn) setOffloads(op, link string, value uint32, requests ...uint32) error {
	s, ok := c.t.(*socket)
	if !ok {
		return nil
	}
	for _, request := range requests {
		if _, err := s.ethtool(link, request, value); err != nil {
			return &tombolo.OpError{Op: op, Object: link, Err: err}
		}
	}
	return nil
}

// ethtool sends an ethtool request whose argument and result are numbers.
func (s *socket) ethtool(link string, cmd, data uint32) (uint32, error) {
	// This is struct ethtool_value of linux/ethtool.h, and the part of struct ifreq of linux/if.h that is used here.
	// The kernel copies all 40 bytes of struct ifreq.
	value := struct{ cmd, data uint32 }{cmd, data}
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(request.name[:unix.IFNAMSIZ-1], link)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(s.fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
	if errno != 0 {
		return 0, errno
	}
	return value.data, nil
}

// receive calls recvfrom(2) on a netlink socket. It also returns the sender's port. It replaces unix.Recvfrom, which
// makes three allocations.
func receive(fd int, b []byte, flags int) (n int, port uint32, _ error) {
	var from unix.RawSockaddrNetlink
	length := uint32(unix.SizeofSockaddrNetlink)
	got, _, errno := unix.Syscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))),
		uintptr(len(b)), uintptr(flags), uintptr(unsafe.Pointer(&from)), uintptr(unsafe.Pointer(&length)))
	if errno != 0 {
		return 0, 0, errno
	}
	return int(got), from.Pid, nil
}

// SocketOption calls getsockopt(2) for an option that needs an argument. The kernel reads the argument from value,
// and replaces it by an answer of the same length. Package x/sys has no function for this.
func SocketOption(fd, level, option int, value []byte) error {
	length := uint32(len(value))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(unsafe.SliceData(value))), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
