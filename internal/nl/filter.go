package nl

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
)

// FollowType is Follow for messages of one type alone: the kernel does not queue any others,
// so that a flood of those loses none of these. What it puts into one datagram it judges by
// the first message.
func FollowType(protocol int, cfg *Config, typ uint16, groups ...int) (*Feed, error) {
	// Before the socket belongs to any group, so that nothing passes it by.
	f, err := Follow(protocol, cfg)
	if err != nil {
		return nil, err
	}
	if err := f.filter(typ, groups); err != nil {
		return nil, errors.Join(&tombolo.OpError{Op: "subscribe to netlink", Err: err}, f.Close())
	}
	return f, nil
}

func (f *Feed) filter(typ uint16, groups []int) error {
	const typeAt, all, none = 4, 0xffffffff, 0 // in struct nlmsghdr
	// The filter loads in network byte order what is in the host's.
	wanted := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, typ))
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: typeAt},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: uint32(wanted)},
		{Code: unix.BPF_RET | unix.BPF_K, K: all},
		{Code: unix.BPF_RET | unix.BPF_K, K: none},
	}
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
