// Package tombolo is the root of a set of packages that put pods on a Linux bridge. They work in one process and only
// over netlink: nothing here starts another program.
//
//	ns, err := netns.New() // or nil, the calling thread's
//	links, err := bridge.Dial(ns)
//	changed, err := links.Ensure(ctx, bridge.Bridge{Name: "pods0", Alias: "mycni"})
//	again, err := links.Ensure(ctx, bridge.Bridge{Name: "pods0", Alias: "mycni"}) // false: it is as it should be
//	var op *tombolo.OpError
//	_, err = links.Ensure(ctx, bridge.Bridge{Name: "lo"})
//	fmt.Println(errors.As(err, &op), errors.Is(err, bridge.ErrNotBridge), err)
//
// Programs in the docs of packages omit the handling of errors; their Examples contain it. docs/embedding.md explains
// the purpose of each package, and the promises of a version.
//
// Dial opens one netlink socket, in a namespace or, with nil, in the calling thread's. On shares one. All packages use
// net/netip, and none knows about CNI. Only network logs, to the logger of its Config, and only ipam and network keep
// files. The verbs mean the same everywhere:
//
//	Add      creates; an existing object is an error (fs.ErrExist)
//	Ensure   creates or corrects, and reports whether it changed anything
//	Replace  creates or overwrites
//	Del      deletes; a missing object is an error (fs.ErrNotExist)
//	Remove   deletes; a missing object is no error
package tombolo

import (
	"errors"
	"io/fs"
	"strings"
	"syscall"
)

// ErrInvalid is the cause of an error about an invalid argument, such as something that is no namespace, or a closed
// Conn. Nothing was changed then. A method that is called on a nil pointer, or with a nil context, panics.
var ErrInvalid = errors.New("invalid argument")

// Socket is a netlink socket that packages of this module share: their functions named On take one. It must be a socket
// that this module has opened.
type Socket interface{ Close() error }

// OpError is the error of an operation that the kernel refused, or that could not be requested. Every error of a kernel
// operation in this module is one, or wraps one or several. Use errors.As to reach the fields, and errors.Is with an
// errno (unix.EEXIST) or an error of io/fs (fs.ErrExist, fs.ErrNotExist, fs.ErrPermission) to distinguish causes.
type OpError struct {
	// Op is the requested operation, as a verb and the kind of object: "add link", "set port", "list routes".
	Op string
	// Object is the name of its object: a link's name, an address with its link, a route. It is empty if there is
	// only one.
	Object string
	// Err is the cause, usually the kernel's errno (a syscall.Errno).
	Err error
	// Message is the kernel's own explanation (its extended acknowledgement, Linux 4.12), or empty.
	Message string
}

// Error returns all four fields in one line: "add link vethab: file exists (kernel: …)".
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
// fs.ErrNotExist. ENOENT and EEXIST match the errors of io/fs without it.
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

// ErrInterrupted is the cause of the failure of a listing that the kernel marked as inconsistent (NLM_F_DUMP_INTR) at
// each attempt.
var ErrInterrupted = errors.New("listing was interrupted by changes each time it was tried")
