// Package sysctl reads and writes kernel parameters below /proc/sys.
//
// Those of the network are per namespace: which one a path names is decided when
// it is opened, by the thread that opens it. Use netns.NS.Do around a call.
package sysctl

import (
	"errors"
	"io/fs"
	"strings"

	"golang.org/x/sys/unix"
)

const root = "/proc/sys/"

// Read gives a parameter's value without the newline. path is below /proc/sys,
// with slashes: an interface's name may hold dots.
func Read(path string) (string, error) { return read(unix.AT_FDCWD, root+path, root+path) }

// Write sets a parameter. It needs to be root of the user namespace that owns the
// network namespace.
func Write(path, value string) error {
	return write(unix.AT_FDCWD, root+path, root+path, value)
}

// Ensure sets a parameter unless it has the value, and says whether it had to. So
// it works where /proc/sys is mounted read-only and all is as it should be.
func Ensure(path, value string) (changed bool, err error) {
	have, err := Read(path)
	if err != nil {
		return false, err
	}
	if have == value {
		return false, nil
	}
	return true, Write(path, value)
}

// Exists says whether the kernel, in its present state, has the parameter.
func Exists(path string) bool {
	_, err := Read(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// Link gives the path of a parameter of one link: Link("ipv6", "eth0",
// "accept_ra").
func Link(family, link, name string) string {
	return strings.Join([]string{"net", family, "conf", link, name}, "/")
}
