package keeper

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/lease"
)

// watcher receives inotify(7) events about written and removed lease records, and sends them as changes.
type watcher struct {
	file    *os.File
	changes chan change // closed when the watcher ends, also because the directory is gone
}

// mask selects the inotify events about records. Writers rename a new record into place. Records are removed by
// unlinking or renaming them.
const mask = unix.IN_MOVED_TO | unix.IN_MOVED_FROM | unix.IN_DELETE | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF |
	unix.IN_ONLYDIR

// watch begins to watch a directory of lease records.
func watch(dir string) (*watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch %s: inotify: %w", dir, err)
	}

	file := os.NewFile(uintptr(fd), "inotify")
	if _, err := unix.InotifyAddWatch(fd, dir, mask); err != nil {
		return nil, errors.Join(fmt.Errorf("watch %s: inotify: %w", dir, err), file.Close())
	}

	w := &watcher{file: file, changes: make(chan change, 64)}
	go w.run()
	return w, nil
}

// close ends the watcher. It drops the changes that nobody has received.
func (w *watcher) close() error {
	err := w.file.Close()
	for range w.changes {
	}
	return err
}

func (w *watcher) run() {
	defer close(w.changes)
	buf := make([]byte, 64<<10)
	for {
		n, err := w.file.Read(buf)
		if err != nil {
			return
		}

		changes, gone := parse(buf[:n])
		for _, c := range changes {
			w.changes <- c
		}

		if gone {
			return
		}
	}
}

// parse converts inotify events (struct inotify_event) into changes. It skips events about files that are not records,
// and repetitions of the previous event. gone means that the directory was removed, renamed or unmounted.
func parse(b []byte) (changes []change, gone bool) {
	const maskAt, lenAt, nameAt = 4, 12, unix.SizeofInotifyEvent
	for len(b) >= nameAt {
		bits, length := binary.NativeEndian.Uint32(b[maskAt:]), uint64(binary.NativeEndian.Uint32(b[lenAt:]))
		if nameAt+length > uint64(len(b)) {
			return append(changes, change{}), gone // a truncated event, which the kernel never sends
		}

		name, _, _ := strings.Cut(string(b[nameAt:nameAt+length]), "\x00")
		b = b[nameAt+length:]
		c := change{}
		switch {
		case bits&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF|unix.IN_UNMOUNT|unix.IN_IGNORED) != 0:
			return changes, true
		case bits&unix.IN_Q_OVERFLOW == 0:
			var ok bool
			if c.name, ok = lease.RecordHash(name); !ok {
				continue
			}
		}

		if len(changes) == 0 || changes[len(changes)-1] != c {
			changes = append(changes, c)
		}
	}

	return changes, gone
}
