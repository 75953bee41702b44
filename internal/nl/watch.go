package nl

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/netns"
)

// Watch receives announcements that the kernel sends to multicast groups. It waits in a system call on the caller's
// thread. For a wait of some hundred microseconds, this is cheaper than a poller.
//
// Only one goroutine may use a Watch at a time. Close may be called from any goroutine.
type Watch struct {
	mu sync.Mutex // locked while fd is used, so that fd stays the same file
	fd int        // -1 after Close, when the number may be reused for another file
	queue
}

// lookUp is the interval between two checks of the context by a waiting Next.
const lookUp = 50 * time.Millisecond

// Subscribe opens a Watch that is a member of the multicast groups (unix.RTNLGRP_*). It receives announcements of all
// later changes. It uses ns in the same way as Dial.
func Subscribe(protocol int, ns *netns.NS, groups ...int) (*Watch, error) {
	w := &Watch{fd: -1, queue: queue{buf: make([]byte, announcementSize)}}
	if err := inNamespace(ns, func() error { return w.open(protocol, groups) }); err != nil {
		if w.fd >= 0 {
			unix.Close(w.fd)
		}
		return nil, &tombolo.OpError{Op: "subscribe to netlink", Err: err}
	}
	return w, nil
}

func (w *Watch) open(protocol int, groups []int) (err error) {
	if w.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol); err != nil {
		return fmt.Errorf("socket: %w", err)
	}

	w.debug = newDebugger(protocol, w.fd)

	// Bind the socket to a port of its own. Otherwise it would have the kernel's port 0, and the kernel sends no
	// announcements to itself.
	if err := unix.Bind(w.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("bind: %w", err)
	}

	timeout := unix.NsecToTimeval(lookUp.Nanoseconds())
	if err := unix.SetsockoptTimeval(w.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		return fmt.Errorf("set receive timeout: %w", err)
	}

	return w.join(groups)
}

// join makes the socket a member of multicast groups.
func (w *Watch) join(groups []int) error {
	for _, g := range groups {
		if err := unix.SetsockoptInt(w.fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g); err != nil {
			return fmt.Errorf("join group %d: %w", g, err)
		}
	}

	return nil
}

// Close closes the socket. If another goroutine is waiting in Next, Close waits for up to two checks of the context
// (100 ms, see lookUp), and ends that call. Then all methods, including Close, return an error that matches
// tombolo.ErrInvalid.
func (w *Watch) Close() error {

	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fd < 0 {
		return closedTransport{}.Close()
	}

	fd := w.fd
	w.fd = -1
	return unix.Close(fd)
}

// next receives one datagram from the socket. If the Watch is closed, it returns an error.
func (w *Watch) next(flags int) ([]netlink.Message, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fd < 0 {
		return nil, closedTransport{}.Close()
	}
	return w.receive(w.fd, flags)
}

// Next waits for the next announcements. They are valid until the next call of Next or Queued. If announcements were
// lost, the error matches unix.ENOBUFS, and the caller must look for changes itself. If ctx ends, Next returns ctx's
// error.
func (w *Watch) Next(ctx context.Context) ([]netlink.Message, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		list, err := w.next(0)
		if !errors.Is(err, unix.EAGAIN) {
			return list, err
		}
	}
}

// Queued returns the announcements of the next queued datagram, without waiting. If none is queued, it returns an empty
// list.
func (w *Watch) Queued() ([]netlink.Message, error) {
	list, err := w.next(unix.MSG_DONTWAIT)
	if errors.Is(err, unix.EAGAIN) {
		return nil, nil
	}
	return list, err
}

// queue reads the messages that the kernel has queued for a socket.
//
// If the kernel loses messages, it reports ENOBUFS once, before the messages that are still queued. Until the process
// has read all queued messages, the kernel drops every further message without another report. So queue first reads
// all queued messages, and only then returns ENOBUFS to its caller. If a caller looked for changes earlier, it could
// miss changes whose messages were lost later.
type queue struct {
	buf   []byte
	lost  bool // messages were lost, and receive has not reported this yet
	debug *debugger
}

// receive reads one datagram. If there is none, or a signal interrupted the call, the error matches unix.EAGAIN. If
// announcements were lost, receive first returns the queued ones, and then an error that matches unix.ENOBUFS.
func (q *queue) receive(fd, flags int) ([]netlink.Message, error) {
	for {
		if q.lost {
			flags |= unix.MSG_DONTWAIT
		}

		n, _, err := receive(fd, q.buf, flags)
		switch {
		case errors.Is(err, unix.ENOBUFS):
			q.lost = true
			continue
		case errors.Is(err, unix.EAGAIN) && q.lost:
			q.lost, err = false, unix.ENOBUFS
		case errors.Is(err, unix.EINTR):
			err = unix.EAGAIN
		}

		q.debug.print("recv", q.buf[:n])
		var list []netlink.Message
		for b := q.buf[:n]; err == nil && len(b) > 0; {
			var m netlink.Message
			m, b, err = next(b)
			list = append(list, m)
		}

		if err != nil {
			return nil, fmt.Errorf("receive announcement: %w", err)
		}

		return list, nil
	}
}

// Feed receives announcements for a program that runs for a long time. It waits in the runtime's poller, and not in a
// system call as a Watch does, so a waiting Feed blocks no thread.
type Feed struct {
	file *os.File
	raw  syscall.RawConn
	queue
}

// feedSize is the maximum length in bytes of a datagram with announcements.
const feedSize = 32 << 10

// Close closes the socket. A Next that is waiting returns an error.
func (f *Feed) Close() error { return f.file.Close() }

// Next waits for the next announcements. They are valid until the next call of Next. If announcements were lost, the
// error matches unix.ENOBUFS, and the caller must look for changes itself. After Close, the error matches
// os.ErrClosed.
func (f *Feed) Next() (list []netlink.Message, err error) {
	closed := f.raw.Read(func(fd uintptr) bool {
		list, err = f.receive(int(fd), unix.MSG_DONTWAIT)
		return !errors.Is(err, unix.EAGAIN)
	})
	if closed != nil {
		return nil, fmt.Errorf("receive announcement: %w", os.ErrClosed)
	}

	return list, err
}

// Kind describes announcements that a Feed from FollowOnly receives.
type Kind struct {
	Type uint16
	// At and Byte select messages that contain Byte at the offset At, counted from the end of the message's header.
	// If At is 0, Byte is ignored.
	At   uint32
	Byte byte
	Size uint32 // size of the message with its header; 0 accepts any; ignored if At is set
}

// FollowOnly opens a Feed that is a member of the multicast groups (unix.RTNLGRP_*), and receives only announcements of
// the given kinds. Without kinds it receives all. It uses ns in the same way as Dial. The kernel queues no other
// announcements. So a flood of other announcements neither wakes the reader nor makes the socket lose messages. If a
// datagram contains several messages, only the first one is compared.
func FollowOnly(protocol int, ns *netns.NS, kinds []Kind, groups ...int) (*Feed, error) {
	w, err := Subscribe(protocol, ns)
	if err != nil {
		return nil, err
	}

	// Attach the filter before the socket joins a group, so that the kernel queues no other messages.
	if len(kinds) > 0 {
		err = filter(w.fd, kinds)
	}

	err = cmp.Or(err, w.join(groups), unix.SetNonblock(w.fd, true))
	file := os.NewFile(uintptr(w.fd), "netlink")
	raw, rawErr := file.SyscallConn()
	if err = cmp.Or(err, rawErr); err != nil {
		return nil, errors.Join(&tombolo.OpError{Op: "subscribe to netlink", Err: err}, file.Close())
	}

	return &Feed{file: file, raw: raw, queue: queue{buf: make([]byte, feedSize), debug: w.debug}}, nil
}

// filter attaches a BPF filter to the socket, which accepts only messages of the kinds in kinds.
func filter(fd int, kinds []Kind) error {
	const typeAt, bodyAt, all, none = 4, 16, 0xffffffff, 0 // offsets in struct nlmsghdr, and results of the filter
	var list []bpf.Instruction
	for _, k := range kinds {
		accept := []bpf.Instruction{bpf.RetConstant{Val: all}}
		require := func(at uint32, number []byte) {
			// The filter loads numbers in network byte order, but the message contains them in the host's byte order.
			value := binary.BigEndian.Uint32(slices.Concat(make([]byte, 4-len(number)), number))
			accept = append([]bpf.Instruction{bpf.LoadAbsolute{Off: at, Size: len(number)},
				bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: value, SkipTrue: uint8(len(accept))}}, accept...)
		}
		switch {
		case k.At != 0:
			require(bodyAt+k.At, []byte{k.Byte})
		case k.Size != 0:
			require(0, binary.NativeEndian.AppendUint32(nil, k.Size))
		}

		require(typeAt, binary.NativeEndian.AppendUint16(nil, k.Type))
		list = append(list, accept...)
	}

	program, err := bpf.Assemble(append(list, bpf.RetConstant{Val: none}))
	if err != nil {
		return fmt.Errorf("assemble filter: %w", err)
	}

	return AttachFilter(fd, program)
}
