package state

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
)

// A Pending is the record of an attachment between Create and Commit. It holds
// the file open, so that what it commits is the record that it created: not one
// that was removed meanwhile, nor a later one of the same name. And it has the record's lock.
type Pending struct {
	AttachmentLock
	path string
	size int64 // of what Create wrote, in bytes
	lost bool  // Commit found it removed
}

// Create writes the record of an attachment that an ADD begins, in state Adding,
// setting a.State, a.Short and, if it is zero, a.Created, and locks it. If there is a record
// already, even a damaged one, the error matches os.ErrExist: the attachment exists, or a
// DEL is due, or an ADD was killed ([Dir.LockAttachment] tells). It needs the shared lock.
// The caller has to Commit, Close or Abandon the result.
func (d *Dir) Create(a *Attachment) (*Pending, error) {
	p, err := d.create(a)
	if err != nil {
		return nil, fmt.Errorf("create attachment: %w", err)
	}
	return p, nil
}

func (d *Dir) create(a *Attachment) (*Pending, error) {
	a.State = Adding
	if a.Created.IsZero() {
		a.Created = d.sources.now().UTC()
	}
	line, err := encodeAttachment(a)
	if err != nil {
		return nil, err
	}
	a.Short = a.Hash()
	path, err := d.attachmentPath(a.Network, a.Short)
	if err != nil {
		return nil, err
	}
	fd, err := d.createLocked(path, line)
	if err != nil {
		return nil, err
	}
	lock := AttachmentLock{fd: fd, order: lockorder.Tried(lockorder.Attachment)}
	return &Pending{AttachmentLock: lock, path: path, size: int64(len(line))}, nil
}

// createLocked makes a record's file that appears whole and locked: an empty one, or one
// without its lock, would be taken for what a killed ADD left.
func (d *Dir) createLocked(path string, line []byte) (int, error) {
	fd, err := makeUnnamed(filepath.Dir(path))
	if err != nil {
		return -1, err
	}
	err = errors.Join(unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB), file.WriteAll(fd, path, line))
	if err == nil {
		err = unix.Linkat(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(fd), unix.AT_FDCWD, path, unix.AT_SYMLINK_FOLLOW)
	}
	if err != nil {
		return -1, errors.Join(&os.PathError{Op: "create", Path: path, Err: err}, unix.Close(fd))
	}
	return fd, nil
}

// makeUnnamed opens a file that has no name yet, in a directory that may be missing.
func makeUnnamed(dir string) (int, error) {
	fd, err := openUnnamed(dir)
	if !errors.Is(err, os.ErrNotExist) {
		return fd, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return -1, err
	}
	return openUnnamed(dir)
}

func openUnnamed(dir string) (int, error) {
	return file.OpenAny(dir, unix.O_TMPFILE|unix.O_WRONLY|unix.O_APPEND)
}

// Gone says whether the record was removed since Create: by a DEL or a GC, which want the
// ADD to end.
func (p *Pending) Gone() (bool, error) {
	if p.fd < 0 {
		return p.lost, nil
	}
	var st unix.Stat_t
	if err := unix.Fstat(p.fd, &st); err != nil {
		return false, &os.PathError{Op: "stat", Path: p.path, Err: err}
	}
	return st.Nlink == 0, nil
}

// Abandon removes the record, also after Commit, if it is still this one, and closes p. It needs the shared
// lock.
func (p *Pending) Abandon() error {
	gone, err := p.Gone()
	if err == nil && !gone && !p.lost {
		err = file.Remove(p.path)
	}
	if err = errors.Join(err, p.Close()); err != nil {
		return fmt.Errorf("abandon attachment: %w", err)
	}
	return nil
}

// Commit makes the record Ready, with everything that a says now, and closes p. It
// appends a line: a crash in the middle of it leaves the record Adding, and no
// temporary file. If the record was removed meanwhile the error matches
// os.ErrNotExist, and nothing comes back to life. On any error the record is as
// before, and a.State too.
func (p *Pending) Commit(a *Attachment) error {
	if err := p.commit(a); err != nil {
		a.State = Adding
		return fmt.Errorf("commit attachment: %w", errors.Join(err, p.Close()))
	}
	return p.Close()
}

func (p *Pending) commit(a *Attachment) error {
	if p.fd < 0 {
		return &os.PathError{Op: "write", Path: p.path, Err: os.ErrClosed}
	}
	a.State = Ready
	line, err := encodeAttachment(a)
	if err != nil {
		return err
	}
	if err := file.WriteAll(p.fd, p.path, line); err != nil {
		// The part of the line that a full file system took would spoil a later one.
		return errors.Join(err, unix.Ftruncate(p.fd, p.size))
	}
	gone, err := p.Gone()
	if err == nil && gone {
		p.lost = true
		err = &os.PathError{Op: "write", Path: p.path, Err: os.ErrNotExist}
	}
	return err
}

// lastDocument returns the last whole line of a record's file. Text after the
// last newline counts if it is JSON all the same, as an editor leaves it: no
// proper prefix of an object is JSON, so half a write is never taken for a whole
// one.
func lastDocument(data []byte) []byte {
	end := bytes.LastIndexByte(data, '\n')
	if tail := data[end+1:]; end < 0 || json.Valid(tail) {
		return tail
	}
	start := bytes.LastIndexByte(data[:end], '\n')
	return data[start+1 : end]
}

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
		// The error can only say that the time is over.
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
