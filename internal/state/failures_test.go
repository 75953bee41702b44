package state

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func countFailures(t *testing.T, d *Dir, verb string, code uint, times int) {
	t.Helper()
	for range times {
		if err := d.CountFailure(verb, code); err != nil {
			t.Fatal(err)
		}
	}
}

func wantFailures(t *testing.T, d *Dir, want ...Failures) {
	t.Helper()
	got, err := d.Failures()
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v, failures (-want +got):\n%s", err, diff)
	}
}

func TestFailuresAreCountedByVerbAndCode(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	wantFailures(t, d)
	if err := os.MkdirAll(d.Path(), 0o700); err != nil {
		t.Fatal(err)
	}
	countFailures(t, d, "ADD", 100, 3)
	countFailures(t, d, "DEL", 11, 1)
	countFailures(t, d, "ADD", 11, 12)
	countFailures(t, d, "ADD", 100, 1)
	// A delegated plugin may give any code.
	countFailures(t, d, "CHECK", 4_000_000_000, 1)
	countFailures(t, d, "CHECK", 999, 1)
	wantFailures(t, d, Failures{"ADD", 100, 4}, Failures{"DEL", 11, 1}, Failures{"ADD", 11, 12}, Failures{"CHECK", 999, 2})
	if info, err := os.Stat(d.failuresPath()); err != nil || info.Size() != 4*failureLine || info.Mode().Perm() != 0o600 {
		t.Errorf("file: %v, %v", info, err)
	}
}

func TestFailuresAreCountedByManyAtOnce(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	if err := os.MkdirAll(d.Path(), 0o700); err != nil {
		t.Fatal(err)
	}
	const each, callers = 25, 8
	var all sync.WaitGroup
	missed := make(chan error, each*callers)
	for i := range callers {
		all.Go(func() {
			for range each {
				if err := d.CountFailure("ADD", uint(100+i%2)); err != nil {
					missed <- err // the lock was not to be had in time
				}
			}
		})
	}
	all.Wait()
	close(missed)
	sum := uint64(len(missed))
	list, err := d.Failures()
	for _, f := range list {
		sum += f.Count
	}
	if len(list) != 2 || sum != each*callers || err != nil {
		t.Errorf("%v, %v: %d in all, want %d", list, err, sum, each*callers)
	}
}

func TestFailuresSurviveDamage(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	if err := os.MkdirAll(d.Path(), 0o700); err != nil {
		t.Fatal(err)
	}
	countFailures(t, d, "ADD", 100, 2)
	countFailures(t, d, "DEL", 11, 2)
	whole, err := os.ReadFile(d.failuresPath())
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		text string
		want []Failures // after one more ADD with code 100
	}{
		"a kill while a line was begun": {string(whole[:failureLine+7]), []Failures{{"ADD", 100, 3}}},
		"a line of rubbish":             {strings.Repeat("x", failureLine-1) + "\n" + string(whole[failureLine:]), []Failures{{"DEL", 11, 2}, {"ADD", 100, 1}}},
		"a line that is there twice":    {string(whole) + string(whole), []Failures{{"ADD", 100, 3}, {"DEL", 11, 2}}},
		"nothing but zeros":             {strings.Repeat("\x00", 100), []Failures{{"ADD", 100, 1}}},
	} {
		if err := os.WriteFile(d.failuresPath(), []byte(tt.text), 0o600); err != nil {
			t.Fatal(err)
		}
		countFailures(t, d, "ADD", 100, 1)
		got, err := d.Failures()
		if diff := cmp.Diff(tt.want, got); diff != "" || err != nil {
			t.Errorf("after %s: %v, failures (-want +got):\n%s", name, err, diff)
		}
	}
}

func TestTheFileOfFailuresIsBounded(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	if err := os.MkdirAll(d.Path(), 0o700); err != nil {
		t.Fatal(err)
	}
	for code := range uint(maxFailures) {
		countFailures(t, d, "ADD", code, 1)
	}
	if err := d.CountFailure("DEL", 1); err == nil {
		t.Error("there is room for one more")
	}
	countFailures(t, d, "ADD", maxFailures-1, 1)
	list, err := d.Failures()
	if len(list) != maxFailures || err != nil || list[maxFailures-1].Count != 2 {
		t.Errorf("%d lines, %v; the last is %v", len(list), err, list[len(list)-1])
	}
	if info, err := os.Stat(d.failuresPath()); err != nil || info.Size() != maxFailures*failureLine {
		t.Errorf("file: %v, %v", info, err)
	}
}

func TestAFailureIsNotWaitedForToBeCounted(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	if err := d.CountFailure("ADD", 1); err == nil || dirExists(d) {
		t.Errorf("without a directory: %v", err)
	}
	if err := os.MkdirAll(d.Path(), 0o700); err != nil {
		t.Fatal(err)
	}
	countFailures(t, d, "ADD", 1, 1)
	// As a process that was stopped.
	fd, err := unix.Open(d.failuresPath(), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Flock(fd, unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if err := d.CountFailure("ADD", 1); err == nil {
		t.Error("it was counted without the lock")
	}
	wantFailures(t, d, Failures{"ADD", 1, 1})
	// A link to somewhere else is not followed.
	other := filepath.Join(t.TempDir(), "other")
	if err := os.WriteFile(other, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	d = newDir(t)
	if err := os.MkdirAll(d.Path(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(other, d.failuresPath()); err != nil {
		t.Fatal(err)
	}
	if err := d.CountFailure("ADD", 1); err == nil {
		t.Error("it was counted in another file")
	}
}

func dirExists(d *Dir) bool {
	_, err := os.Stat(d.Path())
	return err == nil
}

func FuzzFailures(f *testing.F) {
	f.Add([]byte("ADD     100                    1\nDEL      11                    2\n"))
	d := newDir(f)
	if err := os.MkdirAll(d.Path(), 0o700); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		writeFile(t, d.failuresPath(), string(data))
		of := func() uint64 {
			list, err := d.Failures()
			if err != nil {
				t.Skip("longer than any record")
			}
			for _, f := range list {
				if f.Verb == "ADD" && f.Code == 100 {
					return f.Count
				}
			}
			return 0
		}
		before := of()
		if err := d.CountFailure("ADD", 100); err != nil {
			return
		}
		if got := of(); got != before+1 {
			t.Errorf("%q: counted %d, and before %d", data, got, before)
		}
	})
}
