package sysctl

import (
	"errors"
	"io/fs"
	"os"
	"slices"

	"github.com/tombolo-cni/tombolo"
)

// OwnForwarding is the value of net.ipv4.conf.LINK.forwarding that we write. The kernel takes every value but 0 for on,
// so this one tells our links from those that an operator made forward, which have 1. A link that comes later copies
// it from "default".
const OwnForwarding = "116"

// Links reads a parameter of each link, and of "default", which later links copy. The keys are their names. Links that
// lack the parameter, or that were deleted meanwhile, are left out: all, where the kernel has nothing of the family.
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

// Replace writes a parameter of each link, and of "default", that has one value, so that it has another. It leaves out
// the links in except.
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
