// Package sources is how the plugin has tombolod put pods' addresses into a zone of firewalld: the
// plugin speaks with no bus. In the directory sources of the state, the plugin writes a file for each
// attachment that asks for that, by the name of its hash: network and zone, an address in each line,
// and a line that no other file has. tombolod writes another one of that name and ".in": what it has
// done, and below that the request that it did it for.
//
//	doing              the addresses may be in the zone
//	done               they are
//	refused: REASON    firewalld refuses
//
// That file is there before an address is in the zone, and goes once none is, which is to be when the
// request is gone, or the attachment's record. So the next tombolod undoes what a killed one did.
package sources

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/state"
)

var (
	// ErrUnattended says that nobody attends to firewalld's zones: state.Dir.AttendZones.
	ErrUnattended = errors.New("no tombolod attends to firewalld")
	// ErrRefused says that firewalld refused.
	ErrRefused = errors.New("firewalld refuses")

	errLate = errors.New("tombolod has not done it in time")
)

// What the first line of an answer says, and what its name ends with.
const (
	doing, done, refused = "doing", "done", "refused"

	answerSuffix = ".in"
)

// Dir has the files.
type Dir struct {
	state *state.Dir
	path  string
}

// Of is the one of a state directory.
func Of(d *state.Dir) *Dir { return &Dir{d, d.Path() + "/sources"} }

// Attended says whether a tombolod attends to firewalld's zones.
func (d *Dir) Attended() bool { return d.state.ZonesAttended("") }

// Text is a request but for its last line.
func Text(network, zone string, addresses []netip.Addr) string {
	text := network + " " + zone + "\n"
	for _, a := range addresses {
		text += a.String() + "\n"
	}
	return text
}

// IsZone says whether a zone of firewalld may have such a name.
func IsZone(name string) bool {
	for _, c := range name {
		if !strings.ContainsRune("-_/", c) && (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') {
			return false
		}
	}
	return name != "" && len(name) <= 64
}

// How often a waiting plugin looks, and how long it waits for addresses to be in a zone, and to be
// in it no more. firewalld takes some 0.1 s for each, one after the other, and longer with many rules.
const (
	pause     = 10 * time.Millisecond
	askWait   = 20 * time.Second
	leaveWait = 5 * time.Second
)

// Ask has the addresses of an attachment, whose record is there, be sources of a zone, and waits for
// that. After an error, Leave undoes it.
func (d *Dir) Ask(ctx context.Context, hash, text string) error {
	text += strconv.FormatUint(rand.Uint64(), 36) + "\n"
	if err := d.write(hash, text); err != nil {
		return err
	}
	var outcome string
	err := d.wait(ctx, hash, askWait, func(answer string) bool {
		var of string
		outcome, of, _ = strings.Cut(answer, "\n")
		return of == text && outcome != doing
	})
	if err == nil && outcome != done {
		err = fmt.Errorf("%w%s", ErrRefused, strings.TrimPrefix(outcome, refused))
	}
	return err
}

// Leave has the addresses of an attachment leave the zone, and waits for that if a tombolod is there:
// else the next one does it. Of an attachment that has never asked, it is the addresses of the text;
// an empty one is none.
func (d *Dir) Leave(ctx context.Context, hash, text string) error {
	if err := file.Remove(d.path + "/" + hash); err != nil {
		return err
	}
	switch has, err := d.answer(hash); {
	case err != nil:
		return err
	case has != "":
	case text == "" || !d.Attended():
		return nil
	default:
		if err := d.write(hash+answerSuffix, doing+"\n"+text); err != nil {
			return err
		}
	}
	err := d.wait(ctx, hash, leaveWait, func(answer string) bool { return answer == "" })
	if errors.Is(err, ErrUnattended) || errors.Is(err, errLate) || ctx.Err() != nil {
		return nil // it is on record, and that is enough
	}
	return err
}

// Has says whether the addresses of the text are in its zone, and why not if firewalld has said so.
func (d *Dir) Has(hash, text string) (_ bool, why string, _ error) {
	answer, err := d.answer(hash)
	outcome, of, _ := strings.Cut(answer, "\n")
	is := outcome == done && strings.HasPrefix(of, text)
	if !is && outcome != done && outcome != doing {
		why = outcome
	}
	return is, why, err
}

// answer is what tombolod has written; empty if that is nothing.
func (d *Dir) answer(hash string) (string, error) {
	data, err := file.Read(d.path+"/"+hash+answerSuffix, file.MaxRecord)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return string(data), err
}

// wait looks until the answer is as it should be, nobody attends to it any more, or the time is over.
func (d *Dir) wait(ctx context.Context, hash string, most time.Duration, isDone func(answer string) bool) error {
	for end := time.Now().Add(most); ; time.Sleep(pause) {
		// Before the look: what has just ended may have done it.
		attended := d.Attended()
		answer, err := d.answer(hash)
		if err == nil && !isDone(answer) {
			err = ctx.Err()
			if !attended {
				err = ErrUnattended
			} else if time.Now().After(end) {
				err = errLate
			}
			if err == nil {
				continue
			}
		}
		return err
	}
}

// write puts a file in place whole, by way of one that is none by its name.
func (d *Dir) write(name, text string) error {
	return file.Replace(d.path+"/."+name, unix.O_TRUNC, d.path+"/"+name, []byte(text))
}
