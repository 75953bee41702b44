package sources

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// Entry is what there is of one attachment, for tombolod.
type Entry struct {
	Hash string
	// Wants is what the attachment asks for; nil without a request or a record.
	Wants *Request
	// Has is what it may have by our doing; nil for nothing.
	Has *Answer

	request bool // there is the file
}

// Request is what one asks for.
type Request struct {
	Network, Zone string
	Addresses     []netip.Addr

	text string
}

// Answer is what became of a request.
type Answer struct {
	Request
	Done bool
	Why  string // why firewalld refused, in one line; empty if it did not
}

// In says whether the request is for an address to be in a zone.
func (r *Request) In(zone string, a netip.Addr) bool {
	return r != nil && r.Zone == zone && slices.Contains(r.Addresses, a)
}

// IsBegun says that it is noted that the attachment may have what it wants.
func (e *Entry) IsBegun() bool { return e.Has != nil && e.Has.text == e.Wants.text }

// IsDone says that it is noted that the attachment has it.
func (e *Entry) IsDone() bool { return e.IsBegun() && e.Has.Done }

// Refused says that this has been answered to what is wanted.
func (e *Entry) Refused(why string) bool { return why != "" && e.IsBegun() && e.Has.Why == why }

// Path is the directory's, for a program that watches it. It may not be there yet.
func (d *Dir) Path() string { return d.path }

// old is the age of a file that nobody works on any more.
const old = time.Minute

// List reads all files; those that cannot be used come as errors beside. What a killed process has
// left over, and nobody needs, is removed.
func (d *Dir) List() ([]*Entry, error) {
	files, err := file.ReadDir(d.path)
	errs := []error{err}
	of := map[string]*Entry{}
	var list []*Entry
	for _, f := range files {
		hash := strings.TrimSuffix(f.Name(), answerSuffix)
		if !state.IsHash(hash) {
			if info, err := f.Info(); strings.HasPrefix(hash, ".") && err == nil && time.Since(info.ModTime()) > old {
				errs = append(errs, file.Remove(d.path+"/"+f.Name()))
			}
			continue
		}
		e := of[hash]
		if e == nil {
			e = &Entry{Hash: hash}
			of[hash], list = e, append(list, e)
		}
		if err := d.read(e, f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("%s/%s: %w", d.path, f.Name(), err))
		}
	}
	return list, errors.Join(errs...)
}

// read adds a file to what there is of an attachment.
func (d *Dir) read(e *Entry, f os.DirEntry) error {
	data, err := file.Read(d.path+"/"+f.Name(), file.MaxRecord)
	if err != nil {
		return err
	}
	if f.Name() != e.Hash {
		e.Has, err = decodeAnswer(string(data))
		return err
	}
	r, err := decode(string(data))
	if err != nil {
		return err
	}
	e.request = true
	_, err = d.state.Find(r.Network, e.Hash)
	switch {
	case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, state.ErrName):
		e.Wants = r // whatever is wrong with the record
	default:
		// A new ADD may be about to write such a request, though its record is gone: see Forget.
		info, err := f.Info()
		e.request = err == nil && time.Since(info.ModTime()) > old
	}
	return nil
}

func decode(text string) (*Request, error) {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	network, zone, ok := strings.Cut(lines[0], " ")
	if !ok || !IsZone(zone) {
		return nil, fmt.Errorf("%w: it begins with %.60q", file.ErrDamaged, lines[0])
	}
	r := &Request{Network: network, Zone: zone, text: text}
	for i, line := range lines[1:] {
		a, err := netip.ParseAddr(line)
		if err == nil && a.Zone() == "" && !a.Is4In6() {
			r.Addresses = append(r.Addresses, a)
		} else if i < len(lines)-2 {
			return nil, fmt.Errorf("%w: %.60q is no address", file.ErrDamaged, line)
		}
	}
	return r, nil
}

func decodeAnswer(text string) (*Answer, error) {
	outcome, of, _ := strings.Cut(text, "\n")
	r, err := decode(of)
	if err != nil {
		return nil, err
	}
	why, _ := strings.CutPrefix(outcome, refused+": ")
	if outcome == done || outcome == doing {
		why = ""
	}
	return &Answer{Request: *r, Done: outcome == done, Why: why}, nil
}

// Begin notes that what the attachment wants is about to be done.
func (d *Dir) Begin(e *Entry) error { return d.answerWith(e, doing) }

// Finish notes that it is done, or, with a reason in one line, that firewalld refuses.
func (d *Dir) Finish(e *Entry, why string) error {
	if why == "" {
		return d.answerWith(e, done)
	}
	return d.answerWith(e, refused+": "+why)
}

func (d *Dir) answerWith(e *Entry, outcome string) error {
	text := outcome + "\n" + e.Wants.text
	if err := d.write(e.Hash+answerSuffix, text); err != nil {
		return err
	}
	answer, err := decodeAnswer(text)
	e.Has = answer
	return err
}

// Forget notes that nothing is left of an attachment that wants nothing.
func (d *Dir) Forget(e *Entry) error {
	if err := file.Remove(d.path + "/" + e.Hash + answerSuffix); err != nil || !e.request {
		return err
	}
	return file.Remove(d.path + "/" + e.Hash)
}

// Changed is a number that changes when a file is written or removed, and, where there are
// requests, when an attachment of their networks comes or goes.
func (d *Dir) Changed(list []*Entry) int64 {
	sum := int64(0)
	if info, err := os.Stat(d.path); err == nil {
		sum = info.ModTime().UnixNano()
	}
	seen := map[string]bool{}
	for _, e := range list {
		if e.Wants != nil && !seen[e.Wants.Network] {
			seen[e.Wants.Network] = true
			sum += d.state.AttachmentsChanged(e.Wants.Network)
		}
	}
	return sum
}
