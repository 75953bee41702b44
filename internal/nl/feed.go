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

// Feed receives announcements for a program that waits for hours. Unlike a Watch, it waits in the runtime's poller,
// without a thread, and wakes only for an announcement.
type Feed struct {
	file *os.File
	raw  syscall.RawConn
	queue
}

// feedSize is the size of the longest datagram of announcements.
const feedSize = 32 << 10

// Follow opens a socket that is a member of groups (unix.RTNLGRP_*). It receives announcements of all changes from
// then on.
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
	return &Feed{file: file, raw: raw, queue: queue{buf: make([]byte, feedSize)}}, nil
}

// Close ends the subscription, and a Next that is waiting.
func (f *Feed) Close() error { return f.file.Close() }

// Next waits for the next announcements. They are valid until the following Next. An error that matches unix.ENOBUFS
// means that announcements were lost, so the caller must look for changes itself. After Close the error matches
// os.ErrClosed.
func (f *Feed) Next() (list []netlink.Message, err error) {
	if !f.lost {
		n, err := f.file.Read(f.buf)
		switch {
		case err == nil:
			return messages(f.buf[:n])
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

// messages splits a datagram into its messages.
func messages(b []byte) ([]netlink.Message, error) {
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

// Kind describes the announcements that FollowOnly accepts.
type Kind struct {
	Type uint16
	// At is the offset of a byte, counted from the end of the message's header, that must equal Byte. 0 accepts any
	// message.
	At   uint32
	Byte byte
	Size uint32 // size of the message with its header; 0 accepts any
}

// FollowOnly opens a Feed for only some kinds of messages. The kernel does not queue others, so a flood of these
// neither wakes the reader nor makes it lose messages. If a datagram has several messages, only the first is
// compared.
func FollowOnly(protocol int, ns *netns.NS, kinds []Kind, groups ...int) (*Feed, error) {
	// Set the filter before the socket joins a group, so that no other message gets into the queue.
	f, err := Follow(protocol, ns)
	if err != nil {
		return nil, err
	}
	if err := f.filter(kinds, groups); err != nil {
		return nil, errors.Join(&tombolo.OpError{Op: "subscribe to netlink", Err: err}, f.Close())
	}
	return f, nil
}

// filter attaches the filter to the socket, and then joins the groups.
func (f *Feed) filter(kinds []Kind, groups []int) error {
	const typeAt, bodyAt, all, none = 4, 16, 0xffffffff, 0 // of struct nlmsghdr
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

		// The filter loads numbers in network byte order, and the message has them in the host's.
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
