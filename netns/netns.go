package netns

import (
	"errors"
	"fmt"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
)

// ErrNotNetNS is the cause of an error of Open if the path exists but is no network namespace.
var ErrNotNetNS = errors.New("not a network namespace")

// ErrOther is the cause of an error of OpenSame if the path now leads to another namespace, which has another cookie.
var ErrOther = errors.New("another network namespace by now")

// ID identifies a network namespace while it exists. It consists of a device number and an inode number, which the
// kernel reuses afterwards. Unlike an ID, a cookie (NS.Cookie) is not reused before the next boot.
type ID struct {
	dev uint64 // the device of nsfs
	ino uint64 // the namespace's inode, as in net:[4026531840]
}

// String returns the ID as the symbolic link /proc/PID/ns/net shows it, such as "net:[4026531840]".
func (id ID) String() string { return "net:[" + strconv.FormatUint(id.ino, 10) + "]" }

// NS is a handle to a network namespace, and keeps the namespace alive. Several goroutines may call its methods at
// once, except Close. A handle that is dropped without Close leaks its file descriptor.
type NS struct {
	fd   int
	path string
	id   ID
}

// Open opens the namespace at a path: a bind mount such as /run/netns/blue, or /proc/PID/ns/net. If there is no such
// path, the error matches fs.ErrNotExist. If the path is another kind of file, the error matches ErrNotNetNS. A
// deleted namespace, for example, may leave an empty file behind.
func Open(path string) (*NS, error) {
	// Without O_NONBLOCK, opening a FIFO would wait for its writer.
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, &tombolo.OpError{Op: "open network namespace", Object: path, Err: err}
	}
	id, err := identify(fd)
	if err != nil {
		unix.Close(fd)
		return nil, &tombolo.OpError{Op: "open network namespace", Object: path, Err: err}
	}
	return &NS{fd: fd, path: path, id: id}, nil
}

// OpenSame opens the namespace at a path, and compares its cookie with the given one, since paths are reused: see
// NS.Cookie. If the cookies differ, the error matches ErrOther.
func OpenSame(path string, cookie uint64) (*NS, error) {
	ns, err := Open(path)
	if err != nil {
		return nil, err
	}

	now, err := ns.Cookie()
	if err == nil && now != cookie {
		err = fmt.Errorf("open network namespace %s: %w", path, ErrOther)
	}

	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return ns, nil
}

// Current opens the namespace of the calling thread.
func Current() (*NS, error) {
	ns, err := Open("/proc/thread-self/ns/net")
	if err == nil {
		ns.path = "" // another thread that opened this path would get a different namespace
	}
	return ns, err
}

// New creates a network namespace without a name. The namespace lives until its handle is closed and no process, socket
// or mount uses it any more. Its loopback interface is down. New needs CAP_SYS_ADMIN.
func New() (*NS, error) {
	var ns *NS
	err := andReturn(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return &tombolo.OpError{Op: "create network namespace", Err: err}
		}

		ns, err = Current()
		return err
	})

	return ns, err
}

// identify returns the ID of the namespace that a file descriptor refers to, or ErrNotNetNS.
func identify(fd int) (ID, error) {
	// NS_GET_NSTYPE (Linux 4.11) fails for files outside nsfs. Some other files accept any ioctl, so compare the
	// result too.
	if kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE); err != nil || kind != unix.CLONE_NEWNET {
		return ID{}, ErrNotNetNS
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return ID{}, fmt.Errorf("stat: %w", err)
	}
	return ID{dev: st.Dev, ino: st.Ino}, nil
}

// ID returns the namespace's ID. Two handles of the same existing namespace have equal IDs.
func (ns *NS) ID() ID {
	if ns == nil {
		return ID{}
	}

	return ns.id
}

// FD returns the file descriptor, for requests that refer to a namespace (IFLA_NET_NS_FD). It is valid until Close, and
// -1 afterwards.
func (ns *NS) FD() int {
	if ns.usable() != nil {
		return -1
	}

	return ns.fd
}

// usable returns an error if the handle is closed, is nil, or did not come from Open, Current or New. The error matches
// EBADF and tombolo.ErrInvalid.
func (ns *NS) usable() error {
	if ns == nil || ns.fd < 0 || ns.id == (ID{}) {
		return fmt.Errorf("%w: the handle is closed: %w", tombolo.ErrInvalid, unix.EBADF)
	}

	return nil
}

// String returns the path of the namespace. If there is none, it returns the ID.
func (ns *NS) String() string {
	if ns == nil || ns.path == "" {
		return ns.ID().String()
	}
	return ns.path
}

// Close closes the handle. The namespace lives on while anything else uses it. Later calls that use the namespace fail
// with EBADF.
func (ns *NS) Close() error {
	if err := ns.usable(); err != nil {
		return &tombolo.OpError{Op: "close network namespace", Object: ns.String(), Err: err}
	}
	fd := ns.fd
	ns.fd = -1 // never use the number again: the kernel may give it to another file
	return unix.Close(fd)
}

// ErrStranded is the cause of an error if the kernel refused to move a thread back to its own namespace. New, OpenSame,
// Cookie, Do, Enter and Enter's function leave can return this error. The calling goroutine is then still in the other
// namespace. It stays locked to its thread, so that no other goroutine runs there. The caller should end the goroutine.
var ErrStranded = errors.New("the thread could not return to its own network namespace")

// Do runs fn in the namespace and returns its error. The sockets and the files under /proc/sys/net that fn opens stay
// in that namespace. Goroutines started by fn do not run there. Do needs CAP_SYS_ADMIN.
//
// Use Do to open sockets and files, and use these outside of it: while fn runs, its thread serves no other goroutine.
func (ns *NS) Do(fn func() error) error {
	return andReturn(func() error {
		if err := ns.enter(); err != nil {
			return err
		}
		return fn()
	})
}

// enter moves the calling thread into the namespace. The goroutine must be locked to the thread.
func (ns *NS) enter() error {
	err := ns.usable()
	if err == nil {
		err = unix.Setns(ns.fd, unix.CLONE_NEWNET)
	}
	if err != nil {
		return &tombolo.OpError{Op: "enter network namespace", Object: ns.String(), Err: err}
	}
	return nil
}

// Enter locks the calling goroutine to its thread and moves the thread into the namespace, until the goroutine calls
// leave. It is for work that does not fit into one function for Do, and needs CAP_SYS_ADMIN too. A second call of leave
// changes nothing, and returns an error that matches tombolo.ErrInvalid.
func (ns *NS) Enter() (leave func() error, _ error) {
	home, err := lockHome()
	if err != nil {
		return nil, err
	}

	if err := ns.enter(); err != nil {
		return nil, errors.Join(err, goHome(home))
	}

	left := false
	return func() error {
		if left {
			return &tombolo.OpError{Op: "leave network namespace", Object: ns.String(),
				Err: fmt.Errorf("%w: it was left already", tombolo.ErrInvalid)}
		}
		left = true
		return goHome(home)
	}, nil
}

// andReturn runs a function that may change its thread's namespace. Afterwards it moves the thread back, even if the
// function panics. It runs the function on the caller's thread, because another thread would cost the CNI plugin a
// tenth of its time.
func andReturn(fn func() error) (err error) {
	home, err := lockHome()
	if err != nil {
		return err
	}

	defer func() {
		if stranded := goHome(home); stranded != nil {
			err = errors.Join(err, stranded)
		}
	}()
	return fn()
}

// lockHome locks the goroutine to its thread. It returns a file descriptor of the thread's current namespace for
// goHome.
func lockHome() (home int, _ error) {
	runtime.LockOSThread()
	home, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		runtime.UnlockOSThread()
		return 0, &tombolo.OpError{Op: "open the thread's own network namespace", Err: err}
	}

	// Move the thread to its own namespace, which changes nothing. The call fails if goHome would fail later: in a
	// user namespace that does not own the process's network namespace.
	if err := unix.Setns(home, unix.CLONE_NEWNET); err != nil {
		unix.Close(home)
		runtime.UnlockOSThread()
		return 0, &tombolo.OpError{Op: "make sure of the way back to the own network namespace", Err: err}
	}
	return home, nil
}

// goHome moves the thread back to the namespace that lockHome opened, closes the file descriptor and unlocks the
// goroutine. If the kernel refuses, the goroutine stays locked, and the error matches ErrStranded.
func goHome(home int) error {
	defer unix.Close(home)
	if err := unix.Setns(home, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("%w: %w", ErrStranded, err)
	}
	runtime.UnlockOSThread()
	return nil
}

// Cookie returns the number that the kernel assigned to the namespace at its creation (SO_NETNS_COOKIE, Linux 5.14).
// Unlike paths and inodes, cookies are not reused before the next boot. Cookie needs CAP_SYS_ADMIN.
func (ns *NS) Cookie() (uint64, error) {
	var cookie uint64
	err := ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		return err
	})
	if err != nil {
		return 0, &tombolo.OpError{Op: "read cookie of network namespace", Object: ns.String(), Err: err}
	}
	return cookie, nil
}
