package sysctl

import (
	"errors"
	"io/fs"
	"os"
	"slices"

	"github.com/tombolo-cni/tombolo"
)

// OwnForwarding is the value that we write to net.ipv4.conf.LINK.forwarding. The kernel treats every value except 0
// as on. So this value distinguishes links that we set from links that an operator set to 1. A new link copies the
// value of the link "default".
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

// Replace changes a parameter from one value (have) to another (want), for each link and for "default". It skips
// links with any other value, and the links in except.
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
