// Package tombolo is the root of a set of packages that put pods on a Linux bridge. They work in one process, mostly
// over netlink: no public package starts another program.
//
//	ns, err := netns.New() // or nil, the calling thread's
//	links, err := bridge.Dial(ns)
//	changed, err := links.Ensure(ctx, bridge.Bridge{Name: "pods0", Alias: "mycni"})
//	again, err := links.Ensure(ctx, bridge.Bridge{Name: "pods0", Alias: "mycni"}) // false: nothing to change
//	var op *tombolo.OpError
//	_, err = links.Ensure(ctx, bridge.Bridge{Name: "lo"})
//	fmt.Println(errors.As(err, &op), errors.Is(err, bridge.ErrNotBridge), err)
//
// The programs in package comments omit the handling of errors; the Examples contain it. docs/embedding.md explains
// the purpose of each package, and the promises of a version.
//
// Dial opens a connection to the given namespace or, if that is nil, to the calling thread's. On uses a netlink socket
// that is already open. Addresses have the types of net/netip. No public package imports the CNI library. Only package
// network logs, to the logger of its Config. If the environment variable NLDEBUG is set, as for mdlayher/netlink, every
// netlink socket prints its messages to standard error. Only packages ipam and network write files, except sysctls.
// Most methods follow these verbs:
//
//	Add      creates; an existing object is an error (fs.ErrExist)
//	Ensure   creates or corrects, and reports whether it changed anything
//	Replace  creates or overwrites
//	Del      undoes an Add; a missing object is no error
//	Remove   deletes; a missing object is no error
package tombolo

import (
	"errors"
	"io/fs"
	"strings"
	"syscall"
)

// ErrInvalid is the cause of an error about an invalid argument, such as a file that is no namespace, or a closed Conn.
// After such an error nothing has changed. A method that is called on a nil pointer, or with a nil context, may panic.
var ErrInvalid = errors.New("invalid argument")

// Socket is a netlink socket that several packages of this module share. A package's On function takes a Socket,
// which must come from this module.
type Socket interface{ Close() error }

// OpError is the error of an operation that the kernel refused, or that could not be requested. Every error of a
// netlink request in this module is an OpError, or wraps one or several. Use errors.As to reach the fields. Use
// errors.Is with an errno (unix.EEXIST) or an error of io/fs (fs.ErrExist, fs.ErrNotExist, fs.ErrPermission) to
// distinguish causes.
type OpError struct {
	// Op is the requested operation, as a verb and the kind of object: "add link", "set port", "list routes".
	Op string
	// Object is the name of the object, such as a link's name, an address with its link, or a route. It is empty if no
	// single object is meant, as in a listing.
	Object string
	// Err is the cause, usually the kernel's errno (a syscall.Errno).
	Err error
	// Message is the kernel's own explanation (the extended acknowledgement, Linux 4.12). It is empty if the kernel
	// gave none.
	Message string
}

// Error returns all four fields in one line, such as "add link vethab: file exists (kernel: …)".
func (e *OpError) Error() string {
	var b strings.Builder
	b.WriteString(e.Op)
	if e.Object != "" {
		b.WriteByte(' ')
		b.WriteString(e.Object)
	}

	b.WriteString(": ")
	if e.Err != nil {
		b.WriteString(e.Err.Error())
	} else {
		b.WriteString("failed")
	}

	if e.Message != "" {
		b.WriteString(" (kernel: ")
		b.WriteString(e.Message)
		b.WriteByte(')')
	}

	return b.String()
}

// Unwrap returns the cause, so that errors.Is sees the errno.
func (e *OpError) Unwrap() error {
	return e.Err
}

// Is makes the kernel's errnos for a missing link (ENODEV), route (ESRCH) or address (EADDRNOTAVAIL) match
// fs.ErrNotExist. ENOENT and EEXIST need no help: package syscall already matches them with the errors of io/fs.
func (e *OpError) Is(target error) bool {
	if target != fs.ErrNotExist {
		return false
	}
	var errno syscall.Errno
	if !errors.As(e.Err, &errno) {
		return false
	}
	return errno == syscall.ENODEV || errno == syscall.ESRCH || errno == syscall.EADDRNOTAVAIL
}

// ErrInterrupted is the cause of an error if changes interrupted a listing at every try.
var ErrInterrupted = errors.New("listing was interrupted by changes each time it was tried")
