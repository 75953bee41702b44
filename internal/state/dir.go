package state

import (
	"fmt"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
)

// DefaultDir is the state directory if the configuration names no other.
const DefaultDir = "/run/tombolo"

// suffix ends the name of every record's file.
const suffix = ".json"

// A Dir is a state directory. Several goroutines and processes may call its methods at once. The comment of each
// method names the lock that the caller needs, if any.
type Dir struct {
	path    string
	sources sources
}

// Open returns the state directory at an absolute path. It makes no system call. The directory and its files are
// created by the first write.
func Open(dir string) (*Dir, error) {
	path, err := file.CleanDir(dir)
	if err != nil {
		return nil, fmt.Errorf("open state directory: %w", err)
	}
	return &Dir{path: path, sources: hostSources()}, nil
}

// Path returns the directory's path, cleaned.
func (d *Dir) Path() string { return d.path }

func (d *Dir) epochPath() string    { return d.path + "/epoch" }
func (d *Dir) lockPath() string     { return d.path + "/lock" }
func (d *Dir) networksPath() string { return d.path + "/networks" }
func (d *Dir) uplinksPath() string  { return d.path + "/uplinks" }

func (d *Dir) attachmentsPath() string { return d.path + "/attachments" }

// networkPath returns the path of a network's record.
func (d *Dir) networkPath(network string) (string, error) {
	if err := checkNetwork(network); err != nil {
		return "", err
	}
	return d.networksPath() + "/" + network + suffix, nil
}

// attachmentPath returns the path of an attachment's record.
func (d *Dir) attachmentPath(network, hash string) (string, error) {
	if err := checkNetwork(network); err != nil {
		return "", err
	}
	if err := ident.CheckHash(hash); err != nil {
		return "", err
	}
	return d.attachmentsPath() + "/" + network + "/" + hash + suffix, nil
}

// ErrName means that the name of a network or a NIC is invalid. It is ident.ErrName.
var ErrName = ident.ErrName

// maxNetworkName leaves room for ".json" in NAME_MAX (255).
const maxNetworkName = 250

// checkNetwork returns an error unless the CNI specification allows name as the name of a network. This keeps "..",
// '/', NUL and our own ".tmp-" out of paths.
func checkNetwork(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("network: %w: it is empty", ErrName)
	case len(name) > maxNetworkName:
		return fmt.Errorf("network %.20q…: %w: %d bytes, at most %d fit in a file name", name, ErrName, len(name),
			maxNetworkName)
	case !ident.IsIdentifier(name):
		return fmt.Errorf("network %q: %w: only letters, digits, '_', '.' and '-' are allowed, "+
			"and first a letter or a digit", name, ErrName)
	}

	return nil
}

// checkNIC returns an error unless name can be the name of a link. Such a name cannot lead out of a directory.
func checkNIC(name string) error {
	if !ident.IsLinkName(name) {
		return fmt.Errorf("uplink %.20q: %w: no link has it", name, ErrName)
	}
	return nil
}
