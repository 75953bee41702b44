package nl

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/mdlayher/netlink"
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

// feedSize is room for what the kernel puts into one datagram of announcements.
const feedSize = 32 << 10

// Follow opens a socket that belongs to groups (unix.RTNLGRP_*). What happens after it
// has returned is announced to it.
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
