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

// Watch receives what the kernel announces to multicast groups. Unlike a Conn it
// waits; it does so in the system call, on the caller's thread, so that no poller
// is set up for a wait of some hundred microseconds.
//
// It is for one goroutine at a time, but for Close.
type Watch struct {
	mu sync.Mutex // held while fd is used, so that it is the same file throughout
	fd int        // -1 after Close: the number may be another file's by then
	queue
}

// lookUp is how often a wait that hears nothing looks whether its context is done.
const lookUp = 50 * time.Millisecond

// Subscribe opens a socket that belongs to groups (unix.RTNLGRP_*). It receives announcements of all changes after
// it has returned. A namespace is as for Dial.
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
	// Without a port of its own a socket is taken for the kernel, which does not
	// announce things to itself.
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

// Close ends the subscription, and a Next that waits, within lookUp. All later calls, another Close too, fail with
// tombolo.ErrInvalid.
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

// Next waits for the next announcements, which are good until the Next after it.
// An error matching unix.ENOBUFS says that some were lost, of those since the one
// before it, and that the caller has to look for itself; the error of a ctx that is
// done is ctx's own.
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

// Queued is Next that does not wait: it gives none where nothing has been announced.
func (w *Watch) Queued() ([]netlink.Message, error) {
	list, err := w.next(unix.MSG_DONTWAIT)
	if errors.Is(err, unix.EAGAIN) {
		return nil, nil
	}
	return list, err
}

// queue reads what the kernel has queued for a socket.
//
// The kernel says once that it lost something, ahead of what is still queued, and goes
// on losing, in silence, until that has been read. So the caller is told where the queue
// ends: a caller that looks for itself any earlier may miss what is lost after that.
type queue struct {
	buf  []byte
	lost bool // something was, and the caller has not been told
}

// receive reads one datagram. The error matches unix.EAGAIN where there is none.
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
