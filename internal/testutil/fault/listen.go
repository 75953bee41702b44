package fault

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// notification is struct seccomp_notif.
type notification struct {
	id    uint64
	pid   uint32 // the thread
	flags uint32
	nr    int32
	arch  uint32
	ip    uint64
	args  [6]uint64
}

// response is struct seccomp_notif_resp.
type response struct {
	id    uint64
	val   int64
	error int32
	flags uint32
}

// serve answers for each call until no process is left that makes any.
func (r *Run) serve(listener int) error {
	for {
		poll := []unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("poll the listener: %w", err)
		}
		if poll[0].Revents&unix.POLLIN == 0 {
			if poll[0].Revents != 0 { // POLLHUP
				return nil
			}
			continue
		}
		var n notification
		if err := ioctl(listener, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&n)); err != nil {
			// Killed meanwhile, or interrupted.
			if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINTR) {
				continue
			}
			return fmt.Errorf("receive from the listener: %w", err)
		}
		answer := r.decide(&n)
		if answer == nil {
			continue
		}
		err := ioctl(listener, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(answer))
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("answer the listener: %w", err)
		}
	}
}

func ioctl(fd int, request uint, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// decide counts a call, and says what becomes of it; nil: nothing any more.
func (r *Run) decide(n *notification) *response {
	goes := &response{id: n.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
	if ofRuntime(n) {
		return goes
	}
	if r.fault.Before != nil {
		r.fault.Before(describe(n))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	o := &r.outcome
	if o.Calls++; o.Calls != r.fault.At {
		return goes
	}
	o.Fired = true
	if r.fault.Kind == Kill {
		o.Call = describe(n)
		_ = r.cmd.Process.Kill()
		return nil
	}
	errno := Errno(int(n.nr))
	o.Call = describe(n) + ": " + unix.ErrnoName(errno)
	return &response{id: n.id, error: -int32(errno)}
}

// ofRuntime says that a call is one of Go's runtime, as the filter cannot tell: what it
// wakes its poller by, and whether the standard descriptors are open.
func ofRuntime(n *notification) bool {
	switch n.nr {
	case unix.SYS_FCNTL:
		return n.args[0] <= 2
	case unix.SYS_READ, unix.SYS_WRITE:
		return n.args[0] > 2 && fileOf(n.pid, n.args[0]) == "anon_inode:[eventfd]"
	}
	return false
}

func fileOf(pid uint32, fd uint64) string {
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, fd))
	if err != nil {
		return fmt.Sprint(fd)
	}
	return path
}

// Errno is what a call fails with: what the kernel may say there for want of something,
// whatever the program does right.
func Errno(nr int) unix.Errno {
	switch nr {
	case unix.SYS_SENDMSG, unix.SYS_SENDTO, unix.SYS_RECVMSG, unix.SYS_RECVFROM:
		return unix.ENOBUFS
	case unix.SYS_SOCKET, unix.SYS_INOTIFY_INIT1, unix.SYS_DUP3:
		return unix.EMFILE
	case unix.SYS_WRITE, unix.SYS_MKDIRAT, unix.SYS_LINKAT, unix.SYS_FTRUNCATE, unix.SYS_INOTIFY_ADD_WATCH:
		return unix.ENOSPC
	case unix.SYS_FLOCK:
		return unix.ENOLCK
	case unix.SYS_SETNS, unix.SYS_UNSHARE, unix.SYS_BIND, unix.SYS_SETSOCKOPT:
		return unix.ENOMEM
	}
	return unix.EIO
}

// names are those of the calls that programs here make; onFile those whose first argument
// is a descriptor, onPath those whose second is a path.
func names() map[int32]string {
	return map[int32]string{
		unix.SYS_OPENAT: "openat", unix.SYS_READ: "read", unix.SYS_WRITE: "write", unix.SYS_CLOSE: "close", unix.SYS_PREAD64: "pread64",
		unix.SYS_PWRITE64: "pwrite64", unix.SYS_SENDMSG: "sendmsg", unix.SYS_SENDTO: "sendto", unix.SYS_RECVMSG: "recvmsg",
		unix.SYS_RECVFROM: "recvfrom", unix.SYS_SOCKET: "socket", unix.SYS_BIND: "bind", unix.SYS_CONNECT: "connect",
		unix.SYS_LISTEN: "listen", unix.SYS_ACCEPT4: "accept4", unix.SYS_SETSOCKOPT: "setsockopt", unix.SYS_GETSOCKOPT: "getsockopt",
		unix.SYS_GETSOCKNAME: "getsockname", unix.SYS_FCNTL: "fcntl", unix.SYS_FLOCK: "flock", unix.SYS_IOCTL: "ioctl",
		unix.SYS_FSTAT: "fstat", unix.SYS_FSTATFS: "fstatfs", unix.SYS_STATX: "statx", unix.SYS_GETDENTS64: "getdents64",
		unix.SYS_RENAMEAT: "renameat", unix.SYS_RENAMEAT2: "renameat2", unix.SYS_UNLINKAT: "unlinkat", unix.SYS_MKDIRAT: "mkdirat",
		unix.SYS_LINKAT: "linkat", unix.SYS_READLINKAT: "readlinkat", unix.SYS_FACCESSAT: "faccessat", unix.SYS_FACCESSAT2: "faccessat2",
		unix.SYS_FTRUNCATE: "ftruncate", unix.SYS_FSYNC: "fsync", unix.SYS_FDATASYNC: "fdatasync", unix.SYS_LSEEK: "lseek",
		unix.SYS_SETNS: "setns", unix.SYS_INOTIFY_INIT1: "inotify_init1", unix.SYS_INOTIFY_ADD_WATCH: "inotify_add_watch",
		unix.SYS_FCHMODAT: "fchmodat", unix.SYS_UTIMENSAT: "utimensat", unix.SYS_PPOLL: "ppoll", unix.SYS_CAPGET: "capget",
	}
}

// describe is a call in words: its name, and the file that it is about.
func describe(n *notification) string {
	name, ok := names()[n.nr]
	if !ok {
		name = fmt.Sprintf("call %d", n.nr)
	}
	switch {
	case strings.HasSuffix(name, "at") || strings.HasSuffix(name, "at2"):
		return fmt.Sprintf("%s(%s)", name, text(n.pid, n.args[1]))
	case name == "socket":
		return fmt.Sprintf("socket(%d, %d, %d)", n.args[0], n.args[1], n.args[2])
	case name == "ppoll" || name == "capget" || !ok:
		return name
	}
	return fmt.Sprintf("%s(%s)", name, fileOf(n.pid, n.args[0]))
}

// text reads a string of a process.
func text(pid uint32, at uint64) string {
	buf := make([]byte, 256)
	local := []unix.Iovec{{Base: &buf[0]}}
	local[0].SetLen(len(buf))
	// Not over the end of a page, behind which there may be nothing.
	size := min(len(buf), os.Getpagesize()-int(at%uint64(os.Getpagesize())))
	n, err := unix.ProcessVMReadv(int(pid), local, []unix.RemoteIovec{{Base: uintptr(at), Len: size}}, 0)
	if err != nil || n <= 0 {
		return "?"
	}
	s, _, _ := bytes.Cut(buf[:n], []byte{0})
	return string(s)
}

// nativeOrder is asserted by the filter, which loads the low half of an argument.
func littleEndian() bool { return binary.NativeEndian.Uint16([]byte{1, 0}) == 1 }
