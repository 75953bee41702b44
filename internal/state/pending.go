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

// A Pending is the record of an attachment between Create and Commit. It keeps the file open, so that Commit writes
// to the file of Create, and not to a later one of the same name. It also holds the record's lock.
type Pending struct {
	AttachmentLock
	path string
	size int64 // bytes that Create wrote
	lost bool  // Commit found the record removed
}

// Create writes the record of a new attachment in state Adding, and locks it. It sets a.State, a.Short and, if it is
// zero, a.Created.
//
// If there is a record already, even a damaged one, the error matches os.ErrExist. Either the attachment exists, a
// DEL is due, or an ADD was killed. [Dir.LockAttachment] tells these cases apart. Create needs the shared lock. The
// caller must call Commit, Close or Abandon on the result.
func (d *Dir) Create(a *Attachment) (*Pending, error) {
	p, err := d.create(a)
	if err != nil {
		return nil, fmt.Errorf("create attachment: %w", err)
	}
	return p, nil
}

// create does the work of Create.
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

// createLocked creates a record's file. The file gets its name only when it is complete and locked. An empty or
// unlocked file would look like the remains of a killed ADD.
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

// makeUnnamed opens a file without a name in dir, and creates dir if it is missing.
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

// openUnnamed opens a file without a name in dir.
func openUnnamed(dir string) (int, error) {
	return file.OpenAny(dir, unix.O_TMPFILE|unix.O_WRONLY|unix.O_APPEND)
}

// Gone reports whether a DEL or a GC has removed the record since Create. In that case the ADD must end.
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

// Abandon removes the record, even after Commit, and closes p. If another call has created a record of the same name
// since, Abandon leaves that record alone. It needs the shared lock.
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

// Commit sets the record's state to Ready, writes all of a, and closes p. It appends a line, so that a crash in the
// middle leaves the record Adding and no temporary file. If the record was removed since Create, the error matches
// os.ErrNotExist, and the record is not created again. On any error the record and a.State stay Adding.
func (p *Pending) Commit(a *Attachment) error {
	if err := p.commit(a); err != nil {
		a.State = Adding
		return fmt.Errorf("commit attachment: %w", errors.Join(err, p.Close()))
	}
	return p.Close()
}

// commit does the work of Commit, and leaves p open.
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
		// Cut off the part of the line that was written before the file system was full. It would spoil a later line.
		return errors.Join(err, unix.Ftruncate(p.fd, p.size))
	}

	gone, err := p.Gone()
	if err == nil && gone {
		p.lost = true
		err = &os.PathError{Op: "write", Path: p.path, Err: os.ErrNotExist}
	}

	return err
}

// lastDocument returns the last complete line of a record's file. Text after the last newline counts too if it is
// valid JSON, as an editor may leave it. A line that was written only in part is never valid, since no proper prefix
// of a JSON object is JSON.
func lastDocument(data []byte) []byte {
	end := bytes.LastIndexByte(data, '\n')
	if tail := data[end+1:]; end < 0 || json.Valid(tail) {
		return tail
	}
	start := bytes.LastIndexByte(data[:end], '\n')
	return data[start+1 : end]
}

// ErrBusy means that another call holds the lock of an attachment's record.
var ErrBusy = errors.New("another call is at work on it")

// An AttachmentLock is the flock(2) on the file of an attachment's record, held until Close or until the process
// ends. An ADD holds it from [Dir.Create] until it is done, and a call that undoes an attachment holds it while it
// works. So if a record says Adding and can be locked, its ADD was killed.
//
// It comes before all other locks. Callers try it and never wait for it.
type AttachmentLock struct {
	fd    int
	order *lockorder.Acquisition
}

// LockAttachment locks the record of an attachment. If there is no record, the error matches os.ErrNotExist. If
// another process has the lock, the error matches ErrBusy.
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

// AtWork returns a function that waits for the call that holds the lock of an attachment's record. The function
// returns when that call releases the lock or ctx ends, even if the record is removed in between. Without a record it
// returns at once. Call the function exactly once, and while holding no lock.
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

		// The only possible error is the end of ctx.
		_ = file.Await(ctx, path, func() (bool, error) { return file.TryFlock(fd, unix.LOCK_SH) })
	}, nil
}

// Close releases the lock. A second Close does nothing.
func (l *AttachmentLock) Close() error {
	if l == nil || l.fd < 0 {
		return nil
	}
	fd := l.fd
	l.fd = -1
	l.order.Release()
	return file.Unlock(fd)
}
