package state

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"sync/atomic"

	"github.com/tombolo-cni/tombolo/internal/file"
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
	others  bool // see Others

	// abandoned counts the goroutines whose caller gave up waiting for the lock.
	abandoned atomic.Int32
}

// Open returns the state directory at an absolute path. It makes no system call:
// the directory and what is in it appear when they are first written.
func Open(dir string) (*Dir, error) {
	switch {
	case dir == "":
		return nil, errors.New("open state directory: no path given")
	case !filepath.IsAbs(dir):
		return nil, fmt.Errorf("open state directory %q: the path is not absolute", dir)
	case strings.ContainsRune(dir, 0):
		return nil, fmt.Errorf("open state directory %q: the path has a NUL in it", dir)
	}
	return &Dir{path: filepath.Clean(dir), sources: hostSources()}, nil
}

// Path returns the directory's path, cleaned.
func (d *Dir) Path() string { return d.path }

func (d *Dir) epochPath() string    { return d.path + "/epoch" }
func (d *Dir) lockPath() string     { return d.path + "/lock" }
func (d *Dir) networksPath() string { return d.path + "/networks" }

func (d *Dir) attachmentsPath() string {
	if d.others {
		return d.path + "/others"
	}
	return d.path + "/attachments"
}

// Others is the same directory, for the attachments that other programs made: what of ours
// they have. Versions up to v0.5 do not know of them. It has no locks but those of records, and no networks'.
func (d *Dir) Others() *Dir { return &Dir{path: d.path, sources: d.sources, others: true} }

// Of is d, or Others if that has the record of an attachment.
func (d *Dir) Of(a *Attachment) *Dir {
	if a.Other {
		return d.Others()
	}
	return d
}

// Find is Load, also from Others.
func (d *Dir) Find(network, hash string) (*Attachment, error) {
	a, err := d.Load(network, hash)
	if errors.Is(err, fs.ErrNotExist) {
		return d.Others().Load(network, hash)
	}
	return a, err
}

// ListOthers is List of Others, of all networks.
func (d *Dir) ListOthers() ([]*Attachment, []*RecordError, error) {
	entries, err := file.ReadDir(d.Others().attachmentsPath())
	if err != nil {
		return nil, nil, fmt.Errorf("list attachments: %w", err)
	}
	var all []*Attachment
	var damaged []*RecordError
	for _, e := range entries {
		if !e.IsDir() || checkNetwork(e.Name()) != nil {
			continue
		}
		found, bad, err := d.Others().List(e.Name())
		if err != nil {
			return nil, nil, err
		}
		all, damaged = append(all, found...), append(damaged, bad...)
	}
	return all, damaged, nil
}

// UplinksPath is the directory of the uplinks' files, for a program that watches it.
func (d *Dir) UplinksPath() string { return d.path + "/uplinks" }

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
	if err := checkHash(hash); err != nil {
		return "", err
	}
	return d.attachmentsPath() + "/" + network + "/" + hash + suffix, nil
}
