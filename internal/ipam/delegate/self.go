package delegate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/file"
)

// ErrSelf means that the plugin to be run is the program that would run it, under this name or another.
var ErrSelf = errors.New("the plugin is this program itself")

// DepthVariable is the environment variable that counts how many plugins lead
// to a process: one that a plugin of ours starts has 1, one that such a process
// has started through a plugin, 2.
const DepthVariable = "TOMBOLO_DEPTH"

// Depth reads a value of DepthVariable. A value that is no count is an error, since only this package sets it.
func Depth(value string) (int, error) {
	if value == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(value)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%s=%.40q is not a count", DepthVariable, value)
	}
	return n, nil
}

// Deeper is an environment whose depth is one more than that of environ. One
// that cannot be read stays, for the started program to refuse it.
func Deeper(environ []string) []string {
	const prefix = DepthVariable + "="
	depth := 0
	for _, entry := range environ {
		if value, ok := strings.CutPrefix(entry, prefix); ok {
			n, err := Depth(value)
			if err != nil {
				return environ
			}
			depth = n
		}
	}
	environ = slices.DeleteFunc(slices.Clone(environ), func(entry string) bool { return strings.HasPrefix(entry, prefix) })
	return append(environ, prefix+strconv.Itoa(depth+1))
}

// IsSame says whether two paths lead to one program: to one file, by links
// of either kind, or to copies of it, or b to a script whose interpreter it is. Contents are
// compared only where the sizes are equal. A script of "tombolo install --names" is one
// whichever version it leads to.
func IsSame(a, b string) (bool, error) {
	x, err := os.Stat(a)
	if err != nil {
		return false, err
	}
	y, err := os.Stat(b)
	if err != nil {
		return false, err
	}
	if y.Size() <= maxScript {
		program := interpreter(b)
		if filepath.Base(program) == "tombolo" {
			return true, nil
		}
		if z, err := os.Stat(program); err == nil {
			b, y = program, z
		}
	}
	switch {
	case os.SameFile(x, y):
		return true, nil
	case x.Size() != y.Size():
		return false, nil
	}
	return sameContent(a, b)
}

// refuseSelf keeps a program from running itself for ever. A program that cannot
// be compared is not run.
func refuseSelf(self, path string) error {
	same, err := IsSame(self, path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("run %s: %w: %w", path, ErrNotFound, err)
	case err != nil:
		return fmt.Errorf("compare %s with the program that would run it: %w", path, err)
	case same:
		return fmt.Errorf("run %s: %w", path, ErrSelf)
	}
	return nil
}

// maxScript is how long a script can be that is looked into: ours have a few lines.
const maxScript = 4 << 10

// interpreter is the program that a script's first line names; empty for what is none.
func interpreter(path string) string {
	data, err := file.ReadNamed(context.Background(), path, maxScript, 0)
	if err != nil {
		return ""
	}
	line, _, _ := bytes.Cut(data, []byte("\n"))
	rest, ok := bytes.CutPrefix(line, []byte("#!"))
	if words := bytes.Fields(rest); ok && len(words) > 0 {
		return string(words[0])
	}
	return ""
}

func sameContent(a, b string) (bool, error) {
	x, err := os.ReadFile(a)
	if err != nil {
		return false, err
	}
	y, err := os.ReadFile(b)
	return bytes.Equal(x, y), err
}
