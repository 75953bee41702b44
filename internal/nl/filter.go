package nl

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
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
func FollowOnly(protocol int, cfg *Config, kinds []Kind, groups ...int) (*Feed, error) {
	// Before the socket belongs to any group, so that nothing passes it by.
	f, err := Follow(protocol, cfg)
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
	var program []unix.SockFilter
	for _, k := range kinds {
		// The filter loads in network byte order what is in the host's.
		wanted := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, k.Type))
		accept := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: all}}
		if k.At != 0 {
			accept = []unix.SockFilter{
				{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: bodyAt + k.At},
				{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: uint32(k.Byte)},
				accept[0],
			}
		}
		program = append(program,
			unix.SockFilter{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: typeAt},
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: uint8(len(accept)), K: uint32(wanted)})
		program = append(program, accept...)
	}
	program = append(program, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: none})
	var result error
	err := f.raw.Control(func(fd uintptr) {
		result = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
		if result != nil {
			result = fmt.Errorf("attach filter: %w", result)
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
