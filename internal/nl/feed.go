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

// Feed is a Watch for a program that waits for hours: it waits in the runtime's poller, without a
// thread, and nothing wakes it but an announcement.
type Feed struct {
	file *os.File
	raw  syscall.RawConn
	queue
}

// feedSize is the longest datagram of announcements.
const feedSize = 32 << 10

// Follow opens a socket that belongs to groups (unix.RTNLGRP_*). It receives announcements of all changes after it
// has returned.
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

// Close ends the subscription, and a Next that waits.
func (f *Feed) Close() error { return f.file.Close() }

// Next waits for the next announcements, which are good until the Next after it. An
// error matching unix.ENOBUFS says that some were lost, of those since the one before it,
// and that the caller has to look for itself; after Close it matches os.ErrClosed.
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

// messages takes a datagram apart.
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

// Kind is a kind of announcements.
type Kind struct {
	Type uint16
	// At is where the message has a byte, counted from the end of its header, that is to be Byte; 0: any.
	At   uint32
	Byte byte
	Size uint32 // of the message, with its header; 0: any
}

// FollowOnly is Follow for messages of some kinds alone: the kernel does not queue any others, so that a flood of
// those loses none of these and wakes no reader. Of messages in one datagram it looks at the first.
func FollowOnly(protocol int, ns *netns.NS, kinds []Kind, groups ...int) (*Feed, error) {
	// Before the socket belongs to any group, so that nothing passes it by.
	f, err := Follow(protocol, ns)
	if err != nil {
		return nil, err
	}
	if err := f.filter(kinds, groups); err != nil {
		return nil, errors.Join(&tombolo.OpError{Op: "subscribe to netlink", Err: err}, f.Close())
	}
	return f, nil
}

func (f *Feed) filter(kinds []Kind, groups []int) error {
	const typeAt, bodyAt, all, none = 4, 16, 0xffffffff, 0 // of struct nlmsghdr
	var list []bpf.Instruction
	for _, k := range kinds {
		accept := []bpf.Instruction{bpf.RetConstant{Val: all}}
		if k.Size != 0 {
			size := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, k.Size))
			accept = []bpf.Instruction{bpf.LoadAbsolute{Off: 0, Size: 4}, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: size, SkipTrue: 1}, accept[0]}
		}
		if k.At != 0 {
			accept = []bpf.Instruction{
				bpf.LoadAbsolute{Off: bodyAt + k.At, Size: 1},
				bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(k.Byte), SkipTrue: 1},
				accept[0],
			}
		}
		// The filter loads in network byte order what is in the host's.
		wanted := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, k.Type))
		list = append(list, bpf.LoadAbsolute{Off: typeAt, Size: 2}, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(wanted), SkipTrue: uint8(len(accept))})
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
