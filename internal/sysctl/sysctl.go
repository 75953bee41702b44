// Package sysctl reads and writes kernel parameters below /proc/sys.
//
// Network parameters exist once in each network namespace. The kernel uses the namespace of the thread that opens the
// path. To reach another namespace, call the functions inside netns.NS.Do.
package sysctl

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
)

const root = "/proc/sys/"

// Read returns a parameter's value without the newline. path is relative to /proc/sys and has slashes, since an
// interface's name may contain dots.
func Read(path string) (string, error) { return all().read(path) }

// Write sets a parameter. For a network parameter, it needs CAP_NET_ADMIN in the user namespace that owns the network
// namespace. If /proc/sys is read-only, Write returns an error, unless the parameter already has the value.
func Write(path, value string) error { return all().Write(path, value) }

// Ensure sets a parameter unless it already has the value, and reports whether it changed the parameter.
func Ensure(path, value string) (changed bool, err error) { return all().Ensure(path, value) }

// Exists reports whether the kernel has the parameter at present, even if the parameter cannot be read. Loading a
// module may add parameters.
func Exists(path string) bool {
	_, err := Read(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// HasIPv6 reports whether the kernel supports IPv6. A kernel that was booted with ipv6.disable=1, or built without
// IPv6, does not. If /proc/sys cannot be read, HasIPv6 returns true.
func HasIPv6() bool { return Exists("net/ipv6/conf/all/forwarding") || !Exists("net/ipv4/ip_forward") }

// Link returns the path of a parameter of one link. For example, Link("ipv6", "eth0", "accept_ra") returns
// "net/ipv6/conf/eth0/accept_ra".
func Link(family, link, name string) string {
	return strings.Join([]string{"net", family, "conf", link, name}, "/")
}

// Dir is an open directory of parameters. It belongs to the network namespace of the thread that opened it, and any
// thread may use it. The more namespaces exist, the longer the kernel takes to find the directory, since it compares
// the entries of all namespaces. So open a Dir early, in parallel with other work.
type Dir struct {
	fd   int
	at   string // prefix of the paths that are opened, relative to fd
	name string // prefix of the paths in errors
}

// all returns the directory /proc/sys. The path of a network parameter in it leads to the network namespace of the
// thread that opens it.
func all() *Dir { return &Dir{unix.AT_FDCWD, root, root} }

// OpenDir opens a directory in the calling thread's network namespace. path is relative to /proc/sys, such as
// "net/ipv6/conf". If the kernel does not have the directory, the error matches fs.ErrNotExist.
func OpenDir(path string) (*Dir, error) {
	fd, err := unix.Open(root+path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &tombolo.OpError{Op: "open", Object: root + path, Err: err}
	}
	return &Dir{fd, "", root + path + "/"}, nil
}

// Close closes the directory.
func (d *Dir) Close() error { return unix.Close(d.fd) }

// Ensure sets a parameter unless it already has the value, and reports whether it changed the parameter. path is
// relative to the directory.
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

// Prefer sets a parameter like Write, but returns no error if /proc/sys is read-only. Use it for a change that the
// caller can do without.
func (d *Dir) Prefer(path, value string) error {
	if err := d.Write(path, value); !errors.Is(err, unix.EROFS) {
		return err
	}
	return nil
}

// Write sets a parameter like the function Write. path is relative to the directory.
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

// OwnForwarding is the value that Tombolo writes to net.ipv4.conf.LINK.forwarding. The kernel treats every value except
// 0 as on. So this value distinguishes links that Tombolo set from links that an operator set to 1. New links also get
// this value if net.ipv4.conf.default.forwarding has it.
const OwnForwarding = "116"

// Links returns the values of a parameter for each link, and for "default", which new links copy. The keys are the
// links' names. It leaves out links without the parameter, and links that were just deleted. If the kernel does not
// support the address family, the result is empty.
func Links(family, name string) (map[string]string, error) {
	dir := root + "net/" + family + "/conf"
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, &tombolo.OpError{Op: "list", Object: dir, Err: err}
	}

	values := make(map[string]string, len(entries))
	for _, e := range entries {
		if e.Name() == "all" {
			continue
		}
		value, err := Read(Link(family, e.Name(), name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if err == nil {
			values[e.Name()] = value
		}
	}

	return values, nil
}

// Replace changes a parameter from the value have to the value want, for each link and for "default". It skips links
// with any other value, and the links in except. If it fails for one link, it continues with the next, and returns all
// errors.
func Replace(family, name, have, want string, except ...string) error {
	values, err := Links(family, name)
	for link, value := range values {
		if value != have || slices.Contains(except, link) {
			continue
		}
		if e := Write(Link(family, link, name), want); !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
	}

	return err
}
