package state

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"
)

func noteLock(t *testing.T, d *Dir) *Lock {
	t.Helper()
	l, err := d.Lock(context.Background(), Shared)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func TestNoteIsThereForTheNextHolder(t *testing.T) {
	t.Parallel()
	d, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l := noteLock(t, d)
	if got := l.Note(); got != "" {
		t.Errorf("nobody has written a note, and there is %q", got)
	}
	for _, text := range []string{"a", strings.Repeat("x", maxNote), "short again", ""} {
		if err := l.SetNote(text); err != nil {
			t.Fatal(err)
		}
		if got := noteLock(t, d).Note(); got != text {
			t.Errorf("note %q, want %q", got, text)
		}
	}
	for _, text := range []string{strings.Repeat("x", maxNote+1), "two\nlines"} {
		if l.SetNote(text) == nil {
			t.Errorf("%q is no note", text)
		}
	}
	if err := l.SetNote("last"); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	l := noteLock(t, d)
	if err := l.SetNote("generation 4711"); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(d.lockPath())
	if err != nil {
		t.Fatal(err)
	}
	for i := range whole {
		torn := append([]byte(nil), whole...)
		torn[i]++
		if err := os.WriteFile(d.lockPath(), torn, 0o600); err != nil {
			t.Fatal(err)
		}
		if got := l.Note(); got != "" {
			t.Errorf("with byte %d changed, the note is %q", i, got)
		}
		if err := os.WriteFile(d.lockPath(), whole[:i], 0o600); err != nil {
			t.Fatal(err)
		}
		if got := l.Note(); got != "" {
			t.Errorf("of %d bytes, the note is %q", i, got)
		}
	}
}

func TestNoteOfAnotherNamespaceIsNone(t *testing.T) {
	t.Parallel()
	d, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := noteLock(t, d).SetNote("here"); err != nil {
		t.Fatal(err)
	}
	l := noteLock(t, d)
	own := d.sources.netns
	d.sources.netns = func() (uint64, error) {
		cookie, err := own()
		return cookie + 1, err
	}
	if got := l.Note(); got != "" {
		t.Errorf("elsewhere, the note is %q", got)
	}
	if err := l.SetNote("there"); err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
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
