// Package install copies the CNI plugin into a runtime's plugin directory under the name tombolo. There it can also
// take over the names of the reference plugins (containernetworking/plugins), and give these names back.
//
// Each such name becomes a file whose only code is an interpreter line ("#!/opt/cni/bin/tombolo as"). The kernel
// itself starts the plugin by this line, without a shell. A symbolic link would be as fast, but dangerous. An
// installer that copies another plugin onto the link would overwrite the file tombolo, and break all names at once. If
// an installer writes onto one of our files, only this one name changes, and belongs to the other plugin again.
package install

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/cni"
)

const (
	// built is the name of the plugin's file after the build, and installed its name in a runtime's directory.
	built     = "tombolo-cni"
	installed = "tombolo"

	// maxInterpreter is the number of bytes of the first line that the kernel reads: BINPRM_BUF_SIZE in
	// include/uapi/linux/binfmts.h, since Linux 5.1.
	maxInterpreter = 256
)

// Plugin returns the path of the CNI plugin's file, tombolo-cni. It looks next to the running program, and in the
// directories where packages install the file.
func Plugin() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}

	dir := filepath.Dir(self)
	places := []string{dir, filepath.Join(dir, "../lib/tombolo"), "/usr/lib/tombolo"}
	for _, place := range places {
		path := filepath.Join(place, built)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("find the CNI plugin: there is no %s in %s: it comes with this command", built,
		strings.Join(slices.Compact(places), ", "))
}

// Select parses the names on the command line: "all", or names separated by commas. It returns an error for a name
// that is not in known.
func Select(list string, known []string) ([]string, error) {
	if list == "all" {
		return known, nil
	}
	names := strings.Split(list, ",")
	for _, name := range names {
		if !slices.Contains(known, name) {
			return nil, fmt.Errorf("%q is not a name that Tombolo has: it has %s", name, strings.Join(known, ", "))
		}
	}
	return names, nil
}

// Add copies the plugin into the directory, and creates a file for each of the names. If another program has a plugin
// under such a name, Add keeps that plugin as NAME.reference, in place of an older NAME.reference. At any moment a
// runtime finds either the old plugin or the new one. Add writes a line about each file to out.
func Add(out io.Writer, plugin, dir string, names []string) error {
	dir, err := plugins(dir)
	if err != nil {
		return err
	}

	program := filepath.Join(dir, installed)
	line := "#!" + program + " " + cni.As + "\n"
	if len(line) > maxInterpreter || strings.ContainsAny(dir, " \t\n") {
		return fmt.Errorf("%s: the kernel starts a name by its first line, which has no room for this path: use a "+
			"shorter one without spaces", dir)
	}

	put := func(path string) (string, error) { return putPlugin(plugin, path) }
	if err := each(out, dir, []string{installed}, put); err != nil {
		return err
	}
	return each(out, dir, names, func(path string) (string, error) { return addName(path, line) })
}

// each calls do with the path of each name, and writes a line about each path with the outcome, unless that is empty.
func each(out io.Writer, dir string, names []string, do func(path string) (outcome string, _ error)) (failed error) {
	for _, name := range names {
		path := filepath.Join(dir, name)
		outcome, err := do(path)
		if err == nil && outcome != "" {
			_, err = fmt.Fprintf(out, "%s: %s\n", path, outcome)
		}
		failed = errors.Join(failed, err)
	}
	return failed
}

// Remove removes the files that Add created for the names, and restores the plugins that Add kept. It leaves the
// plugin tombolo itself, since configurations may use it. It also leaves the plugins of other programs.
func Remove(out io.Writer, dir string, names []string) error {
	dir, err := plugins(dir)
	if err != nil {
		return err
	}

	exists := func(name string) bool {
		_, err := os.Lstat(filepath.Join(dir, name))
		return err == nil
	}
	if !slices.ContainsFunc(names, exists) {
		_, err := fmt.Fprintf(out, "%s: none of these names exists\n", dir)
		return err
	}

	return each(out, dir, names, removeName)
}

// plugins returns the absolute path of the plugin directory, or an error if it is not a directory.
func plugins(dir string) (string, error) {
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return "", fmt.Errorf("%s is not a directory: name the one in which the runtime looks for plugins, such as "+
			"/opt/cni/bin or /usr/lib/cni", dir)
	}
	return filepath.Abs(dir)
}

// putPlugin copies the plugin to path, unless path already has the same content.
func putPlugin(from, path string) (outcome string, _ error) {
	plugin, err := os.ReadFile(from)
	if err != nil {
		return "", err
	}

	if there, err := os.ReadFile(path); err == nil && bytes.Equal(there, plugin) {
		return "the plugin, as before", nil
	}
	return "the plugin", replace(path, plugin)
}

// addName creates the file for one name, with the given interpreter line. It first keeps the plugin of another program
// as NAME.reference.
func addName(path, line string) (outcome string, _ error) {
	there, ours, err := look(path)
	if err != nil {
		return "", err
	}

	outcome = "Tombolo"
	if there && !ours {
		if err := keep(path); err != nil {
			return "", err
		}
		outcome += "; what was there is " + cni.Kept(path)
	}

	text := line + "# Tombolo, by the name of the reference plugin " + filepath.Base(path) +
		". To undo: tombolo install --undo " + filepath.Dir(path) + "\n"
	return outcome, replace(path, []byte(text))
}

// removeName removes the file that Add created at path, and restores the plugin that Add kept. It leaves the file of
// another program. If there is no file, the outcome is empty.
func removeName(path string) (outcome string, _ error) {
	there, ours, err := look(path)
	switch {
	case err != nil || !there:
		return "", err
	case !ours:
		return "not Tombolo's, and left as it is", nil
	}

	if err := os.Rename(cni.Kept(path), path); !errors.Is(err, fs.ErrNotExist) {
		return "the plugin that was there before", err
	}
	return "gone", os.Remove(path)
}

// look reports whether the file at path exists, and whether Add created it. It returns an error for a directory, and
// for any other file that is neither regular nor a symbolic link.
func look(path string) (there, ours bool, _ error) {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, false, nil
	case err != nil:
		return false, false, err
	case info.Mode()&fs.ModeSymlink != 0:
		return true, false, nil
	case !info.Mode().IsRegular():
		return false, false, fmt.Errorf("%s is not a file: move it away first", path)
	}

	data, err := os.ReadFile(path)
	first, _, _ := bytes.Cut(data, []byte("\n"))
	return true, bytes.HasPrefix(first, []byte("#!/")) && bytes.HasSuffix(first, []byte("/"+installed+" "+cni.As)), err
}

// keep gives the plugin at path a second name, NAME.reference, by a hard link. The first name stays.
func keep(path string) error {
	if err := os.Remove(cni.Kept(path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Link(path, cni.Kept(path))
}

// replace writes an executable file and renames it to path, so that no process sees an unfinished file.
func replace(path string, data []byte) error {
	file, err := os.CreateTemp(filepath.Dir(path), ".tombolo-*")
	if err != nil {
		return err
	}

	_, err = file.Write(data)
	err = errors.Join(err, file.Chmod(0o755), file.Sync(), file.Close())
	if err == nil {
		err = os.Rename(file.Name(), path)
	}

	if err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	return nil
}
