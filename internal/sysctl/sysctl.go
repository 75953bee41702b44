// Package sysctl reads and writes kernel parameters below /proc/sys.
//
// Those of the network are per namespace: which one a path names is decided when
// it is opened, by the thread that opens it. Use netns.NS.Do around a call.
package sysctl

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
)

const root = "/proc/sys/"

// Read returns a parameter's value without the newline. path is below /proc/sys, with slashes, since an interface's
// name may have dots.
func Read(path string) (string, error) { return all().read(path) }

// Write sets a parameter. It needs to be root of the user namespace that owns the network namespace. A read-only
// /proc/sys is no error if the parameter has the value already.
func Write(path, value string) error { return all().Write(path, value) }

// Ensure sets a parameter unless it has the value, and reports whether it had to.
func Ensure(path, value string) (changed bool, err error) { return all().Ensure(path, value) }

// Exists says whether the kernel, in its present state, has the parameter.
func Exists(path string) bool {
	_, err := Read(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// HasIPv6 looks for what every namespace has of IPv6, unless the kernel was booted with ipv6.disable=1 or built without.
// Where /proc/sys cannot be read nothing is known, and it says yes.
func HasIPv6() bool { return Exists("net/ipv6/conf/all/forwarding") || !Exists("net/ipv4/ip_forward") }

// Link gives the path of a parameter of one link: Link("ipv6", "eth0",
// "accept_ra").
func Link(family, link, name string) string {
	return strings.Join([]string{"net", family, "conf", link, name}, "/")
}

// Dir is a directory of parameters. It stays that of the network namespace in which it was opened, also when
// another thread uses it: to open it while other work goes on saves the time that it takes to find it, which is
// longer the more namespaces there are (the kernel compares each one's entry of the name, in a row).
type Dir struct {
	fd   int
	at   string // what comes before a path when a file is opened
	name string // and in errors
}

// all is /proc/sys of the calling thread.
func all() *Dir { return &Dir{unix.AT_FDCWD, root, root} }

// OpenDir opens a directory of the calling thread's network namespace. path is below
// /proc/sys: "net/ipv6/conf". Where the kernel has none, the error matches
// fs.ErrNotExist.
func OpenDir(path string) (*Dir, error) {
	fd, err := unix.Open(root+path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &tombolo.OpError{Op: "open", Object: root + path, Err: err}
	}
	return &Dir{fd, "", root + path + "/"}, nil
}

// Close gives the directory back.
func (d *Dir) Close() error { return unix.Close(d.fd) }

// Ensure is the package's Ensure for a path below the directory.
func (d *Dir) Ensure(path, value string) (changed bool, err error) {
	have, err := d.read(path)
	if err != nil || have == value {
		return false, err
	}
	return true, d.Write(path, value)
}

func (d *Dir) read(path string) (string, error) {
	fd, err := unix.Openat(d.fd, d.at+path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", &tombolo.OpError{Op: "read", Object: d.name + path, Err: err}
	}
	defer unix.Close(fd)
	var b [256]byte
	n, err := unix.Read(fd, b[:])
	if err != nil {
		return "", &tombolo.OpError{Op: "read", Object: d.name + path, Err: err}
	}
	return string(bytes.TrimSpace(b[:n])), nil
}

// Prefer is Write for a value without which the caller can go on: where /proc/sys is read-only it changes nothing.
func (d *Dir) Prefer(path, value string) error {
	if err := d.Write(path, value); !errors.Is(err, unix.EROFS) {
		return err
	}
	return nil
}

// Write is the package's Write for a path below the directory.
func (d *Dir) Write(path, value string) error {
	fd, err := unix.Openat(d.fd, d.at+path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		_, err = unix.Write(fd, []byte(value))
		err = errors.Join(err, unix.Close(fd))
	}
	if errors.Is(err, unix.EROFS) {
		have, readErr := d.read(path)
		if readErr == nil && have == value {
			return nil
		}
		err = fmt.Errorf("%w: it is %s, and /proc/sys is mounted read-only here, as for a container that is not "+
			"privileged or by ProtectKernelTunables of a systemd unit: run this privileged or without that, or "+
			"write %s beforehand where that is allowed (for a link yet to be made, in conf/default)", err, have, value)
	}
	if err != nil {
		return &tombolo.OpError{Op: "write " + value + " to", Object: d.name + path, Err: err}
	}
	return nil
}
