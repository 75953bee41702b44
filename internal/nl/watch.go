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

// Watch receives announcements that the kernel sends to multicast groups. It waits in a system call on the caller's
// thread. For a wait of some hundred microseconds, this is cheaper than a poller.
//
// Only one goroutine may use a Watch at a time. Close may be called from any goroutine.
type Watch struct {
	mu sync.Mutex // locked while fd is used, so that fd stays the same file
	fd int        // -1 after Close, when the number may be reused for another file
	queue
}

// lookUp is the interval in which a waiting Next checks its context.
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

func (w *Watch) open(protocol int, groups []int) error {
	var err error
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

	for _, g := range groups {
		if err := unix.SetsockoptInt(w.fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g); err != nil {
			return fmt.Errorf("join group %d: %w", g, err)
		}
	}

	return nil
}

// Close closes the socket. If another goroutine is waiting in Next, that call returns within 50 ms (lookUp). Later
// calls of any method, including Close, return an error that matches tombolo.ErrInvalid.
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

// next receives from the socket. If the Watch is closed, it returns an error.
func (w *Watch) next(flags int) ([]netlink.Message, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fd < 0 {
		return nil, closedTransport{}.Close()
	}
	return w.receive(w.fd, flags)
}

// Next waits for the next announcements. They are valid until the next call of Next. If announcements were lost, the
// error matches unix.ENOBUFS, and the caller must look for changes itself. If ctx ends, Next returns ctx's error.
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

// Queued returns the announcements that are already queued, without waiting. The result may be empty.
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
// has read this report, the kernel loses more messages without another report. So queue first reads all queued
// messages, and only then returns ENOBUFS to its caller. If a caller looked for changes earlier, it could miss
// changes whose messages were lost later.
type queue struct {
	buf   []byte
	lost  bool // messages were lost, and receive has not reported this yet
	debug *debugger
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

		return q.messages(n)
	}
}
