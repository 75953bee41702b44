package nl

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/netns"
)

// Kind is a kind of announcements.
type Kind struct {
	Type uint16
	// At is where the message has a byte, counted from the end of its header, that is to be Byte;
	// 0: whatever it says.
	At   uint32
	Byte byte
}

// FollowOnly is Follow for messages of some kinds alone: the kernel does not queue any others,
// so that a flood of those loses none of these and wakes nobody. What it puts into one datagram
// it judges by the first message.
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
