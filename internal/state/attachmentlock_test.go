package state

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestARunningADDHasItsRecordLocked(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"commit", "close", "abandon"} {
		d := newDir(t)
		a := sample("c1")
		expect.Is(t, expect.Err(d.LockAttachment(a.Network, a.Hash())), os.ErrNotExist, "before")
		p := begin(t, d, a)
		l, err := again(d).LockAttachment(a.Network, a.Hash())
		expect.That(t, l == nil && errors.Is(err, ErrBusy), "LockAttachment = %v, %v, want ErrBusy", l, err)
		expect.Is(t, again(d).Update(a), ErrBusy, "Update")
		ends := map[string]func() error{"commit": func() error { return p.Commit(a) }, "close": p.Close, "abandon": p.Abandon}
		must.Succeed(t, ends[end]())
		l, err = again(d).LockAttachment(a.Network, a.Hash())
		if end == "abandon" {
			expect.Is(t, err, os.ErrNotExist, "after %s", end)
			continue
		}
		must.Succeed(t, err, "after %s", end)
		expect.Is(t, expect.Err(d.LockAttachment(a.Network, a.Hash())), ErrBusy, "while it is held")
		now := must.Of(d.Load(a.Network, a.Hash())).Get(t)
		expect.Equal(t, now.State == Adding, end == "close", "after %s: unfinished", end)
		for range 2 {
			expect.Success(t, l.Close())
		}
	}
}

func TestTheEndOfACallIsWaitedForAlsoWithoutItsRecord(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	a := sample("c1")
	wait := must.Of(d.AtWork(a.Network, a.Hash())).Get(t)
	wait(t.Context()) // for nobody
	p := begin(t, d, a)
	waits := func() func(context.Context) {
		return must.Of(again(d).AtWork(a.Network, a.Hash())).Get(t)
	}
	bounded, unbounded := waits(), waits()
	must.Succeed(t, d.Remove(a.Network, a.Hash()))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if bounded(ctx); ctx.Err() == nil {
		t.Error("the wait ended before the call")
	}
	closed := make(chan error, 1)
	go func() { closed <- p.Close() }()
	unbounded(t.Context())
	expect.Success(t, <-closed)
}

func TestAKilledADDsRecordIsFree(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	p := start(t, nil, "begin", d.Path())
	p.expect("begun")
	a := sample("begun")
	_, err := d.LockAttachment(a.Network, a.Hash())
	must.That(t, errors.Is(err, ErrBusy), "while it runs: %v, want ErrBusy", err)
	p.kill()
	l := must.Of(d.LockAttachment(a.Network, a.Hash())).Get(t)
	defer l.Close()
	expect.Equal(t, must.Of(d.Load(a.Network, a.Hash())).Get(t).State, Adding, "state")
}

// Of a record that only half was written of, nobody has seen a result; of one that was
// damaged later, a pod may run.
func TestUnfinishedIsWhatAnADDWrites(t *testing.T) {
	t.Parallel()
	a := sample("c1")
	a.State = Ready
	whole := string(must.Of(encodeAttachment(a)).Get(t))
	for _, tt := range []struct {
		name, text string
		want       bool
	}{
		{"empty", "", true},
		{"half a line", whole[:len(whole)/2], true},
		{"adding", strings.Replace(whole, `"state":"ready"`, `"state":"adding"`, 1), true},
		{"ready", whole, false},
		{"adding, and half of ready", strings.Replace(whole, `"ready"`, `"adding"`, 1) + whole[:40], true},
		{"a line of rubbish", "rubbish\n", false},
		{"a newer version", strings.Replace(whole, `"version":1`, `"version":99`, 1), false},
	} {
		d := newDir(t)
		a := sample("c1")
		path := must.Of(d.attachmentPath(a.Network, a.Hash())).Get(t)
		writeFile(t, path, tt.text)
		expect.Equal(t, IsUnfinished(d.Load(a.Network, a.Hash())), tt.want, "%s", tt.name)
	}
}

// The undo of an ADD that was told to end must not take the record of the next.
func TestAbandonLeavesALaterRecordAlone(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	a := sample("c1")
	first := begin(t, d, a)
	expect.Of(first.Gone()).Is(t, false, "Gone")
	must.Succeed(t, d.Remove(a.Network, a.Hash()))
	second := begin(t, d, a)
	expect.Of(first.Gone()).Is(t, true, "Gone after Remove")
	must.Succeed(t, first.Abandon())
	expect.Success(t, second.Commit(a), "the later one")
	// The same where Commit found it.
	must.Succeed(t, d.Remove(a.Network, a.Hash()))
	third := begin(t, d, a)
	must.Succeed(t, d.Remove(a.Network, a.Hash()))
	fourth := begin(t, d, a)
	expect.Is(t, third.Commit(a), os.ErrNotExist, "Commit of a removed record")
	must.Succeed(t, third.Abandon())
	expect.Success(t, fourth.Commit(a), "the later one")
	must.Succeed(t, fourth.Abandon())
	expect.Is(t, expect.Err(d.Load(a.Network, a.Hash())), os.ErrNotExist, "after Abandon of a ready one")
}

// Where O_TMPFILE is not to be had, a record gets its name whole and locked as well.
func TestFilesOfOthersAreNotOurs(t *testing.T) {
	t.Parallel()
	needRoot(t)
	d := newDir(t)
	lock(t, d, Shared).Close()
	for _, tt := range []struct {
		name string
		make func() error
		says string
	}{
		{"a FIFO", func() error { return unix.Mkfifo(d.lockPath(), 0o600) }, "not a regular file"},
		{"another user's", func() error {
			writeFile(t, d.lockPath(), "")
			return os.Chown(d.lockPath(), 12345, 0)
		}, "belongs to user 12345"},
		{"a directory", func() error { return os.Mkdir(d.lockPath(), 0o700) }, "is a directory"},
	} {
		must.Succeed(t, errors.Join(os.Remove(d.lockPath()), tt.make()))
		l, err := d.Lock(t.Context(), Shared)
		expect.That(t, l == nil && err != nil &&
			strings.Contains(err.Error(), tt.says), "%s: Lock = %v, %v, want %q", tt.name, l, err, tt.says)
	}
}

func begin(t *testing.T, d *Dir, a *Attachment) *Pending {
	t.Helper()
	p := pending(t, d, a)
	t.Cleanup(func() { p.Close() })
	return p
}
