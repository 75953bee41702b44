package state

import (
	"context"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func noteLock(t *testing.T, d *Dir) *Lock {
	t.Helper()
	l := must.Of(d.Lock(context.Background(), Shared)).Get(t)
	t.Cleanup(func() { l.Close() })
	return l
}

func TestNoteIsThereForTheNextHolder(t *testing.T) {
	t.Parallel()
	d := must.Of(Open(t.TempDir())).Get(t)
	l := noteLock(t, d)
	expect.Equal(t, l.Note(), "", "nobody has written a note, and there is")
	for _, text := range []string{"a", strings.Repeat("x", maxNote), "short again", ""} {
		must.Succeed(t, l.SetNote(text))
		expect.Equal(t, noteLock(t, d).Note(), text, "note")
	}
	for _, text := range []string{strings.Repeat("x", maxNote+1), "two\nlines"} {
		expect.That(t, l.SetNote(text) != nil, "%q is no note", text)
	}
	must.Succeed(t, l.SetNote("last"))
	must.Succeed(t, l.Close())
	expect.Equal(t, l.Note(), "", "a lock that is closed has the note")
	expect.That(t, l.SetNote("x") != nil, "a lock that is closed took a note")
}

func TestNoteThatIsNotWholeIsNone(t *testing.T) {
	t.Parallel()
	d := must.Of(Open(t.TempDir())).Get(t)
	l := noteLock(t, d)
	must.Succeed(t, l.SetNote("generation 4711"))
	whole := must.Of(os.ReadFile(d.lockPath())).Get(t)
	for i := range whole {
		torn := append([]byte(nil), whole...)
		torn[i]++
		must.Succeed(t, os.WriteFile(d.lockPath(), torn, 0o600))
		expect.Equal(t, l.Note(), "", "with byte %d changed, the note is", i)
		must.Succeed(t, os.WriteFile(d.lockPath(), whole[:i], 0o600))
		expect.Equal(t, l.Note(), "", "of %d bytes, the note is", i)
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
	expect.Equal(t, l.Note(), "", "elsewhere, the note is")
	must.Succeed(t, l.SetNote("there"))
	expect.Equal(t, l.Note(), "there", "the note is")
	d.sources.netns = own
	got := noteLock(t, d).Note()
	expect.That(t, got == "", "back again, the note is %q", got)
}

func TestNotesOfManyAreNeverMixed(t *testing.T) {
	t.Parallel()
	d := must.Of(Open(t.TempDir())).Get(t)
	var wg sync.WaitGroup
	for i := range 4 {
		l := noteLock(t, d)
		text := strings.Repeat(string(rune('a'+i)), 200-i*40)
		wg.Go(func() {
			for range 500 {
				expect.Success(t, l.SetNote(text))
				got := l.Note()
				expect.That(t, got == "" || strings.Trim(got, got[:1]) == "", "note %q", got)
			}
		})
	}
	wg.Wait()
}
