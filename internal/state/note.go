package state

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
)

// A note is a line in the lock's own file, which a holder of the lock leaves for later holders. That file is open
// already, so reading and writing the note take one system call each. The note caches facts about a network namespace
// that are expensive to find out. The loss of the note does no harm. Holders of the shared lock write at the same
// time, so a checksum protects readers from a mix of two notes. It also protects them from notes of another network
// namespace.

const (
	maxNote = 256 // maximum length of a note in bytes
	noteSum = 17  // length of the checksum before the note: 16 digits and a space
)

// Note reads the note. It returns "" if there is no note, if the note is incomplete, or if it concerns another
// network namespace.
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
	if !whole || hashNote(text, netns) != string(buf[:noteSum]) {
		return ""
	}

	return text
}

// SetNote replaces the note.
func (l *Lock) SetNote(text string) error {
	if len(text) > maxNote || strings.Contains(text, "\n") {
		return fmt.Errorf("note of %d bytes: it must be a line of %d at most", len(text), maxNote)
	}
	netns, err := l.netns()
	if err == nil {
		_, err = file.Restart(func() (int, error) {
			return unix.Pwrite(l.fd, []byte(hashNote(text, netns)+text+"\n"), 0)
		})
	}
	return withOperation(err, "write note to %s", l.path)
}

// hashNote returns the hash of a note and of the network namespace's cookie.
func hashNote(text string, netns uint64) string {
	sum := fnv.New64a()
	sum.Write(binary.NativeEndian.AppendUint64([]byte(text), netns))
	return fmt.Sprintf("%016x ", sum.Sum64())
}
