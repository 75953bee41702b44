package nl

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/netns"
)

// Watch receives announcements of the kernel to multicast groups. Unlike a Conn it waits. It waits in the system
// call, on the caller's thread, which saves setting up a poller for a wait of some hundred microseconds.
//
// Only one goroutine at a time may use it, except for Close.
type Watch struct {
	mu sync.Mutex // locked while fd is used, so that fd stays the same file
	fd int        // -1 after Close, when the number may be reused for another file
	queue
}

// lookUp is the interval between two looks of a waiting Next at its context.
const lookUp = 50 * time.Millisecond

// Subscribe opens a socket that is a member of groups (unix.RTNLGRP_*). It receives announcements of all changes from
// then on. ns is used as in Dial.
func Subscribe(protocol int, ns *netns.NS, groups ...int) (*Watch, error) {
	w := &Watch{fd: -1, queue: queue{buf: make([]byte, announcementSize)}}
	if err := in(ns, func() error { return w.open(protocol, groups) }); err != nil {
		if w.fd >= 0 {
			unix.Close(w.fd)
		}
		return nil, &tombolo.OpError{Op: "subscribe to netlink", Err: err}
	}
	return w, nil
}

func (w *Watch) open(protocol int, groups []int) error {
	var err error
	if w.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol); err != nil {
		return fmt.Errorf("socket: %w", err)
	}

	// A socket without a port of its own looks like the kernel, which sends no announcements to itself.
	if err := unix.Bind(w.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("bind: %w", err)
	}

	timeout := unix.NsecToTimeval(lookUp.Nanoseconds())
	if err := unix.SetsockoptTimeval(w.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		return fmt.Errorf("set receive timeout: %w", err)
	}

	for _, g := range groups {
		if err := unix.SetsockoptInt(w.fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g); err != nil {
			return fmt.Errorf("join group %d: %w", g, err)
		}
	}

	return nil
}

// Close ends the subscription, and within lookUp a Next that is waiting. All later calls, including another Close,
// return tombolo.ErrInvalid.
func (w *Watch) Close() error {

	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fd < 0 {
		return closed{}.Close()
	}

	fd := w.fd
	w.fd = -1
	return unix.Close(fd)
}

// next receives from the socket, unless it is closed.
func (w *Watch) next(flags int) ([]netlink.Message, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fd < 0 {
		return nil, closed{}.Close()
	}
	return w.receive(w.fd, flags)
}

// Next waits for the next announcements. They are valid until the following Next. An error that matches unix.ENOBUFS
// means that announcements were lost, so the caller must look for changes itself. If ctx is done, Next returns ctx's
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

// Queued returns the queued announcements without waiting, or none.
func (w *Watch) Queued() ([]netlink.Message, error) {
	list, err := w.next(unix.MSG_DONTWAIT)
	if errors.Is(err, unix.EAGAIN) {
		return nil, nil
	}
	return list, err
}

// queue reads the messages that the kernel has queued for a socket.
//
// When the kernel loses messages, it reports this once, ahead of the messages that are still queued. Until the
// socket's owner reads that report, the kernel silently continues to lose messages. So the queue reports a loss to
// its caller only when the queue is empty. A caller that looked for changes earlier could miss those that were lost
// afterwards.
type queue struct {
	buf  []byte
	lost bool // messages were lost, and the caller does not know yet
}

// receive reads one datagram. If there is none, the error matches unix.EAGAIN.
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

		if err != nil {
			return nil, fmt.Errorf("receive announcement: %w", err)
		}

		return messages(q.buf[:n])
	}
}
