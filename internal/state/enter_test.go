package state

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

const otherBoot = "00000000-1111-2222-3333-444444444444"

// furnish enters and leaves two attachments, a network, a damaged record and a
// temporary file behind.
func furnish(t *testing.T, d *Dir) Epoch {
	t.Helper()
	epoch := enter(t, d)
	for _, container := range []string{"c1", "c2"} {
		a := sample(container)
		create(t, d, a)
	}
	n := sampleNetwork("cbr0")
	n.Epoch = epoch.Token()
	must.Succeed(t, d.SaveNetwork(n))
	writeFile(t, d.attachmentsPath()+"/cbr0/"+ident.Hash("cbr0", "c3", "eth0")+suffix, "{")
	return epoch
}

// contents tells what records there are: containers, then networks, then damage.
func contents(t *testing.T, d *Dir) string {
	t.Helper()
	var all []string
	networks := must.Of(d.Networks()).Get(t)
	damaged := 0
	for _, name := range networks {
		found, bad, err := d.List(name)
		must.Succeed(t, err)
		for _, a := range found {
			all = append(all, a.ContainerID)
		}
		damaged += len(bad)
	}
	slices.Sort(all)
	records, _, err := d.ListNetworks()
	must.Succeed(t, err)
	for _, n := range records {
		all = append(all, n.Name)
	}
	return strings.Join(all, " ") + strings.Repeat(" damaged", damaged)
}

const furnished = "c1 c2 cbr0 damaged"

func TestRecordsOfAnEarlierEpochAreDropped(t *testing.T) {
	t.Parallel()
	d, n := newDirOn(t)
	furnish(t, d)
	got := contents(t, d)
	must.That(t, got == furnished, "before: %s", got)
	n.setBoot(otherBoot)
	enter(t, d)
	expect.Equal(t, contents(t, d), "", "left")
}

func TestRecordsOfThisEpochAreKept(t *testing.T) {
	t.Parallel()
	d, _ := newDirOn(t)
	furnish(t, d)
	enter(t, d)
	expect.Equal(t, contents(t, d), furnished, "left")
}

// An operator has removed the epoch's file: the pods run on.
func TestALostEpochDropsNothing(t *testing.T) {
	t.Parallel()
	d, _ := newDirOn(t)
	first := furnish(t, d)
	must.Succeed(t, os.Remove(d.epochPath()))
	epoch := enter(t, d)
	expect.That(t, epoch.Token() != first.Token(), "the lost epoch is back")
	expect.Equal(t, contents(t, d), furnished, "left")
}

func TestEnterWithoutTheLockFails(t *testing.T) {
	t.Parallel()
	d, _ := newDirOn(t)
	held := lock(t, again(d), Exclusive)
	_, _, err := d.Enter(canceled())
	expect.That(t, errors.Is(err, ErrLocked) && errors.Is(err, context.Canceled), "got %v, want ErrLocked", err)
	must.Succeed(t, held.Close())
	enter(t, d)
}

func TestEnterFailsWhereNothingCanBeWritten(t *testing.T) {
	t.Parallel()
	d, _ := newDirOn(t)
	writeFile(t, filepath.Dir(d.Path()), "a file where a directory has to be")
	l, _, err := d.Enter(t.Context())
	expect.That(t, err != nil && l == nil, "Enter = %v, %v", l, err)
	d, _ = newDirOn(t)
	must.Succeed(t, os.MkdirAll(d.epochPath()+"/x", 0o700))
	if l, _, err := d.Enter(t.Context()); err == nil || l != nil {
		t.Errorf("Enter with a directory for an epoch = %v, %v", l, err)
	}
}

func TestOf64FirstProcessesOneBegins(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "run", "tombolo")
	var processes []*process
	for range 64 {
		processes = append(processes, start(t, nil, "enter", dir))
	}
	for _, p := range processes {
		p.expect("ready")
	}
	for _, p := range processes {
		p.proceed()
	}
	tokens := make(map[string]int)
	for _, p := range processes {
		tokens[p.line()]++
		p.finish()
	}
	expect.Equal(t, len(tokens), 1, "they saw the epochs %v, want one", tokens)
}
