package state

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestAttachmentGoesFromAddingToReadyToGone(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	a := sample("c1")
	p := pending(t, d, a)
	got := must.Of(d.Load("cbr0", a.Hash())).Get(t)
	expect.Equal(t, got.State, Adding, "after Create its state is")
	a.Addresses = a.Addresses[:1] // what is learnt between Create and Commit counts
	a.MTU = 9000
	must.Succeed(t, p.Commit(a))
	got = must.Of(d.Load("cbr0", a.Hash())).Get(t)
	if d := diff(a, got); d != "" || got.State != Ready {
		t.Errorf("after Commit (-want +got):\n%s", d)
	}
	for range 2 {
		expect.Success(t, d.Remove("cbr0", a.Hash()))
	}
	expect.Is(t, expect.Err(d.Load("cbr0", a.Hash())), os.ErrNotExist, "after Remove")
}

func TestCreateTakesTheTimeUnlessGivenOne(t *testing.T) {
	t.Parallel()
	d, n := newDirOn(t)
	a := sample("c1")
	a.Created = a.Created.AddDate(-26, 0, 0).UTC()
	given := a.Created
	create(t, d, a)
	expect.That(t, a.Created.Equal(given), "Created = %v, want the given %v", a.Created, given)
	b := &Attachment{Network: "cbr0", ContainerID: "c2", IfName: "eth0"}
	create(t, d, b)
	want := n.sources().now()
	expect.That(t, b.Created.Equal(want), "Created = %v, want now, %v", b.Created, want)
}

func TestCreateOfAnExistingAttachmentFails(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	create(t, d, sample("c1"))
	before := mustRead(t, recordPath(t, d, sample("c1")))
	other := sample("c1")
	other.MTU = 9000
	expect.Is(t, expect.Err(d.Create(other)), os.ErrExist)
	expect.Equal(t, mustRead(t, recordPath(t, d, other)), before, "the record is now")
	create(t, d, sample("c2")) // another container of the same network
}

// 32 ADDs of one attachment at once: one wins.
func TestCreateIsExclusive(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	results := make(chan error)
	for range 32 {
		go func() {
			p, err := d.Create(sample("c1"))
			if err == nil {
				err = p.Close()
			}
			results <- err
		}()
	}
	won := 0
	for range 32 {
		switch err := <-results; {
		case err == nil:
			won++
		case !errors.Is(err, os.ErrExist):
			t.Error(err)
		}
	}
	expect.Equal(t, won, 1, "have created the record")
}

func TestCommitNeverRevivesARemovedRecord(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	a := sample("c1")
	p := pending(t, d, a)
	must.Succeed(t, d.Remove("cbr0", a.Hash()))
	expect.Is(t, p.Commit(a), os.ErrNotExist, "Commit")
	expect.Is(t, expect.Err(os.Lstat(recordPath(t, d, a))), os.ErrNotExist, "the record is back")
	expect.Equal(t, a.State, Adding, "State = %q after a Commit that failed", a.State)
}

func TestCommitLeavesALaterRecordOfTheSameNameAlone(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	first := sample("c1")
	p := pending(t, d, first)
	must.Succeed(t, d.Remove("cbr0", first.Hash()))
	second := sample("c1")
	second.MTU = 9000
	create(t, d, second)
	expect.Is(t, p.Commit(first), os.ErrNotExist, "Commit")
	got, err := d.Load("cbr0", first.Hash())
	expect.That(t, err == nil && got.State == Adding && got.MTU == 9000, "the later record is now %+v, %v", got, err)
}

func TestRecordsTooLargeToReadAreNotWritten(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	a := sample("c1")
	a.DataDir = strings.Repeat("x", file.MaxRecord/2)
	expect.Says(t, expect.Err(d.Create(a)), "at most 524288", "Create")
	a.DataDir = ""
	p := pending(t, d, a)
	a.DataDir = strings.Repeat("x", file.MaxRecord/2)
	expect.Says(t, p.Commit(a), "at most 524288", "Commit")
	largest := sample("c2")
	largest.DataDir = strings.Repeat("x", file.MaxRecord/2-2000)
	p = pending(t, d, largest)
	must.Succeed(t, p.Commit(largest))
	got, err := d.Load("cbr0", largest.Hash())
	expect.That(t, err == nil && got.State == Ready, "the largest record: %v", err)
}

func TestFilesAreForTheOwnerOnly(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	l := lock(t, d, Exclusive)
	create(t, d, sample("c1"))
	must.Succeed(t, d.SaveNetwork(sampleNetwork("cbr0")))
	must.Succeed(t, l.Close())
	// The parent that Open's path lacked, and all below it.
	must.Succeed(t, filepath.Walk(filepath.Dir(d.Path()), func(path string, info os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		want := os.FileMode(0o600)
		if info.IsDir() {
			want = 0o700
		}
		expect.Equal(t, info.Mode().Perm(), want, "%s has mode", path)
		return nil
	}))
}

// rubbish is what may stand in place of a record's file.
func rubbish(t testing.TB) map[string]struct {
	put func(path string) error
	is  error
} {
	write := func(text string) func(string) error {
		return func(path string) error { return os.WriteFile(path, []byte(text), 0o600) }
	}
	return map[string]struct {
		put func(path string) error
		is  error
	}{
		"empty":          {write(""), ErrDamaged},
		"NUL bytes":      {write(strings.Repeat("\x00", 4096)), ErrDamaged},
		"too large":      {write(strings.Repeat(" ", 2*file.MaxRecord) + "{}"), ErrDamaged},
		"host-local's":   {write("c1\r\neth0"), ErrDamaged},
		"another's JSON": {write(`{"cniVersion":"1.1.0"}` + "\n"), ErrDamaged},
		"newer":          {write(`{"version":2,"state":["new"]}` + "\n"), ErrVersion},
		"directory":      {func(path string) error { return os.Mkdir(path, 0o700) }, syscall.EISDIR},
		"FIFO":           {func(path string) error { return unix.Mkfifo(path, 0o600) }, ErrDamaged},
		"symbolic link":  {func(path string) error { return os.Symlink("/dev/zero", path) }, syscall.ELOOP},
	}
}

func TestLoadToleratesRubbish(t *testing.T) {
	t.Parallel()
	for what, test := range rubbish(t) {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			d := newDir(t)
			a := sample("c1")
			path := recordPath(t, d, a)
			must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o700))
			must.Succeed(t, test.put(path))
			_, err := d.Load("cbr0", a.Hash())
			var re *RecordError
			must.That(t, errors.As(err, &re) && errors.Is(err, test.is),
				"Load: %v, want a RecordError that is %v", err, test.is)
			expect.That(t, re.Path == path && re.Network == "cbr0" && re.Hash == a.Hash() && strings.Count(err.Error(), path) == 1,
				"%v (%+v) does not name %s once", err, re, path)
			create(t, d, sample("c2"))
			found, bad, err := d.List("cbr0")
			expect.That(t, err == nil && len(found) == 1 && found[0].ContainerID == "c2",
				"List = %v, %v, want the good one", found, err)
			expect.That(t, len(bad) == 1 && bad[0].Path == path && bad[0].Hash == a.Hash() && errors.Is(bad[0], test.is),
				"List says of the bad one: %v", bad)
			_, err = d.Create(a)
			expect.That(t, errors.Is(err, os.ErrExist) || errors.Is(err, syscall.ELOOP), "Create in its place: %v", err)
		})
	}
}

func TestLoadRefusesARecordUnderAnothersName(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	create(t, d, sample("c1"))
	record := mustRead(t, recordPath(t, d, sample("c1")))
	writeFile(t, recordPath(t, d, sample("c2")), record)
	_, err := d.Load("cbr0", sample("c2").Hash())
	expect.That(t, errors.Is(err, ErrDamaged) && strings.Contains(err.Error(), "container c1"),
		"a copy under another hash: %v", err)
	hash := sample("c1").Hash()
	writeFile(t, d.attachmentsPath()+"/other/"+hash+suffix, record)
	expect.Is(t, expect.Err(d.Load("other", hash)), ErrDamaged, "a copy in another network")
}

func TestErrorsSayWhatToDo(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		err  RecordError
		want string
	}{
		"attachment": {RecordError{Path: "/p", Network: "n", Hash: "h", Err: ErrDamaged}, "record /p: damaged; a DEL or GC of the attachment removes it"},
		"network":    {RecordError{Path: "/p", Network: "n", Err: ErrDamaged}, "record /p: damaged; the next ADD to the network builds it again and replaces the file"},
		"foreign":    {RecordError{Path: "/p", Err: ErrDamaged}, "record /p: damaged; remove the file by hand if no other program needs it"},
		"unreadable": {RecordError{Path: "/p", Err: syscall.EIO}, "record /p: input/output error"},
	}
	for what, test := range tests {
		expect.Equal(t, test.err.Error(), test.want, "%s", what)
	}
}

func TestListIsInOrderAndKeepsNetworksApart(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	found, bad, err := d.List("cbr0")
	expect.That(t, len(found)+len(bad) == 0 && err == nil, "List before anything was made: %v, %v, %v", found, bad, err)
	for i := range 20 {
		create(t, d, sample(fmt.Sprint("c", i)))
	}
	other := sample("c1")
	other.Network = "other"
	create(t, d, other)
	writeFile(t, d.attachmentsPath()+"/cbr0/README", "what is this?")
	found, bad, err = d.List("cbr0")
	must.That(t, err == nil && len(found) == 20, "List finds %d of 20, %v", len(found), err)
	for i := 1; i < len(found); i++ {
		if found[i-1].Hash() >= found[i].Hash() {
			t.Errorf("%s stands before %s", found[i-1].Hash(), found[i].Hash())
		}
	}
	expect.That(t, len(bad) == 1 && bad[0].Hash == "" && bad[0].Network == "", "a file that is no record: %v", bad)
}

func TestListFailsWhereThereIsNoDirectory(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	writeFile(t, d.attachmentsPath(), "not a directory")
	_, _, err := d.List("cbr0")
	expect.That(t, errors.Is(err, syscall.ENOTDIR), "List: %v, want ENOTDIR", err)
	expect.Is(t, expect.Err(d.Networks()), syscall.ENOTDIR, "Networks")
	expect.Is(t, expect.Err(d.Create(sample("c1"))), syscall.ENOTDIR, "Create")
	expect.Is(t, d.Remove("cbr0", sample("c1").Hash()), syscall.ENOTDIR, "Remove")
}

func TestAFullFileSystemLeavesNoHalfARecord(t *testing.T) {
	t.Parallel()
	needRoot(t)
	dir := filepath.Join(t.TempDir(), "tombolo")
	start(t, &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}, "full", dir).finish()
}

func TestUpdateWritesOverAReadyRecord(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	a := sample("c1")
	p := pending(t, d, a)
	must.Succeed(t, p.Commit(a))
	a.Addresses[0].Prefix = netip.MustParsePrefix("10.1.0.77/24")
	must.Succeed(t, d.Update(a))
	got := must.Of(d.Load(a.Network, a.Hash())).Get(t)
	expect.NoDiff(t, diff(a, got))
}

func TestUpdateBringsNothingBackToLife(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	a := sample("c1")
	a.State = Ready
	expect.Is(t, d.Update(a), os.ErrNotExist, "update of what is not there")
	expect.Is(t, expect.Err(d.Load(a.Network, a.Hash())), os.ErrNotExist, "afterwards")
}
