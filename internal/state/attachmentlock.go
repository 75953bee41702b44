package state

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
)

// ErrBusy says that a call is at work on an attachment.
var ErrBusy = errors.New("another call is at work on it")

// An AttachmentLock is the lock of an attachment's record, which is flock(2) on its file,
// until Close or the end of the process. An ADD has it from [Dir.Create] until it is done,
// and who undoes an attachment as long as that takes. So a record that says Adding and can
// be locked is that of an ADD that was killed.
//
// It comes before all other locks, and is never waited for.
type AttachmentLock struct {
	fd    int
	order *lockorder.Held
}

// LockAttachment locks the record of an attachment. Where there is none, the error matches
// os.ErrNotExist; where another has it, ErrBusy.
func (d *Dir) LockAttachment(network, hash string) (*AttachmentLock, error) {
	path, err := d.attachmentPath(network, hash)
	if err != nil {
		return nil, fmt.Errorf("lock attachment: %w", err)
	}
	for {
		fd, err := file.Open(path, unix.O_RDONLY)
		if err != nil {
			return nil, fmt.Errorf("lock attachment: %w", err)
		}
		locked, err := tryFlock(fd, unix.LOCK_EX)
		var st unix.Stat_t
		if err == nil {
			err = unix.Fstat(fd, &st)
		}
		switch {
		case err == nil && !locked:
			err = ErrBusy
		case err == nil && st.Nlink > 0:
			return &AttachmentLock{fd: fd, order: lockorder.Tried(lockorder.Attachment)}, nil
		}
		// It was replaced or removed since it was opened, unless it is busy: look again.
		if err := errors.Join(err, unix.Close(fd)); err != nil {
			return nil, fmt.Errorf("lock attachment: %w", &os.PathError{Op: "lock", Path: path, Err: err})
		}
	}
}

// Close gives the lock up. Closing twice does nothing.
func (l *AttachmentLock) Close() error {
	if l == nil || l.fd < 0 {
		return nil
	}
	fd := l.fd
	l.fd = -1
	l.order.Release()
	// A child that is just being started has the descriptor too, so closing is not enough.
	return errors.Join(flock(fd, unix.LOCK_UN), unix.Close(fd))
}
