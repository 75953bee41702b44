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

// ErrSelf means that the plugin to run is the calling program itself, under this name or another.
var ErrSelf = errors.New("the plugin is this program itself")

// DepthVariable is the environment variable with the number of delegated plugins that led to a process. It is 1 for a
// plugin that Tombolo starts. If that plugin starts Tombolo again, which starts another plugin, it is 2 for the other
// plugin.
const DepthVariable = "TOMBOLO_DEPTH"

// Depth parses a value of DepthVariable. A value that is not a count is an error, since only this package sets the
// variable.
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

// Deeper returns a copy of environ with a depth that is one higher. If it cannot parse the depth, it returns environ
// unchanged, and the started program refuses the value.
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

	environ = slices.DeleteFunc(slices.Clone(environ),
		func(entry string) bool { return strings.HasPrefix(entry, prefix) })
	return append(environ, prefix+strconv.Itoa(depth+1))
}

// IsSame reports whether running the file b runs the program at a. That is true if a and b are one file, or if a is
// the interpreter of the script b. It is also true if b, the target of the link b, or its interpreter is called
// tombolo or tombolo-cni. IsSame does not recognize a copy under another name. In that case DepthVariable ends the
// loop.
func IsSame(a, b string) (bool, error) {
	own, err := os.Stat(a)
	if err != nil {
		return false, err
	}

	other, err := os.Stat(b)
	if err != nil {
		return false, err
	}

	target, _ := filepath.EvalSymlinks(b)
	program := interpreter(b)
	starts, _ := os.Stat(program)
	isNamed := slices.ContainsFunc([]string{b, target, program}, func(path string) bool {
		return filepath.Base(path) == "tombolo" || filepath.Base(path) == "tombolo-cni"
	})

	return isNamed || os.SameFile(own, other) || os.SameFile(own, starts), nil
}

// refuseSelf returns an error if path leads to the program at self, which would then run itself for ever. It also
// returns an error if the two files cannot be compared.
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

// maxScript is the maximum size of a script that IsSame reads, in bytes. Tombolo's scripts have a few lines.
const maxScript = 4 << 10

// interpreter returns the program that the first line of a script names. It returns "" if the file is not a script.
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
