package docker

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/file"
)

const suffix = ".json"

// store keeps a file for each of Docker's identifiers, whole or not at all.
type store struct {
	dir     string
	lasting bool // beyond a power cut
}

func (s store) path(id string) string { return filepath.Join(s.dir, id+suffix) }

// load gives an error that matches fs.ErrNotExist where there is none.
func (s store) load(id string, into any) error {
	data, err := file.Read(s.path(id), file.MaxRecord)
	if err != nil {
		return err
	}
	return json.Unmarshal(data, into)
}

func (s store) save(id string, what any) error {
	data, err := json.Marshal(what)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	if s.lasting {
		return file.ReplaceDurably(s.path(id)+".new", s.path(id), data)
	}
	return file.Replace(s.path(id)+".new", s.path(id), data)
}

func (s store) remove(id string) error { return file.Remove(s.path(id)) }

func (s store) list() []string {
	var ids []string
	entries, _ := os.ReadDir(s.dir) // a directory that is missing has none
	for _, e := range entries {
		if id, is := strings.CutSuffix(e.Name(), suffix); is {
			ids = append(ids, id)
		}
	}
	return ids
}
