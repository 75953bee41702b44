package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/tombolo-cni/tombolo/internal/cni/conflist"
)

// errInvalid says that validate found something.
var errInvalid = errors.New("not every configuration is valid")

// validate prints what there is to say of each file.
func validate(out io.Writer, files []string) error {
	invalid := false
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		r := conflist.Examine(data)
		verdict, lines := "valid", r.Plan
		if len(r.Problems) > 0 {
			invalid, verdict, lines = true, "invalid", r.Problems
		}
		if _, err := fmt.Fprintf(out, "%s: %s\n", name, verdict); err != nil {
			return err
		}
		for _, line := range lines {
			if _, err := fmt.Fprintf(out, "  %s\n", line); err != nil {
				return err
			}
		}
	}
	if invalid {
		return errInvalid
	}
	return nil
}
