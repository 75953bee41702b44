package state

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
)

// The plugin lives for milliseconds, so it counts the calls that fail in a file, for the keeper
// to tell. The file has a line of a fixed length for each verb and code: verb, code and
// count. A call that fails counts up the digits of its line in place, so a kill leaves
// every other line as it was. A call that succeeds does not come here.

const (
	failureLine  = 33        // bytes, with the end of the line
	maxFailures  = 256       // lines
	lastCode     = uint(999) // a delegated plugin's larger codes count as this
	failureTries = 50        // for the lock, a millisecond apart
)

// Failures is how many calls of a verb have failed with a code.
type Failures struct {
	Verb  string
	Code  uint
	Count uint64
}

func (d *Dir) failuresPath() string { return d.path + "/failures" }

// CountFailure counts a call of a verb that failed with a code. It makes no directory: where
// there is none, nobody reads it. It needs no lock but its own, for which it does not wait
// long: a process that was stopped while it has it keeps nobody else from going on.
func (d *Dir) CountFailure(verb string, code uint) error {
	if err := d.countFailure(verb, min(code, lastCode)); err != nil {
		return fmt.Errorf("count a %s that failed with code %d: %w", verb, code, err)
	}
	return nil
}

func (d *Dir) countFailure(verb string, code uint) error {
	path := d.failuresPath()
	fd, err := file.Open(path, unix.O_RDWR|unix.O_CREAT)
	if err != nil {
		return err
	}
	defer unix.Close(fd) // which gives up the lock
	for tries := 1; ; tries++ {
		err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			break
		}
		if tries == failureTries || err != unix.EAGAIN && err != unix.EINTR {
			return &os.PathError{Op: "lock", Path: path, Err: err}
		}
		time.Sleep(time.Millisecond)
	}
	buf := make([]byte, maxFailures*failureLine)
	n, err := file.Restart(func() (int, error) { return unix.Pread(fd, buf, 0) })
	if err != nil {
		return &os.PathError{Op: "read", Path: path, Err: err}
	}
	// What comes after the last whole line was cut short, and is written over.
	text := buf[:n-n%failureLine]
	at, count := len(text), uint64(0)
	for i := 0; i < len(text); i += failureLine {
		if f, ok := parseFailures(text[i : i+failureLine]); ok && f.Verb == verb && f.Code == code {
			at, count = i, f.Count
			break
		}
	}
	if at == len(buf) {
		return errors.New("there is no room for another code")
	}
	line := fmt.Appendf(nil, "%-6s %4d %20d\n", verb, code, count+1)
	if len(line) != failureLine {
		return fmt.Errorf("the verb %q is too long", verb)
	}
	if _, err := file.Restart(func() (int, error) { return unix.Pwrite(fd, line, int64(at)) }); err != nil {
		return &os.PathError{Op: "write", Path: path, Err: err}
	}
	return nil
}

func parseFailures(line []byte) (f Failures, ok bool) {
	fields := bytes.Fields(line)
	if len(fields) != 3 || line[len(line)-1] != '\n' {
		return f, false
	}
	code, err := strconv.ParseUint(string(fields[1]), 10, 16)
	if err != nil {
		return f, false
	}
	count, err := strconv.ParseUint(string(fields[2]), 10, 64)
	return Failures{string(fields[0]), uint(code), count}, err == nil
}

// Failures reads what CountFailure counted, in the order in which they first happened. Lines
// that are damaged are left out. It needs no lock.
func (d *Dir) Failures() ([]Failures, error) {
	data, err := readFile(d.failuresPath())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read which calls failed: %w", err)
	}
	var list []Failures
	for ; len(data) >= failureLine; data = data[failureLine:] {
		f, ok := parseFailures(data[:failureLine])
		if ok && !slices.ContainsFunc(list, func(g Failures) bool { return g.Verb == f.Verb && g.Code == f.Code }) {
			list = append(list, f)
		}
	}
	return list, nil
}
