package nl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/mdlayher/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/netns"
)

// Feed receives announcements for a program that runs for a long time. It waits in the runtime's poller, and not in a
// system call as a Watch does, so a waiting Feed blocks no thread.
type Feed struct {
	file *os.File
	raw  syscall.RawConn
	queue
}

// feedSize is the maximum length in bytes of a datagram with announcements.
const feedSize = 32 << 10

// Follow opens a Feed that is a member of the multicast groups (unix.RTNLGRP_*). It receives announcements of all
// later changes. It uses ns in the same way as Dial.
func Follow(protocol int, ns *netns.NS, groups ...int) (*Feed, error) {
	w, err := Subscribe(protocol, ns, groups...)
	if err != nil {
		return nil, err
	}

	if err := unix.SetNonblock(w.fd, true); err != nil {
		return nil, errors.Join(&tombolo.OpError{Op: "subscribe to netlink", Err: err}, w.Close())
	}

	file := os.NewFile(uintptr(w.fd), "netlink")
	raw, err := file.SyscallConn()
	if err != nil {
		return nil, errors.Join(&tombolo.OpError{Op: "subscribe to netlink", Err: err}, file.Close())
	}
	return &Feed{file: file, raw: raw, queue: queue{buf: make([]byte, feedSize), debug: w.debug}}, nil
}

// Close closes the socket. A Next that is waiting returns an error.
func (f *Feed) Close() error { return f.file.Close() }

// Next waits for the next announcements. They are valid until the next call of Next. If announcements were lost, the
// error matches unix.ENOBUFS, and the caller must look for changes itself. After Close, the error matches
// os.ErrClosed.
func (f *Feed) Next() (list []netlink.Message, err error) {
	if !f.lost {
		n, err := f.file.Read(f.buf)
		switch {
		case err == nil:
			return f.messages(n)
		case !errors.Is(err, unix.ENOBUFS):
			return nil, fmt.Errorf("receive announcement: %w", err)
		}
		f.lost = true
	}

	if f.raw.Control(func(fd uintptr) { list, err = f.receive(int(fd), 0) }) != nil {
		return nil, fmt.Errorf("receive announcement: %w", os.ErrClosed)
	}
	return list, err
}

// messages splits a datagram of n bytes in the buffer into its messages.
func (q *queue) messages(n int) ([]netlink.Message, error) {
	b := q.buf[:n]
	q.debug.print("recv", b)
	var list []netlink.Message
	for len(b) > 0 {
		m, rest, err := next(b)
		if err != nil {
			return nil, fmt.Errorf("receive announcement: %w", err)
		}
		list, b = append(list, m), rest
	}
	return list, nil
}

// Kind selects announcements for FollowOnly.
type Kind struct {
	Type uint16
	// At and Byte select messages that contain Byte at the offset At, counted from the end of the message's header.
	// If At is 0, Byte is ignored.
	At   uint32
	Byte byte
	Size uint32 // size of the message with its header; 0 accepts any; ignored if At is set
}

// FollowOnly opens a Feed that receives only announcements of the given kinds. The kernel queues no other
// announcements. So a flood of other announcements neither wakes the reader nor makes the socket lose messages. If a
// datagram contains several messages, only the first one is compared.
func FollowOnly(protocol int, ns *netns.NS, kinds []Kind, groups ...int) (*Feed, error) {
	// Attach the filter before the socket joins a group, so that the kernel queues no other messages.
	f, err := Follow(protocol, ns)
	if err != nil {
		return nil, err
	}
	if err := f.filter(kinds, groups); err != nil {
		return nil, errors.Join(&tombolo.OpError{Op: "subscribe to netlink", Err: err}, f.Close())
	}
	return f, nil
}

// filter attaches a filter for the kinds to the socket, and then joins the groups.
func (f *Feed) filter(kinds []Kind, groups []int) error {
	const typeAt, bodyAt, all, none = 4, 16, 0xffffffff, 0 // offsets in struct nlmsghdr, and results of the filter
	var list []bpf.Instruction
	for _, k := range kinds {
		accept := []bpf.Instruction{bpf.RetConstant{Val: all}}
		if k.Size != 0 {
			size := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, k.Size))
			accept = []bpf.Instruction{bpf.LoadAbsolute{Off: 0, Size: 4},
				bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: size, SkipTrue: 1}, accept[0]}
		}

		if k.At != 0 {
			accept = []bpf.Instruction{
				bpf.LoadAbsolute{Off: bodyAt + k.At, Size: 1},
				bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(k.Byte), SkipTrue: 1},
				accept[0],
			}
		}

		// Swap the bytes if the host is little-endian: the filter loads numbers in network byte order, but the
		// message contains them in the host's byte order.
		wanted := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, k.Type))
		list = append(list, bpf.LoadAbsolute{Off: typeAt, Size: 2},
			bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(wanted), SkipTrue: uint8(len(accept))})
		list = append(list, accept...)
	}

	program, err := bpf.Assemble(append(list, bpf.RetConstant{Val: none}))
	if err != nil {
		return fmt.Errorf("assemble filter: %w", err)
	}

	var result error
	err = f.raw.Control(func(fd uintptr) {
		if result = AttachFilter(int(fd), program); result != nil {
			return
		}
		for _, g := range groups {
			if err := unix.SetsockoptInt(int(fd), unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g); err != nil {
				result = fmt.Errorf("join group %d: %w", g, err)
				return
			}
		}
	})

	return errors.Join(err, result)
}
