package keeper

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

const (
	hashA = "0123456789a"
	hashB = "0123456789b"
)

func watching(t *testing.T) (*watcher, string) {
	t.Helper()
	dir := t.TempDir()
	w := must.Of(watch(dir)).Get(t)
	return w, dir
}

func put(t *testing.T, dir, name string) {
	t.Helper()
	temp := filepath.Join(dir, ".tmp-x")
	err := os.WriteFile(temp, nil, 0o600)
	if err == nil {
		err = os.Rename(temp, filepath.Join(dir, name))
	}
	must.Succeed(t, err)
}

func TestRecordsAreHeardOf(t *testing.T) {
	t.Parallel()
	w, dir := watching(t)
	put(t, dir, hashA+".json")
	if got := <-w.changes; got.name != hashA {
		t.Errorf("written: %v", got)
	}
	put(t, dir, hashB+".lock") // no record
	must.Succeed(t, os.Remove(filepath.Join(dir, hashA+".json")))
	if got := <-w.changes; got.name != hashA {
		t.Errorf("removed: %v", got)
	}
	expect.Success(t, w.close())
}

func TestTheEndOfTheDirectoryIsHeardOf(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(string) error{
		"removed": os.RemoveAll,
		"renamed": func(dir string) error { return os.Rename(dir, dir+"-old") },
	} {
		t.Run(name, func(t *testing.T) {
			w, dir := watching(t)
			must.Succeed(t, end(dir))
			if got, ok := <-w.changes; ok {
				t.Errorf("heard %v, want the end", got)
			}
			expect.Success(t, w.close())
		})
	}
	if _, err := watch(filepath.Join(t.TempDir(), "none")); !errors.Is(err, unix.ENOENT) {
		t.Errorf("watch nothing: %v", err)
	}
}

// The kernel's queue is limited; the reader is kept from reading by a loop that does
// not take what it has read.
func TestALossOfEventsIsHeardOf(t *testing.T) {
	t.Parallel()
	text := must.Of(os.ReadFile("/proc/sys/fs/inotify/max_queued_events")).Get(t)
	limit := must.Of(strconv.Atoi(strings.TrimSpace(string(text)))).Get(t)
	w, dir := watching(t)
	put(t, dir, hashA+".json")
	// Some are read, and then wait in the channel: it takes 64, and a read some 2,000.
	a, b := filepath.Join(dir, hashA+".json"), filepath.Join(dir, hashB+".json")
	for range limit/4 + 4096 {
		// Four events, no two alike in a row, which the kernel would make one.
		must.Succeed(t, errors.Join(os.Rename(a, b), os.Rename(b, a)))
	}
	lost := false
	for !lost {
		c := <-w.changes
		lost = c.name == ""
	}
	expect.Success(t, w.close())
}

// event makes a struct inotify_event.
func event(mask uint32, name string, pad int) []byte {
	b := make([]byte, unix.SizeofInotifyEvent, 64)
	binary.NativeEndian.PutUint32(b[4:], mask)
	b = append(append(b, name...), make([]byte, pad)...)
	binary.NativeEndian.PutUint32(b[12:], uint32(len(b)-unix.SizeofInotifyEvent))
	return b
}

func TestEventsAreParsed(t *testing.T) {
	t.Parallel()
	a := event(unix.IN_MOVED_TO, hashA+".json", 16)
	for _, tt := range []struct {
		name string
		in   []byte
		want []change
		gone bool
	}{
		{"nothing", nil, nil, false},
		{"a record", a, []change{{hashA}}, false},
		{"twice the same", slices.Concat(a, a), []change{{hashA}}, false},
		{"two", slices.Concat(a, event(unix.IN_DELETE, hashB+".json", 1), a), []change{{hashA}, {hashB}, {hashA}}, false},
		{"other files", slices.Concat(event(unix.IN_MOVED_TO, "keeper.lock", 5), event(unix.IN_DELETE, hashA+".lock", 1)), nil, false},
		{"an overflow", slices.Concat(a, event(unix.IN_Q_OVERFLOW, "", 0)), []change{{hashA}, {}}, false},
		{"the end", slices.Concat(a, event(unix.IN_DELETE_SELF, "", 0), a), []change{{hashA}}, true},
		{"cut short", a[:len(a)-1], []change{{}}, false},
		{"a header cut short", a[:10], nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, gone := parse(tt.in)
			if fmt.Sprint(got) != fmt.Sprint(tt.want) || gone != tt.gone {
				t.Errorf("%v, %t; want %v, %t", got, gone, tt.want, tt.gone)
			}
		})
	}
}

func FuzzParseEvents(f *testing.F) {
	a := event(unix.IN_MOVED_TO, hashA+".json", 16)
	for name, data := range map[string][]byte{"record": a, "cut": a[:20], "overflow": event(unix.IN_Q_OVERFLOW, "", 0), "end": event(unix.IN_IGNORED, "", 0)} {
		f.Add(data)
		if golden.Updates() {
			nstest.SaveCorpus(f, "FuzzParseEvents", name, data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		changes, _ := parse(data)
		if len(changes) > len(data)/unix.SizeofInotifyEvent+1 {
			t.Errorf("%d changes in %d bytes", len(changes), len(data))
		}
	})
}
