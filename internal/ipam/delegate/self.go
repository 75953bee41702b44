package delegate

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/file"
)

// ErrSelf means that the plugin to run is Tombolo itself.
var ErrSelf = errors.New("the plugin is this program itself")

// DepthVariable is the environment variable that shows how often Tombolo and other plugins have started each other in
// turn. Each time Tombolo starts a plugin, it adds a digit 1. So the first plugin gets "1". If that plugin starts
// Tombolo, which starts another plugin, the other plugin gets "11".
const DepthVariable = "TOMBOLO_DEPTH"

// Deeper returns a copy of environ with one more digit in DepthVariable.
func Deeper(environ []string) []string {
	deeper := DepthVariable + "="
	environ = slices.DeleteFunc(slices.Clone(environ), func(entry string) bool {
		found := strings.HasPrefix(entry, DepthVariable+"=")
		if found {
			deeper = entry
		}
		return found
	})
	return append(environ, deeper+"1")
}

// IsOurs reports whether the file at path is Tombolo. It compares the name of the file, of its target, and of its
// interpreter. It does not recognize Tombolo by another name: then DepthVariable ends the loop.
func IsOurs(path string) bool {
	target, _ := filepath.EvalSymlinks(path)
	return slices.ContainsFunc([]string{path, target, interpreter(path)}, func(path string) bool {
		return filepath.Base(path) == "tombolo" || filepath.Base(path) == "tombolo-cni"
	})
}

// maxScript limits the size of a script that IsOurs reads, in bytes. Our scripts have a few lines.
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
