package state

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// A crash in Create leaves any part of the first line.
func TestAHalfWrittenRecordIsDamagedAtEveryOffset(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	a := sample("c1")
	create(t, d, a)
	path := recordPath(t, d, a)
	line := mustRead(t, path)
	for i := range len(line) {
		writeFile(t, path, line[:i])
		_, loadErr := d.Load("cbr0", a.Hash())
		found, bad, err := d.List("cbr0")
		must.Succeed(t, err)
		if i == len(line)-1 { // all but the newline
			expect.That(t, loadErr == nil && len(found) == 1, "%d of %d bytes: %v", i, len(line), loadErr)
			continue
		}
		expect.That(t, errors.Is(loadErr, ErrDamaged) && len(found) == 0 && len(bad) == 1 && bad[0].Hash == a.Hash(),
			"%d of %d bytes: Load says %v, List %v and %v", i, len(line), loadErr, found, bad)
	}
	expect.Success(t, d.Remove("cbr0", a.Hash()), "Remove of a damaged record")
	create(t, d, a)
}

// A crash in Commit leaves any part of the second line.
func TestAHalfWrittenCommitLeavesTheRecordAdding(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	a := sample("c1")
	p := pending(t, d, a)
	path := recordPath(t, d, a)
	first := len(mustRead(t, path))
	must.Succeed(t, p.Commit(a))
	whole := mustRead(t, path)
	for i := first; i <= len(whole); i++ {
		writeFile(t, path, whole[:i])
		want := Adding
		if i >= len(whole)-1 { // all, or all but the newline
			want = Ready
		}
		got, err := d.Load("cbr0", a.Hash())
		expect.That(t, err == nil && got.State == want,
			"%d of %d bytes: %v, %v, want it %s", i, len(whole), got, err, want)
	}
}

func TestAHalfWrittenNetworkIsDamagedAtEveryOffset(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	must.Succeed(t, d.SaveNetwork(sampleNetwork("cbr0")))
	path := filepath.Join(d.networksPath(), "cbr0"+suffix)
	whole := mustRead(t, path)
	for i := range len(whole) - 1 {
		writeFile(t, path, whole[:i])
		expect.Is(t, expect.Err(d.LoadNetwork("cbr0")), ErrDamaged, "%d of %d bytes", i, len(whole))
	}
	expect.Success(t, d.SaveNetwork(sampleNetwork("cbr0")), "SaveNetwork over a damaged record")
}

func TestLastDocumentIsTheLastWholeLine(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ file, want string }{
		"one line":               {"{\"a\":1}\n", `{"a":1}`},
		"one line, no newline":   {`{"a":1}`, `{"a":1}`},
		"two lines":              {"{\"a\":1}\n{\"a\":2}\n", `{"a":2}`},
		"second without newline": {"{\"a\":1}\n{\"a\":2}", `{"a":2}`},
		"second cut short":       {"{\"a\":1}\n{\"a\":", `{"a":1}`},
		"third cut short":        {"{\"a\":1}\n{\"a\":2}\n{", `{"a":2}`},
		"first cut short":        {`{"a"`, `{"a"`},
		"empty":                  {"", ""},
		"a bare newline":         {"\n", ""},
		"blank lines after":      {"{\"a\":1}\n\n", ""},
	}
	for what, test := range tests {
		got := lastDocument([]byte(test.file))
		expect.That(t, string(got) == test.want, "%s: %q, want %q", what, got, test.want)
	}
	// That half an object never passes for a whole one is what it rests on.
	line := bytes.TrimSpace(lineOf(t, sample("c1")))
	for i := range len(line) {
		expect.That(t, !json.Valid(line[:i]), "the first %d bytes are JSON", i)
	}
}

// A process that is killed anywhere in Create, Commit, Remove or SaveNetwork leaves
// at most one damaged record, and nothing that anybody chokes on.
func TestAKilledProcessLeavesAStateThatCanBeUsed(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	kills := 40
	if testing.Short() {
		kills = 5
	}
	for kill := range kills {
		p := start(t, nil, "churn", d.Path())
		for range 7 + kill*7%30 { // at least all seven of its records
			p.line()
		}
		p.kill()

		found, bad, err := d.List("cbr0")
		must.Succeed(t, err)
		expect.That(t, len(found)+len(bad) >= 6 && len(bad) <= 1, "kill %d: %d records and %v", kill, len(found), bad)
		for _, b := range bad {
			expect.That(t, errors.Is(b, ErrDamaged) && b.Hash != "", "kill %d: %v", kill, b)
			expect.Success(t, d.Remove("cbr0", b.Hash))
		}
		n, err := d.LoadNetwork("cbr0")
		expect.That(t, err == nil && diff(sampleNetwork("cbr0"), n) == "", "kill %d: network %+v, %v", kill, n, err)
		names, err := d.Networks()
		expect.That(t, err == nil && strings.Join(names, " ") == "cbr0", "kill %d: Networks = %v, %v", kill, names, err)
	}
	// What a kill left is written over.
	must.Succeed(t, d.SaveNetwork(sampleNetwork("cbr0")))
	left := temporaryFiles(t, d)
	expect.That(t, len(left) == 0, "left: %v", left)
	expect.Of(os.ReadDir(d.Path())).Len(t, 2, "in the directory")
}
