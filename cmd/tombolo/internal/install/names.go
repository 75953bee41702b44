// Package install puts the CNI plugin into a runtime's directory, by the name tombolo and by
// the names of the reference plugins, and gives those back.
//
// A name is a file of one line, an interpreter's ("#!/opt/cni/bin/tombolo as"): the kernel
// itself starts the program by it, without a shell. A link would cost as little, but an
// installer that copies its own plugin onto a link writes through it, and destroys every
// name at once. Onto such a file it writes that one name, which is then its own again.
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
	// built is the plugin's name where it is built, and installed the one in a runtime's directory.
	built     = "tombolo-cni"
	installed = "tombolo"

	// maxInterpreter is what the kernel reads of a first line: BINPRM_BUF_SIZE in
	// include/uapi/linux/binfmts.h, since Linux 5.1.
	maxInterpreter = 256
)

// Plugin finds the plugin: beside the running program, or where a package puts it.
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
	return "", fmt.Errorf("find the CNI plugin: there is no %s in %s: it comes with this command", built, strings.Join(slices.Compact(places), ", "))
}

// Select reads a list as the command line has it: "all" of the known names, or some of them with
// commas between.
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

// Add puts the plugin into the directory, and a file for each of the names. A plugin that is there by such a
// name is kept as NAME.reference; one that was kept before is replaced by it, as an installer has brought a
// later one. A runtime that looks for a name meanwhile finds the old plugin or the new one. Add
// writes to out what it did.
func Add(out io.Writer, plugin, dir string, names []string) error {
	dir, err := plugins(dir)
	if err != nil {
		return err
	}
	program := filepath.Join(dir, installed)
	line := "#!" + program + " " + cni.As + "\n"
	if len(line) > maxInterpreter || strings.ContainsAny(dir, " \t\n") {
		return fmt.Errorf("%s: the kernel starts a name by its first line, which has no room for this path: use a shorter one without spaces", dir)
	}
	if err := putPlugin(out, plugin, program); err != nil {
		return err
	}
	return each(dir, names, func(path string) error { return addName(out, path, line) })
}

func each(dir string, names []string, do func(path string) error) (failed error) {
	for _, name := range names {
		failed = errors.Join(failed, do(filepath.Join(dir, name)))
	}
	return failed
}

// Remove takes the names away that Add put there, and puts what it kept in their place. The
// plugin stays, since configurations may name it. A plugin that is not Tombolo's stays as
// it is.
func Remove(out io.Writer, dir string, names []string) error {
	dir, err := plugins(dir)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(names, func(name string) bool { _, err := os.Lstat(filepath.Join(dir, name)); return err == nil }) {
		_, err := fmt.Fprintf(out, "%s: none of these names is there\n", dir)
		return err
	}
	return each(dir, names, func(path string) error { return removeName(out, path) })
}

// plugins gives the directory's absolute path.
func plugins(dir string) (string, error) {
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return "", fmt.Errorf("%s is not a directory: name the one in which the runtime looks for plugins, such as /opt/cni/bin or /usr/lib/cni", dir)
	}
	return filepath.Abs(dir)
}

// putPlugin copies the plugin, and leaves a link to it.
func putPlugin(out io.Writer, from, path string) error {
	plugin, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	said := "the plugin"
	if there, err := os.ReadFile(path); err == nil && bytes.Equal(there, plugin) {
		said += ", as before"
	} else if err := replace(path, plugin); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s: %s\n", path, said)
	return err
}

func addName(out io.Writer, path, line string) error {
	there, ours, err := look(path)
	if err != nil {
		return err
	}
	said := "Tombolo"
	if there && !ours {
		if err := keep(path); err != nil {
			return err
		}
		said += "; what was there is " + cni.Kept(path)
	}
	text := line + "# Tombolo, by the name of the reference plugin " + filepath.Base(path) + ". To undo: tombolo install --undo " + filepath.Dir(path) + "\n"
	if err := replace(path, []byte(text)); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s: %s\n", path, said)
	return err
}

func removeName(out io.Writer, path string) error {
	there, ours, err := look(path)
	if err != nil || !there {
		return err
	}
	said := "not Tombolo's, and left as it is"
	if ours {
		said = "the plugin that was there before"
		err = os.Rename(cni.Kept(path), path)
		if errors.Is(err, fs.ErrNotExist) {
			said, err = "gone", os.Remove(path)
		}
		if err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(out, "%s: %s\n", path, said)
	return err
}

// look says whether a name is there, and whether it is ours.
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
	file, err := os.Open(path)
	if err != nil {
		return false, false, err
	}
	defer file.Close()
	first, err := io.ReadAll(io.LimitReader(file, maxInterpreter))
	first, _, _ = bytes.Cut(first, []byte("\n"))
	return true, bytes.HasPrefix(first, []byte("#!/")) && bytes.HasSuffix(first, []byte("/"+installed+" "+cni.As)), err
}

// keep gives a plugin its second name, and leaves it the first.
func keep(path string) error {
	if err := os.Remove(cni.Kept(path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Link(path, cni.Kept(path))
}

// replace puts an executable file in place whole, by a rename.
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
