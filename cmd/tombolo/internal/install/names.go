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

	"golang.org/x/sys/unix"

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
	var names []string
	for _, name := range strings.Split(list, ",") {
		if !slices.Contains(known, name) {
			return nil, fmt.Errorf("%q is not a name that Tombolo has: it has %s", name, strings.Join(known, ", "))
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names, nil
}

// Add puts the plugin into the directory, unless that very program is there, and a
// file for each of the names. A plugin that is there by such a name is kept as NAME.reference;
// one that was kept before is replaced by it, as an installer has brought a later one.
// A runtime that looks for a name meanwhile finds the old plugin or the new one. Add
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
	unlock, err := lock(dir)
	if err != nil {
		return err
	}
	defer unlock()
	if err := putPlugin(out, plugin, program); err != nil {
		return err
	}
	var failed []error
	for _, name := range names {
		failed = append(failed, addName(out, filepath.Join(dir, name), line))
	}
	return errors.Join(failed...)
}

// Remove takes the names away that Add put there, and puts what it kept in their place. The
// program stays, since configurations may name it. A plugin that is not Tombolo's stays as
// it is.
func Remove(out io.Writer, dir string, names []string) error {
	dir, err := plugins(dir)
	if err != nil {
		return err
	}
	unlock, err := lock(dir)
	if err != nil {
		return err
	}
	defer unlock()
	var failed []error
	for _, name := range names {
		failed = append(failed, removeName(out, filepath.Join(dir, name)))
	}
	return errors.Join(failed...)
}

// plugins gives the directory's absolute path.
func plugins(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("%w: name the directory in which the runtime looks for plugins, such as /opt/cni/bin or /usr/lib/cni", err)
	case err != nil:
		return "", err
	case !info.IsDir():
		return "", fmt.Errorf("%s is not a directory", dir)
	}
	return dir, nil
}

// lock keeps a second process from what it would decide by a name that changes meanwhile: it would
// take a file of ours for a plugin to keep, or delete a plugin that was just given back.
func lock(dir string) (unlock func(), _ error) {
	file, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for {
		err = unix.Flock(int(file.Fd()), unix.LOCK_EX)
		if err != unix.EINTR {
			break
		}
	}
	// Some file systems have no locks on directories.
	if err != nil && !errors.Is(err, errors.ErrUnsupported) && err != unix.EBADF && err != unix.ENOLCK {
		return nil, errors.Join(&os.PathError{Op: "lock", Path: dir, Err: err}, file.Close())
	}
	return func() { file.Close() }, nil
}

// isExecutable says whether a file may be executed by all, as what is put here may.
func isExecutable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().Perm()&0o111 == 0o111
}

// putPlugin copies the plugin. A link to it stays.
func putPlugin(out io.Writer, from, path string) error {
	plugin, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	said := "the plugin"
	if there, err := os.ReadFile(path); err == nil && bytes.Equal(there, plugin) && isExecutable(path) {
		said += ", as before"
	} else if err := replace(path, plugin); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s: %s\n", path, said)
	return err
}

func addName(out io.Writer, path, line string) error {
	text := line + "# Tombolo, by the name of the reference plugin " + filepath.Base(path) + ". To undo: tombolo install --undo " + filepath.Dir(path) + "\n"
	state, err := look(path)
	if err != nil {
		return err
	}
	said := "Tombolo"
	switch state {
	case ours:
		if there, err := os.ReadFile(path); err == nil && string(there) == text && isExecutable(path) {
			_, err := fmt.Fprintf(out, "%s: Tombolo, as before\n", path)
			return err
		}
	case others:
		if err := keep(path); err != nil {
			return err
		}
		said += "; what was there is " + cni.Kept(path)
	}
	if err := replace(path, []byte(text)); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s: %s\n", path, said)
	return err
}

func removeName(out io.Writer, path string) error {
	state, err := look(path)
	if err != nil {
		return err
	}
	said := "not Tombolo's, and left as it is"
	switch state {
	case missing:
		return nil
	case ours:
		said = "gone"
		if err := os.Rename(cni.Kept(path), path); err == nil {
			said = "the plugin that was there before"
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		} else if err := os.Remove(path); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(out, "%s: %s\n", path, said)
	return err
}

// state is whose a name is.
type state int

const (
	missing state = iota
	ours
	others
)

// look says whose a name is. A link to the program is ours, as versions up to v0.1 put one
// there for the loopback.
func look(path string) (state, error) {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return missing, nil
	case err != nil:
		return missing, err
	case info.Mode()&fs.ModeSymlink != 0:
		target, err := os.Readlink(path)
		if err == nil && filepath.Base(target) == installed {
			return ours, nil
		}
		return others, err
	case !info.Mode().IsRegular():
		return missing, fmt.Errorf("%s is not a file: move it away first", path)
	}
	file, err := os.Open(path)
	if err != nil {
		return missing, err
	}
	defer file.Close()
	first, err := io.ReadAll(io.LimitReader(file, maxInterpreter))
	if err != nil {
		return missing, err
	}
	first, _, _ = bytes.Cut(first, []byte("\n"))
	if bytes.HasPrefix(first, []byte("#!/")) && bytes.HasSuffix(first, []byte("/"+installed+" "+cni.As)) {
		return ours, nil
	}
	return others, nil
}

// keep gives a plugin its second name, and leaves it the first.
func keep(path string) error {
	if err := os.Remove(cni.Kept(path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	err := os.Link(path, cni.Kept(path))
	if err == nil {
		return nil
	}
	// Some file systems have no second names.
	data, readErr := os.ReadFile(path)
	if readErr != nil {
		return errors.Join(err, readErr)
	}
	return replace(cni.Kept(path), data)
}

// replace puts an executable file in place whole, by a rename.
func replace(path string, data []byte) error {
	temp := fmt.Sprintf("%s/.tombolo-%d", filepath.Dir(path), os.Getpid())
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err // of one that was killed
	}
	file, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	err = errors.Join(err, file.Chmod(0o755), file.Sync(), file.Close())
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp))
	}
	return nil
}
