package state

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func noteLock(t *testing.T, d *Dir) *Lock {
	t.Helper()
	l, err := d.Lock(context.Background(), Shared)
	must.Succeed(t, err)
	t.Cleanup(func() { l.Close() })
	return l
}

func TestNoteIsThereForTheNextHolder(t *testing.T) {
	t.Parallel()
	d, err := Open(t.TempDir())
	must.Succeed(t, err)
	l := noteLock(t, d)
	if got := l.Note(); got != "" {
		t.Errorf("nobody has written a note, and there is %q", got)
	}
	for _, text := range []string{"a", strings.Repeat("x", maxNote), "short again", ""} {
		must.Succeed(t, l.SetNote(text))
		if got := noteLock(t, d).Note(); got != text {
			t.Errorf("note %q, want %q", got, text)
		}
	}
	for _, text := range []string{strings.Repeat("x", maxNote+1), "two\nlines"} {
		if l.SetNote(text) == nil {
			t.Errorf("%q is no note", text)
		}
	}
	must.Succeed(t, l.SetNote("last"))
	must.Succeed(t, l.Close())
	if got := l.Note(); got != "" {
		t.Errorf("a lock that is closed has the note %q", got)
	}
	if l.SetNote("x") == nil {
		t.Error("a lock that is closed took a note")
	}
}

func TestNoteThatIsNotWholeIsNone(t *testing.T) {
	t.Parallel()
	d, err := Open(t.TempDir())
	must.Succeed(t, err)
	l := noteLock(t, d)
	must.Succeed(t, l.SetNote("generation 4711"))
	whole, err := os.ReadFile(d.lockPath())
	must.Succeed(t, err)
	for i := range whole {
		torn := append([]byte(nil), whole...)
		torn[i]++
		must.Succeed(t, os.WriteFile(d.lockPath(), torn, 0o600))
		if got := l.Note(); got != "" {
			t.Errorf("with byte %d changed, the note is %q", i, got)
		}
		must.Succeed(t, os.WriteFile(d.lockPath(), whole[:i], 0o600))
		if got := l.Note(); got != "" {
			t.Errorf("of %d bytes, the note is %q", i, got)
		}
	}
}

func TestNoteOfAnotherNamespaceIsNone(t *testing.T) {
	t.Parallel()
	d, err := Open(t.TempDir())
	must.Succeed(t, err)
	must.Succeed(t, noteLock(t, d).SetNote("here"))
	l := noteLock(t, d)
	own := d.sources.netns
	d.sources.netns = func() (uint64, error) {
		cookie, err := own()
		return cookie + 1, err
	}
	if got := l.Note(); got != "" {
		t.Errorf("elsewhere, the note is %q", got)
	}
	must.Succeed(t, l.SetNote("there"))
	if got := l.Note(); got != "there" {
		t.Errorf("the note is %q", got)
	}
	d.sources.netns = own
	if got := noteLock(t, d).Note(); got != "" { // a call stays where it took its lock
		t.Errorf("back again, the note is %q", got)
	}
}

func TestNotesOfManyAreNeverMixed(t *testing.T) {
	t.Parallel()
	d, err := Open(t.TempDir())
	must.Succeed(t, err)
	var wg sync.WaitGroup
	for i := range 4 {
		l := noteLock(t, d)
		text := strings.Repeat(string(rune('a'+i)), 200-i*40)
		wg.Go(func() {
			for range 500 {
				if err := l.SetNote(text); err != nil {
					t.Error(err)
				}
				if got := l.Note(); got != "" && strings.Trim(got, got[:1]) != "" {
					t.Errorf("note %q", got)
				}
			}
		})
	}
	wg.Wait()
}
