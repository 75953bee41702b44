// Package tombolo is the root of a set of packages that put pods on a Linux
// bridge, in one process and over netlink alone: nothing here starts another
// program.
//
//	ns, err := netns.New() // or nil, the calling thread's
//	links, err := bridge.Dial(ns)
//	changed, err := links.Ensure(ctx, bridge.Bridge{Name: "pods0", Alias: "mycni"})
//	again, err := links.Ensure(ctx, bridge.Bridge{Name: "pods0", Alias: "mycni"}) // false: it is as it should be
//	var op *tombolo.OpError
//	_, err = links.Ensure(ctx, bridge.Bridge{Name: "lo"})
//	fmt.Println(errors.As(err, &op), errors.Is(err, bridge.ErrNotBridge), err)
//
// Programs in the docs of packages leave the handling of errors out; their Examples have it. docs/embedding.md says
// which package is for what, and what a version promises.
//
// Dial opens one netlink socket, in a namespace or, with nil, in the calling thread's; On shares one. All speak
// net/netip, and none knows what CNI is; only network logs, to the logger of its Config, and only ipam and network
// keep files. The verbs mean the same everywhere:
//
//	Add      creates; what is there already is an error (fs.ErrExist)
//	Ensure   creates or corrects, and says whether it changed anything
//	Replace  creates or overwrites
//	Del      deletes; what is not there is an error (fs.ErrNotExist)
//	Remove   deletes; it is no error if it is not there
package tombolo

import (
	"errors"
	"io/fs"
	"strings"
	"syscall"
)

// ErrInvalid is the cause of an error about an argument that is not valid: no namespace, or a Conn that has been
// closed. Nothing has been done then. A method that is called on a nil pointer, or with a nil context, panics.
var ErrInvalid = errors.New("invalid argument")

// Socket is a netlink socket that packages of this module share: their functions called On take one. Only sockets that
// this module opens will do.
type Socket interface{ Close() error }

// OpError is the error of an operation that the kernel refused, or that could
// not be put to it. Every error of a kernel operation in this module is one, or
// wraps one or several: use errors.As to reach the fields, and errors.Is with an
// errno (unix.EEXIST) or a sentinel of io/fs (fs.ErrExist, fs.ErrNotExist,
// fs.ErrPermission) to branch.
type OpError struct {
	// Op is what was asked for, as a verb and the kind of object: "add link",
	// "set port", "list routes".
	Op string
	// Object names the object that it was asked of: a link's name, an address
	// with its link, a route. Empty where there is just one.
	Object string
	// Err is the cause, in general the kernel's errno (a syscall.Errno).
	Err error
	// Message is the kernel's own explanation (its extended acknowledgement,
	// Linux 4.12), in the kernel's words; empty where it gave none.
	Message string
}

// Error gives all four fields in one line: "add link vethab: file exists
// (kernel: …)".
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

// Unwrap gives the cause, so that errors.Is sees the errno.
func (e *OpError) Unwrap() error {
	return e.Err
}

// Is makes the errnos by which the kernel says that a link (ENODEV), a route
// (ESRCH) or an address (EADDRNOTAVAIL) is not there match fs.ErrNotExist; ENOENT
// and EEXIST match their sentinels by themselves.
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

// ErrInterrupted is the cause of a listing that the kernel marked as
// inconsistent (NLM_F_DUMP_INTR) each time it was tried again.
var ErrInterrupted = errors.New("listing was interrupted by changes each time it was tried")
