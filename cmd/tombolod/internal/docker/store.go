package docker

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/file"
)

const suffix = ".json"

// store is a directory with a file for each of Docker's identifiers, whole or not at all.
type store string

func (s store) path(id string) string { return filepath.Join(string(s), id+suffix) }

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
	if err == nil {
		err = os.MkdirAll(string(s), 0o700)
	}
	if err == nil {
		err = file.ReplaceDurably(s.path(id)+".new", s.path(id), data)
	}
	return err
}

func (s store) remove(id string) error { return file.Remove(s.path(id)) }

func (s store) list() []string {
	var ids []string
	entries, _ := os.ReadDir(string(s)) // a directory that is missing has none
	for _, e := range entries {
		if id, is := strings.CutSuffix(e.Name(), suffix); is {
			ids = append(ids, id)
		}
	}
	return ids
}
