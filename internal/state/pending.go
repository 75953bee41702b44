package state

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// A Pending is the record of an attachment between Create and Commit. It holds
// the file open, so that what it commits is the record that it created: not one
// that was removed meanwhile, nor a later one of the same name.
type Pending struct {
	fd   int
	path string
	hash string
	size int64 // of what Create wrote, in bytes
}

// Create writes the record of an attachment that an ADD begins, in state Adding,
// setting a.State and, if it is zero, a.Created. If there is a record already, even
// a damaged one, the error matches os.ErrExist: the attachment exists, or a DEL is
// due. It needs the shared lock. The caller has to Commit or Close the result;
// Close leaves the record, so an undo calls [Dir.Remove] too.
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
	if err := writeAll(fd, path, line); err != nil {
		return nil, errors.Join(err, unix.Close(fd), removeFile(path))
	}
	return &Pending{fd: fd, path: path, hash: hash, size: int64(len(line))}, nil
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
	var st unix.Stat_t
	if err := unix.Fstat(p.fd, &st); err != nil {
		return &os.PathError{Op: "stat", Path: p.path, Err: err}
	}
	if st.Nlink == 0 {
		return &os.PathError{Op: "write", Path: p.path, Err: os.ErrNotExist}
	}
	return nil
}

// Close closes the file and leaves the record as it is. Closing twice, or after
// Commit, does nothing.
func (p *Pending) Close() error {
	if p.fd < 0 {
		return nil
	}
	fd := p.fd
	p.fd = -1
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
