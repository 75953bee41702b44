package state

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

const sampleUplink = `{"version":1,"nic":"eth0","bridge":"br0","state":"taken"}`

func saveUplink(t testing.TB, d *Dir, nic, record string) {
	t.Helper()
	must.Succeed(t, d.Uplink(nic).Save([]byte(record)))
}

func uplinkPath(d *Dir, nic string) string { return d.uplinksPath() + "/" + nic + suffix }

func TestAnUplinksRecordIsKeptWhole(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	f := d.Uplink("eth0")
	expect.Is(t, expect.Err(f.Load()), fs.ErrNotExist, "Load of none")
	expect.Success(t, f.Remove(), "Remove of none")
	for _, record := range []string{sampleUplink, "{\n  \"pretty\": true\n}\n", sampleUplink} {
		must.Succeed(t, f.Save([]byte(record)))
		got, err := again(d).Uplink("eth0").Load()
		expect.That(t, err == nil && string(got) == record, "Load = %q, %v; want %q", got, err, record)
	}
	if st, err := os.Stat(uplinkPath(d, "eth0")); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v, %v", st.Mode(), err)
	}
	for range 2 {
		must.Succeed(t, f.Remove())
	}
	expect.Of(d.Uplinks()).Len(t, 0, "after Remove")
}

func TestUplinksAreListedByTheirNICs(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	expect.Of(d.Uplinks()).Len(t, 0, "of a directory that is not there")
	for _, nic := range []string{"eth1", "eth0", "a.json", "eth0.lock", ".tmp-x"} {
		saveUplink(t, d, nic, sampleUplink)
	}
	for _, other := range []string{"eth9.json.tmp", "eth9.json.damaged", ".json", "..json", "eth9", "a name.json", "sixteen-bytes-ok.json"} {
		writeFile(t, d.uplinksPath()+"/"+other, sampleUplink)
	}
	nics, err := d.Uplinks()
	want := []string{".tmp-x", "a.json", "eth0", "eth0.lock", "eth1"}
	expect.That(t, err == nil && slices.Equal(nics, want), "Uplinks = %q, %v; want %q", nics, err, want)
}

// tryLock does not wait: both results are nil where another holds the lock.
func tryLock(d *Dir) (*Lock, error) {
	l, err := d.Lock(canceled(), Exclusive)
	if errors.Is(err, ErrLocked) {
		return nil, nil
	}
	return l, err
}

func TestNamesThatNoNICHasAreRefused(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	for _, nic := range []string{"", ".", "..", "../x", "a/b", "eth0:1", "eth%d", "a b", "a\n", "\x00", "sixteen-bytes-ok"} {
		f := d.Uplink(nic)
		_, loadErr := f.Load()
		for what, err := range map[string]error{
			"Save": f.Save([]byte("{}")), "Load": loadErr, "Remove": f.Remove(),
		} {
			expect.Is(t, err, ErrName, "%s of %q", what, nic)
		}
	}
	expect.Is(t, expect.Err(os.Stat(d.Path())), fs.ErrNotExist, "something was made")
	saveUplink(t, d, "fifteen-bytes-x", sampleUplink)
}

func TestAnUplinksDamagedRecordIsNamed(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	saveUplink(t, d, "eth0", sampleUplink)
	path := uplinkPath(d, "eth0")
	whole := mustRead(t, path)
	check := func(what, content string, want error) {
		t.Helper()
		writeFile(t, path, content)
		_, err := d.Uplink("eth0").Load()
		var damaged *RecordError
		expect.That(t, errors.Is(err, want) && errors.As(err, &damaged) && damaged.NIC == "eth0" && damaged.Path == path &&
			strings.Contains(err.Error(), path),
			"%s: %v", what, err)
	}
	for i := range len(whole) {
		check(fmt.Sprintf("%d of %d bytes", i, len(whole)), whole[:i], ErrDamaged)
	}
	check("rubbish after it", whole+"}", ErrDamaged)
	check("rubbish", "\x00\xff\n\x00", ErrDamaged)
	check("too large", whole+strings.Repeat(" ", maxUplink), ErrDamaged)
	check("of a newer version", strings.Replace(whole, `"version":1`, `"version":7`, 1), ErrVersion)
	must.Succeed(t, os.Remove(path))
	must.Succeed(t, os.Mkdir(path, 0o700))
	expect.Is(t, expect.Err(d.Uplink("eth0").Load()), unix.EISDIR, "a directory in its place")
}

func TestAnUplinksRecordThatCannotBeReadBackIsNotWritten(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	saveUplink(t, d, "eth0", sampleUplink)
	for what, record := range map[string]string{
		"nothing": "", "half": sampleUplink[:20], "two": "{}\n{}", "too much": `"` + strings.Repeat("x", maxUplink) + `"`,
	} {
		expect.Failure(t, d.Uplink("eth0").Save([]byte(record)), "Save of %s", what)
	}
	got, err := d.Uplink("eth0").Load()
	expect.That(t, err == nil && string(got) == sampleUplink, "what was there: %q, %v", got, err)
	// As much as fits is read back.
	large := `"` + strings.Repeat("x", maxUplink-1024) + `"`
	saveUplink(t, d, "eth0", large)
	got, err = d.Uplink("eth0").Load()
	expect.That(t, err == nil && string(got) == large, "a large one: %d bytes, %v", len(got), err)
}

func TestALeftoverTemporaryFileOfAnUplinkIsHarmless(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	writeFile(t, d.tempPath(uplinkPath(d, "eth0")), strings.Repeat("longer than what comes next ", 100))
	saveUplink(t, d, "eth0", sampleUplink)
	got, err := d.Uplink("eth0").Load()
	expect.That(t, err == nil && string(got) == sampleUplink, "Load = %q, %v", got, err)
	left := temporaryFiles(t, d)
	expect.That(t, len(left) == 0, "left: %v", left)
}

func TestAnUplinkOfAnEarlierEpochIsNotPutBack(t *testing.T) {
	t.Parallel()
	d, n := newDirOn(t)
	enter(t, d)
	for _, nic := range []string{"eth0", "eth1"} {
		saveUplink(t, d, nic, sampleUplink)
	}
	must.Succeed(t, expect.Err(d.Uplink("eth0").Load()))
	n.setBoot(otherBoot)
	_, err := d.Uplink("eth0").Load()
	expect.That(t, errors.Is(err, ErrStale) && strings.Contains(err.Error(), uplinkPath(d, "eth0")), "after a boot: %v", err)
	enter(t, d)
	expect.Is(t, expect.Err(d.Uplink("eth0").Load()), ErrStale, "after Enter")
	saveUplink(t, again(d), "eth1", sampleUplink)
	expect.Success(t, expect.Err(d.Uplink("eth1").Load()), "of the new epoch")
	// The container of a nested node restarts: the same boot, another pid 1.
	n.cookie, n.uptime = 2, n.uptime+2e9
	n.setInit(n.uptime - 1e9)
	expect.Is(t, expect.Err(d.Uplink("eth1").Load()), ErrStale, "after a restart of the node's container")
}

func TestAnUplinkOfThisEpochOutlivesALostEpoch(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	enter(t, d)
	saveUplink(t, d, "eth0", sampleUplink)
	must.Succeed(t, os.Remove(d.epochPath()))
	enter(t, d)
	expect.Success(t, expect.Err(d.Uplink("eth0").Load()))
}

func TestSaveFailsWithoutAnEpoch(t *testing.T) {
	t.Parallel()
	d, n := newDirOn(t)
	must.Succeed(t, os.Remove(n.dir+"/boot_id"))
	err := d.Uplink("eth0").Save([]byte("{}"))
	expect.That(t, errors.Is(err, fs.ErrNotExist) && strings.Contains(err.Error(), "/proc"), "Save: %v", err)
}

// A child has copies of all descriptors between fork and exec.
func TestALockIsFreeAtOnceThoughChildrenAreStarted(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	ctx, cancel := context.WithCancel(t.Context())
	var children sync.WaitGroup
	for range 4 {
		children.Go(func() {
			for range 50 {
				expect.Success(t, exec.Command("/bin/true").Run())
			}
		})
	}
	go func() { children.Wait(); cancel() }()
	for ctx.Err() == nil {
		l, err := tryLock(d)
		if l == nil || err != nil {
			t.Errorf("tryLock of what is free = %v, %v", l, err)
			break
		}
		must.Succeed(t, l.Close())
	}
	children.Wait()
}

// A process that is killed anywhere in Save leaves the record of before or after, and
// the lock free.
func TestAKilledProcessLeavesAWholeUplink(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	kills := 20
	if testing.Short() {
		kills = 3
	}
	for kill := range kills {
		p := start(t, nil, "uplink", d.Path(), "eth0")
		for range 1 + kill*7%30 {
			p.line()
		}
		p.kill()
		l, err := tryLock(d)
		must.That(t, l != nil && err == nil, "kill %d: tryLock = %v, %v", kill, l, err)
		// The helper lives on this node, not on the made-up one.
		data := must.Of(os.ReadFile(uplinkPath(d, "eth0"))).Get(t)
		_, _, err = splitUplink(data)
		expect.That(t, err == nil, "kill %d: %v", kill, err)
		must.Succeed(t, l.Close())
	}
}

func FuzzLoadUplink(f *testing.F) {
	d := newDir(f)
	path := uplinkPath(d, "eth0")
	f.Fuzz(func(t *testing.T, data []byte) {
		writeFile(t, path, string(data))
		record, err := d.Uplink("eth0").Load()
		var damaged *RecordError
		switch {
		case err == nil:
			expect.Success(t, d.Uplink("eth0").Save(record), "what was loaded cannot be saved")
			again, err := d.Uplink("eth0").Load()
			expect.That(t, err == nil && string(again) == string(record), "saved %q, loaded %q, %v", record, again, err)
		case !errors.As(err, &damaged) && !errors.Is(err, ErrStale):
			t.Errorf("Load of %q: %v", data, err)
		}
	})
}
