package state

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
)

// A note is a line that a holder of the lock leaves to later ones, in the lock's
// own file, which is open already: reading and writing it take one system call each. It
// holds what is expensive to find out about a network namespace, and no harm to lose. Holders of
// the shared lock write at the same time; a sum keeps readers from parts of two notes, and
// from those of callers in another namespace.

const (
	maxNote = 256 // bytes
	noteSum = 17  // what stands before the note: 16 digits and a space
)

// Note reads the note. It is empty where there is none, or none that is whole and of the
// calling thread's network namespace.
func (l *Lock) Note() string {
	netns, err := l.netns()
	if err != nil {
		return ""
	}
	buf := make([]byte, noteSum+maxNote+1)
	n, err := file.Restart(func() (int, error) { return unix.Pread(l.fd, buf, 0) })
	if err != nil || n <= noteSum {
		return ""
	}
	text, _, whole := strings.Cut(string(buf[noteSum:n]), "\n")
	if !whole || sumOf(text, netns) != string(buf[:noteSum]) {
		return ""
	}
	return text
}

// SetNote writes the note, in place of the one that is there.
func (l *Lock) SetNote(text string) error {
	if len(text) > maxNote || strings.Contains(text, "\n") {
		return fmt.Errorf("note of %d bytes: it must be a line of %d at most", len(text), maxNote)
	}
	netns, err := l.netns()
	if err == nil {
		_, err = file.Restart(func() (int, error) {
			return unix.Pwrite(l.fd, []byte(sumOf(text, netns)+text+"\n"), 0)
		})
	}
	return doing(err, "write note to %s", l.path)
}

func sumOf(text string, netns uint64) string {
	sum := fnv.New64a()
	sum.Write(binary.NativeEndian.AppendUint64([]byte(text), netns))
	return fmt.Sprintf("%016x ", sum.Sum64())
}
