package state

import (
	"fmt"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
)

// DefaultDir is where the state lives unless the configuration says otherwise.
const DefaultDir = "/run/tombolo"

// suffix ends the name of every record's file.
const suffix = ".json"

// A Dir is a state directory. Its methods may be called from several goroutines
// and processes at once; each says which lock it needs, if any.
type Dir struct {
	path    string
	sources sources
}

// Open returns the state directory at an absolute path. It makes no system call:
// the directory and what is in it appear when they are first written.
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

// networkPath is the file of a network's record.
func (d *Dir) networkPath(network string) (string, error) {
	if err := checkNetwork(network); err != nil {
		return "", err
	}
	return d.networksPath() + "/" + network + suffix, nil
}

// attachmentPath is the file of an attachment's record.
func (d *Dir) attachmentPath(network, hash string) (string, error) {
	if err := checkNetwork(network); err != nil {
		return "", err
	}
	if err := ident.CheckHash(hash); err != nil {
		return "", err
	}
	return d.attachmentsPath() + "/" + network + "/" + hash + suffix, nil
}
