package nl

import (
	"errors"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/netns"
)

// This file contains requests that are not netlink messages, but ioctls and socket options. Some are about network
// interfaces (netdevice(7)), and some about the network namespace of the socket. A fake Transport supports none of
// them.

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

const siocGSKNS = 0x894c // from include/uapi/linux/sockios.h (Linux 4.9); needs CAP_NET_ADMIN

// RefreshCarrier makes the kernel notice immediately that a link has a carrier. Before that, a link that was set up
// without a carrier sends nothing. The kernel's worker for this (linkwatch) may be some milliseconds late. On Linux
// 6.8 and later, the request ETHTOOL_GLINK does the worker's job for the link. On older kernels, RefreshCarrier waits
// for the worker, up to carrierPatience. It returns no error, since the caller could do nothing about it.
func (c *Conn) RefreshCarrier(link string) {
	if s, ok := c.t.(*socket); ok {
		s.refreshCarrier(link)
	}
}

// carrierPatience is much longer than the worker needs on a machine that is not overloaded.
const carrierPatience = 100 * time.Millisecond

func (s *socket) refreshCarrier(link string) {
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

// StopTxOffload turns off two offloads of a link in the socket's network namespace (ETHTOOL_STXCSUM and ETHTOOL_SSG).
// The link then computes all checksums itself, and sends no memory pages that the sender can still change. Turning
// the offloads on again needs CAP_NET_ADMIN in that namespace.
func (c *Conn) StopTxOffload(link string) error {
	s, ok := c.t.(*socket)
	if !ok {
		return nil
	}
	for _, offload := range []uint32{unix.ETHTOOL_STXCSUM, unix.ETHTOOL_SSG} {
		if _, err := s.ethtool(link, offload, 0); err != nil {
			return &tombolo.OpError{Op: "turn off offloads of link", Object: link, Err: err}
		}
	}
	return nil
}

// StartGRO turns on GRO for a veth link in the socket's network namespace (ETHTOOL_SGRO). The link then joins TCP
// segments that its peer sends one by one. The kernel also computes their checksums then.
func (c *Conn) StartGRO(link string) error {
	s, ok := c.t.(*socket)
	if !ok {
		return nil
	}
	if _, err := s.ethtool(link, unix.ETHTOOL_SGRO, 1); err != nil {
		return &tombolo.OpError{Op: "turn on GRO of link", Object: link, Err: err}
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
