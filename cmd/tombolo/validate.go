package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/tombolo-cni/tombolo/internal/cni/conflist"
)

// errInvalid says that validate found something.
var errInvalid = errors.New("at least one configuration is invalid")

// validate prints what there is to say of each file.
func validate(out io.Writer, files []string) error {
	invalid := false
	var unread error
	for _, name := range files {
		data, err := read(name)
		if err != nil {
			unread = errors.Join(unread, err)
			continue
		}
		r := conflist.Examine(data)
		switch ext := filepath.Ext(name); {
		case ext == ".conflist" && r.Single:
			r.Problems = append(r.Problems, `runtimes take a .conflist file only as a list: put the plugin into "plugins"`)
		case (ext == ".conf" || ext == ".json") && r.List:
			r.Problems = append(r.Problems, "runtimes take a "+ext+" file only as the conf of one plugin: name it .conflist")
		}
		verdict, lines := "valid", r.Plan
		if len(r.Problems) > 0 {
			invalid, verdict, lines = true, "invalid", r.Problems
		}
		if _, err := fmt.Fprintf(out, "%s: %s\n", name, verdict); err != nil {
			return err
		}
		for _, line := range r.Warnings {
			if _, err := fmt.Fprintf(out, "  warning: %s\n", line); err != nil {
				return err
			}
		}
		for _, line := range lines {
			if _, err := fmt.Fprintf(out, "  %s\n", line); err != nil {
				return err
			}
		}
	}
	if unread != nil {
		return unread
	}
	if invalid {
		return errInvalid
	}
	return nil
}

// maxFile is how many bytes of a file are read: 16 MiB, as no network has.
const maxFile = 16 << 20

func read(name string) ([]byte, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = fmt.Errorf("%s: more than %d MiB, which no configuration has", name, maxFile>>20)
	}
	return data, err
}
