package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// socketName is the abstract unix socket ('@' stands for the leading NUL) that
// exclusive holders bind. It names no directory: whoever works on one network
// namespace has to come by it, whatever is mounted on their /run.
const socketName = "@tombolo/lock"

const (
	// retryAfter is how long to leave a holder that cannot be waited on: it
	// has bound the socket and does not listen yet, for a few microseconds; or
	// has closed it, and a child that was just being started has it still.
	retryAfter = time.Millisecond

	// maxRetries is when such a holder is taken for a stranger.
	maxRetries = 1000
)

var (
	errStranger = errors.New("held by a stranger")
	errNoAnswer = errors.New("the holder does not listen")
)

// bindAlone binds an abstract unix socket in the calling thread's network
// namespace, waiting for a process that has it until ctx ends. It waits by
// connecting: the connection is reset when the holder closes, or dies.
//
// A name in the abstract namespace can be taken by any local user. A holder that is
// neither root nor of our own user, or that never listens, is ignored, and -1
// returned: then the lock file alone has to do, which is better than letting anyone
// keep a node from working.
func bindAlone(ctx context.Context, name string) (int, error) {
	start := time.Now()
	for retries := 0; retries <= maxRetries; {
		fd, err := tryBind(ctx, name)
		switch {
		case err == nil && fd >= 0:
			return fd, nil
		case err == nil:
			retries = 0
		case errors.Is(err, errStranger):
			return -1, nil
		case errors.Is(err, errNoAnswer):
			retries++
		default:
			return -1, fmt.Errorf("lock %s: waited %v: %w", name, time.Since(start).Round(time.Millisecond), err)
		}
	}
	return -1, nil
}

// tryBind binds the socket. If it is taken, tryBind returns -1 when it is worth
// another try, or an error.
func tryBind(ctx context.Context, name string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	err = bindAndListen(fd, name)
	if err == nil {
		return fd, nil
	}
	if errors.Is(err, unix.EADDRINUSE) {
		err = waitForHolder(ctx, fd, name)
	}
	return -1, errors.Join(err, unix.Close(fd))
}

func bindAndListen(fd int, name string) error {
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: name}); err != nil {
		return fmt.Errorf("bind: %w", err)
	}
	if err := unix.Listen(fd, unix.SOMAXCONN); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	return nil
}

// waitForHolder returns when the process that listens at name has closed. It fails
// with ErrLocked when ctx has ended, with errStranger at once, and with errNoAnswer
// after a moment, also after ctx has ended where there is none.
func waitForHolder(ctx context.Context, fd int, name string) error {
	_, err := restart(func() (int, error) { return 0, unix.Connect(fd, &unix.SockaddrUnix{Name: name}) })
	switch err {
	case nil:
	case unix.ECONNREFUSED: // it does not listen: nobody's work is waited for
		time.Sleep(retryAfter)
		return errNoAnswer
	case unix.EAGAIN: // its queue is full
		select {
		case <-time.After(retryAfter):
			return errNoAnswer
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ErrLocked, context.Cause(ctx))
		}
	default:
		return fmt.Errorf("connect: %w", err)
	}
	// These are the credentials with which the holder called listen(2); the
	// process id is 0 from another PID namespace.
	holder, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return fmt.Errorf("read SO_PEERCRED: %w", err)
	}
	if holder.Uid != 0 && int(holder.Uid) != os.Geteuid() {
		return errStranger
	}
	if err := waitForReset(ctx, fd); err != nil {
		return fmt.Errorf("%w: process %d: %w", ErrLocked, holder.Pid, err)
	}
	return nil
}

// waitForReset blocks until the other end of a connection is gone. If ctx ends
// first, it returns its cause.
func waitForReset(ctx context.Context, fd int) error {
	if err := unix.SetNonblock(fd, false); err != nil {
		return fmt.Errorf("set blocking: %w", err)
	}
	shut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		unix.Shutdown(fd, unix.SHUT_RDWR) // ends the read
		close(shut)
	})
	defer func() {
		if !stop() {
			<-shut // before fd is closed, and its number means something else
		}
	}()
	// A holder of ours never sends. Whatever ends the read ends the wait.
	var nothing [16]byte
	for {
		n, err := restart(func() (int, error) { return unix.Read(fd, nothing[:]) })
		if n <= 0 || err != nil {
			return context.Cause(ctx)
		}
	}
}
