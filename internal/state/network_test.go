package state

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestNetworkIsSavedLoadedAndRemoved(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	expect.Is(t, expect.Err(d.LoadNetwork("cbr0")), os.ErrNotExist, "before it is saved")
	n := sampleNetwork("cbr0")
	for _, hash := range []string{"first", "second"} {
		n.ConfigHash = hash
		must.Succeed(t, d.SaveNetwork(n))
		got := must.Of(d.LoadNetwork("cbr0")).Get(t)
		expect.NoDiff(t, diff(n, got))
	}
	for range 2 {
		expect.Success(t, d.RemoveNetwork("cbr0"))
	}
	expect.Is(t, expect.Err(d.LoadNetwork("cbr0")), os.ErrNotExist, "after it is removed")
}

func TestRemoveNetworkRefusesWhileThereAreAttachments(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	must.Succeed(t, d.SaveNetwork(sampleNetwork("cbr0")))
	a := sample("c1")
	create(t, d, a)
	expect.Is(t, d.RemoveNetwork("cbr0"), ErrInUse, "with an attachment")
	expect.Success(t, expect.Err(d.LoadNetwork("cbr0")), "the refusal has cost the record")
	must.Succeed(t, d.Remove("cbr0", a.Hash()))
	expect.Success(t, d.RemoveNetwork("cbr0"), "without")
	expect.Of(d.Networks()).Len(t, 0, "Networks")
	create(t, d, a) // its directory comes back by itself
}

func TestRemoveNetworkFailsWhereItsDirectoryIsNone(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	writeFile(t, d.attachmentsPath()+"/cbr0", "not a directory")
	expect.Is(t, d.RemoveNetwork("cbr0"), syscall.ENOTDIR)
	must.Succeed(t, os.MkdirAll(d.networksPath()+"/cbr1"+suffix+"/x", 0o700))
	expect.Is(t, d.RemoveNetwork("cbr1"), syscall.EISDIR, "with a directory for a record")
}

func TestNetworksAreThoseWithARecordOrADirectory(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	expect.Of(d.Networks()).Len(t, 0, "before anything was made")
	for _, name := range []string{"zeta", "alpha"} {
		must.Succeed(t, d.SaveNetwork(sampleNetwork(name)))
	}
	create(t, d, sample("c1")) // of cbr0, without a record
	writeFile(t, d.networksPath()+"/.swp", "")
	writeFile(t, d.networksPath()+"/README", "")
	writeFile(t, d.attachmentsPath()+"/a-file", "")
	names, err := d.Networks()
	want := []string{"alpha", "cbr0", "zeta"}
	expect.That(t, err == nil && slices.Equal(names, want), "Networks = %v, %v, want %v", names, err, want)
	found, bad, err := d.ListNetworks()
	expect.That(t, err == nil && len(found) == 2 && found[0].Name == "alpha" && found[1].Name == "zeta",
		"ListNetworks = %v, %v", found, err)
	expect.That(t, len(bad) == 2 && bad[0].Network == "", "ListNetworks says of files that are no records: %v", bad)
}

func TestNetworkLoadersTolerateRubbish(t *testing.T) {
	t.Parallel()
	for what, test := range rubbish(t) {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			d := newDir(t)
			must.Succeed(t, d.SaveNetwork(sampleNetwork("good")))
			path := filepath.Join(d.networksPath(), "bad"+suffix)
			must.Succeed(t, test.put(path))
			_, err := d.LoadNetwork("bad")
			var re *RecordError
			expect.That(t, errors.As(err, &re) && errors.Is(err, test.is) && re.Path == path && re.Network == "bad",
				"LoadNetwork: %v, want a RecordError that is %v", err, test.is)
			found, bad, err := d.ListNetworks()
			expect.That(t, err == nil && len(found) == 1 && found[0].Name == "good",
				"ListNetworks = %v, %v, want the good one", found, err)
			expect.That(t, len(bad) == 1 && bad[0].Path == path && errors.Is(bad[0], test.is),
				"ListNetworks says of the bad one: %v", bad)
		})
	}
}

func TestLoadNetworkRefusesARecordUnderAnothersName(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	must.Succeed(t, d.SaveNetwork(sampleNetwork("cbr0")))
	writeFile(t, d.networksPath()+"/cbr1.json", mustRead(t, d.networksPath()+"/cbr0.json"))
	_, err := d.LoadNetwork("cbr1")
	expect.That(t, errors.Is(err, ErrDamaged) && strings.Contains(err.Error(), "network cbr0"), "got %v, want ErrDamaged", err)
}

func TestSaveNetworkRefusesWhatWouldNotBeReadBack(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	tests := map[string]*Network{
		"gateway that is none": {Name: "n", Gateways: []netip.Prefix{{}}},
		"subnet of 40 bits":    {Name: "n", Subnets: []netip.Prefix{netip.PrefixFrom(netip.MustParseAddr("10.0.0.0"), 40)}},
		"too large":            {Name: "n", AdminChain: strings.Repeat("x", file.MaxRecord)},
	}
	for what, n := range tests {
		expect.Failure(t, d.SaveNetwork(n), "%s: saved", what)
	}
	expect.Is(t, expect.Err(os.Lstat(d.Path())), os.ErrNotExist, "a refusal has made %s", d.Path())
}

func TestAFailedSaveLeavesTheOldRecordAndNoTemporaryFile(t *testing.T) {
	t.Parallel()
	d := newDir(t)
	// rename(2) does not put a file in the place of a directory.
	must.Succeed(t, os.MkdirAll(d.networksPath()+"/cbr0.json/x", 0o700))
	must.That(t, d.SaveNetwork(sampleNetwork("cbr0")) != nil,
		"the fault did not fire: SaveNetwork replaced a directory")
	left := temporaryFiles(t, d)
	expect.That(t, len(left) == 0, "left behind: %v", left)
}

func temporaryFiles(t testing.TB, d *Dir) []string {
	t.Helper()
	return must.Of(filepath.Glob(d.Path() + "/" + ".tmp-*")).Get(t)
}
