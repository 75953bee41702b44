package netns

import (
	"errors"
	"fmt"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
)

// ErrNotNetNS is the cause of an Open whose path is there, but is no network
// namespace.
var ErrNotNetNS = errors.New("not a network namespace")

// ErrOther is the cause of an OpenSame whose path leads to another namespace than the one of the cookie.
var ErrOther = errors.New("another network namespace by now")

// ID identifies a network namespace for as long as it lives. Both numbers are
// reused after it is gone: see Cookie for an identity that is not.
type ID struct {
	dev uint64 // the device of nsfs
	ino uint64 // the namespace's inode, as in net:[4026531840]
}

// String gives the form that /proc/PID/ns/net shows.
func (id ID) String() string { return "net:[" + strconv.FormatUint(id.ino, 10) + "]" }

// NS is a handle to a network namespace, which it keeps alive. Its methods may
// be called from several goroutines at once, Close excepted.
// A handle that is dropped without Close leaks its descriptor.
type NS struct {
	fd   int
	path string
	id   ID
}

// Open opens the namespace that a path names: a bind mount such as
// /run/netns/blue, or /proc/PID/ns/net. The error matches fs.ErrNotExist where
// there is no such path, and ErrNotNetNS where it is something else, such as the
// empty file which a namespace's removal can leave behind.
func Open(path string) (*NS, error) {
	// Without O_NONBLOCK, a FIFO of that name would keep us waiting for its writer.
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

// OpenSame is Open of a path that may be used again, for the namespace that has a cookie: see NS.Cookie. The error
// matches ErrOther where another is there.
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
		ns.path = "" // a reader would take it for another namespace
	}
	return ns, err
}

// New creates a network namespace that has no name: it lives until its handle
// is closed and no process, socket or mount holds it. It has a loopback
// interface, down, and nothing else. It needs CAP_SYS_ADMIN.
func New() (*NS, error) {
	var ns *NS
	err := andReturn(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return &tombolo.OpError{Op: "create network namespace", Err: err}
		}
		var err error
		ns, err = Current()
		return err
	})
	return ns, err
}

func identify(fd int) (ID, error) {
	// NS_GET_NSTYPE (Linux 4.11) refuses files that are not in nsfs; some other files answer any ioctl, so the type
	// is compared as well.
	if kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE); err != nil || kind != unix.CLONE_NEWNET {
		return ID{}, ErrNotNetNS
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return ID{}, fmt.Errorf("stat: %w", err)
	}
	return ID{dev: st.Dev, ino: st.Ino}, nil
}

// ID gives the device and inode of the namespace: equal for two handles of the
// same living namespace.
func (ns *NS) ID() ID {
	if ns == nil {
		return ID{}
	}
	return ns.id
}

// FD gives the file descriptor, which is good until Close, for requests that name
// a namespace (IFLA_NET_NS_FD).
func (ns *NS) FD() int {
	if ns.Usable() != nil {
		return -1
	}
	return ns.fd
}

// Usable says what is wrong with a handle that is nil, that none of Open, Current and
// New gave, or that has been closed. The error matches tombolo.ErrInvalid.
func (ns *NS) Usable() error {
	switch {
	case ns == nil || ns.id == ID{}:
		return fmt.Errorf("%w: no network namespace", tombolo.ErrInvalid)
	case ns.fd < 0:
		return closedError{}
	}
	return nil
}

// closedError is about a handle after Close: it says what the kernel would, and matches
// tombolo.ErrInvalid too.
type closedError struct{}

func (closedError) Error() string   { return unix.EBADF.Error() }
func (closedError) Unwrap() []error { return []error{unix.EBADF, tombolo.ErrInvalid} }

// String gives the path, or the ID where there is none.
func (ns *NS) String() string {
	if ns == nil || ns.path == "" {
		return ns.ID().String()
	}
	return ns.path
}

// Close gives the handle up. The namespace lives on while anything else holds it. All later calls with the handle
// fail with EBADF.
func (ns *NS) Close() error {
	if err := ns.Usable(); err != nil {
		return &tombolo.OpError{Op: "close network namespace", Object: ns.String(), Err: err}
	}
	fd := ns.fd
	ns.fd = -1 // the number may be another file's by then
	return unix.Close(fd)
}

// ErrStranded is the cause of an error of Do or New after which the calling
// goroutine is still in the other namespace, since the kernel refused the way
// back. It stays locked to that thread, so that no other goroutine gets there; end
// it.
var ErrStranded = errors.New("the thread could not return to its own network namespace")

// Do runs fn in the namespace and returns its error: what fn opens (sockets,
// files under /proc/sys/net) belongs to the namespace and goes on doing so
// afterwards. Goroutines that fn starts do not run there. Do needs CAP_SYS_ADMIN.
//
// Prefer it for opening things, and use them outside: fn's thread is taken from
// the Go scheduler meanwhile.
func (ns *NS) Do(fn func() error) error {
	if fn == nil {
		return &tombolo.OpError{Op: "enter network namespace", Object: ns.String(), Err: fmt.Errorf("%w: nothing to run", tombolo.ErrInvalid)}
	}
	return andReturn(func() error {
		if err := ns.enter(); err != nil {
			return err
		}
		return fn()
	})
}

func (ns *NS) enter() error {
	err := ns.Usable()
	if err == nil {
		err = unix.Setns(ns.fd, unix.CLONE_NEWNET)
	}
	if err != nil {
		return &tombolo.OpError{Op: "enter network namespace", Object: ns.String(), Err: err}
	}
	return nil
}

// Enter is Do for what is no single function: the calling goroutine is in the namespace, and
// locked to its thread, until it calls leave. A second call of leave is an error that matches tombolo.ErrInvalid, and
// changes nothing.
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
			return &tombolo.OpError{Op: "leave network namespace", Object: ns.String(), Err: fmt.Errorf("%w: it was left already", tombolo.ErrInvalid)}
		}
		left = true
		return goHome(home)
	}, nil
}

// andReturn runs a function that may change its thread's namespace, and puts the
// thread back where it was, also when the function panics. It does so on the
// caller's thread: to hand the function to another costs a plugin, which does
// little else, a tenth of its time.
func andReturn(fn func() error) error {
	home, err := lockHome()
	if err != nil {
		return err
	}
	returned := false
	defer func() {
		if !returned {
			goHome(home)
		}
	}()
	err = fn()
	returned = true
	if stranded := goHome(home); stranded != nil {
		return errors.Join(err, stranded)
	}
	return err
}

// lockHome locks the goroutine to its thread, and opens that one's namespace.
func lockHome() (home int, _ error) {
	runtime.LockOSThread()
	home, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		runtime.UnlockOSThread()
		return 0, &tombolo.OpError{Op: "open the thread's own network namespace", Err: err}
	}
	// It changes nothing, and is refused if the way back would be: to a process in
	// a user namespace that does not own the network namespace that it is in.
	if err := unix.Setns(home, unix.CLONE_NEWNET); err != nil {
		unix.Close(home)
		runtime.UnlockOSThread()
		return 0, &tombolo.OpError{Op: "make sure of the way back to the own network namespace", Err: err}
	}
	return home, nil
}

func goHome(home int) error {
	defer unix.Close(home)
	if err := unix.Setns(home, unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("%w: %w", ErrStranded, err)
	}
	runtime.UnlockOSThread()
	return nil
}

// Cookie gives the number that the kernel gave the namespace at its creation
// (SO_NETNS_COOKIE, Linux 5.14). It is never given to another namespace until the
// machine boots again, unlike paths and inodes.
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
