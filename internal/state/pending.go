package state

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/lockorder"
)

// A Pending is the record of an attachment between Create and Commit. It holds
// the file open, so that what it commits is the record that it created: not one
// that was removed meanwhile, nor a later one of the same name. And it holds the
// record's lock, until Commit, Close or the end of the process, so that nobody takes the
// ADD for one that was killed.
type Pending struct {
	fd    int
	path  string
	hash  string
	size  int64 // of what Create wrote, in bytes
	lost  bool  // Commit found it removed
	order *lockorder.Held
}

// Create writes the record of an attachment that an ADD begins, in state Adding,
// setting a.State and, if it is zero, a.Created, and locks it. If there is a record
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
	if err := a.check(); err != nil {
		return nil, err
	}
	a.State = Adding
	if a.Created.IsZero() {
		a.Created = d.sources.now().UTC()
	}
	line, err := encodeAttachment(a)
	if err != nil {
		return nil, err
	}
	hash := a.Hash()
	path, err := d.attachmentPath(a.Network, hash)
	if err != nil {
		return nil, err
	}
	fd, err := createFile(path, unix.O_WRONLY|unix.O_EXCL|unix.O_APPEND)
	if err != nil {
		return nil, err
	}
	if err := lockNew(fd, path); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	if err := writeAll(fd, path, line); err != nil {
		return nil, errors.Join(err, unix.Close(fd), removeFile(path))
	}
	return &Pending{fd: fd, path: path, hash: hash, size: int64(len(line)), order: lockorder.Tried(lockorder.Attachment)}, nil
}

// lockNew locks a record that was just made. Another call of the same attachment may have
// been faster, which took the empty file for what a killed ADD left: it is that one's.
func lockNew(fd int, path string) error {
	locked, err := tryFlock(fd, unix.LOCK_EX)
	var st unix.Stat_t
	if err == nil {
		err = unix.Fstat(fd, &st)
	}
	if err == nil && (!locked || st.Nlink == 0) {
		err = os.ErrExist
	}
	if err != nil {
		return &os.PathError{Op: "lock", Path: path, Err: err}
	}
	return nil
}

// Gone says whether the record was removed since Create: by a DEL or a GC, which want the
// ADD to end.
func (p *Pending) Gone() (bool, error) {
	if p.fd < 0 {
		return false, nil
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
		err = removeFile(p.path)
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
	if err := a.check(); err != nil {
		return err
	}
	if hash := a.Hash(); hash != p.hash {
		return fmt.Errorf("%s is the record of another attachment than %s", p.path, hash)
	}
	a.State = Ready
	line, err := encodeAttachment(a)
	if err != nil {
		return err
	}
	if err := writeAll(p.fd, p.path, line); err != nil {
		// What a full file system took of the line would spoil a later one.
		return errors.Join(err, unix.Ftruncate(p.fd, p.size))
	}
	gone, err := p.Gone()
	if err == nil && gone {
		p.lost = true
		err = &os.PathError{Op: "write", Path: p.path, Err: os.ErrNotExist}
	}
	return err
}

// Close closes the file and leaves the record as it is. Closing twice, or after
// Commit, does nothing.
func (p *Pending) Close() error {
	if p.fd < 0 {
		return nil
	}
	fd := p.fd
	p.fd = -1
	p.order.Release()
	p.order = nil
	return unix.Close(fd)
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
