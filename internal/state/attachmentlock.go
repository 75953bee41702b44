package state

import (
	"context"
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
// and a call that undoes an attachment as long as that takes. So a record that says Adding and can
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
	fd, err := file.TryLock(path, unix.O_RDONLY)
	if err == nil && fd < 0 {
		err = &os.PathError{Op: "lock", Path: path, Err: ErrBusy}
	}
	if err != nil {
		return nil, fmt.Errorf("lock attachment: %w", err)
	}
	return &AttachmentLock{fd: fd, order: lockorder.Tried(lockorder.Attachment)}, nil
}

// AtWork gives what waits until the call ends that has the lock of an attachment's record, also
// if the record is removed meanwhile, or until ctx does. It is to be called, once, with no lock held.
// Where there is no record, there is nothing to wait for.
func (d *Dir) AtWork(network, hash string) (wait func(context.Context), err error) {
	path, err := d.attachmentPath(network, hash)
	if err != nil {
		return nil, err
	}
	fd, err := file.Open(path, unix.O_RDONLY)
	if errors.Is(err, os.ErrNotExist) {
		return func(context.Context) {}, nil
	}
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) {
		defer unix.Close(fd)
		// That the time is over is all that the error says.
		_ = file.Await(ctx, path, func() (bool, error) { return file.TryFlock(fd, unix.LOCK_SH) })
	}, nil
}

// Close gives the lock up. Closing twice does nothing.
func (l *AttachmentLock) Close() error {
	if l == nil || l.fd < 0 {
		return nil
	}
	fd := l.fd
	l.fd = -1
	l.order.Release()
	return file.Unlock(fd)
}
