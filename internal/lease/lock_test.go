package lease

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func TestARecordIsWrittenAndRead(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	h := lock(t, d, r)
	must.Succeed(t, h.Create(r))
	first := r.Token
	expect.That(t, first != sample().Token, "no new token was drawn")
	r.Error = "changed"
	must.Succeed(t, h.Replace(r))
	got := must.Of(d.Load(r.Hash())).Get(t)
	r.Booted = got.Booted
	same(t, r, got)
	expect.That(t, got.Token == first, "token %s, want %s still", got.Token, first)
	st, err := os.Stat(d.recordPath(r.Hash()))
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("record: %v, %v", st.Mode(), err)
	}
	if st, err = os.Stat(d.Path()); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("directory: %v, %v", st.Mode(), err)
	}
}

func TestNothingRevivesARecordThatWasRemoved(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	h := lock(t, d, r)
	must.Succeed(t, h.Create(r))
	must.Succeed(t, h.Replace(r), "the record is there and cannot be replaced")
	must.Succeed(t, h.Remove())
	expect.Is(t, h.Replace(r), os.ErrNotExist, "Replace")
	expect.Is(t, expect.Err(d.Load(r.Hash())), os.ErrNotExist, "Load")
}

func TestNothingReplacesTheRecordOfALaterAdd(t *testing.T) {
	t.Parallel()
	d, old, next := open(t), sample(), sample()
	h := lock(t, d, old)
	for _, r := range []*Record{old, next} {
		must.Succeed(t, h.Create(r))
	}
	expect.Is(t, h.Replace(old), ErrSuperseded, "Replace")
	got, err := d.Load(next.Hash())
	expect.That(t, err == nil && got.Token == next.Token,
		"the record has token %s (%v), want %s", got.Token, err, next.Token)
}

func TestALockKeepsOthersOut(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	h := lock(t, d, r)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := d.Lock(ctx, r.Hash()); !errors.Is(err, file.ErrLocked) || !errors.Is(err, context.Canceled) {
		t.Errorf("Lock with a context that is done: %v", err)
	}
	must.Succeed(t, h.Close())
	expect.Success(t, h.Close(), "second Close")
	other, err := d.Lock(ctx, r.Hash())
	must.That(t, other != nil && err == nil, "Lock with a context that is done, after Close: %v, %v", other, err)
	other.Close()
	expect.Is(t, h.Create(r), os.ErrClosed, "Create without the lock")
}

func TestLockFilesGoWithTheirRecords(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	create(t, d, r)
	got, want := names(t, d), []string{r.Hash() + ".json", r.Hash() + ".lock"}
	expect.That(t, slices.Equal(got, want), "with a record: %v, want %v", got, want)
	h := lock(t, d, r)
	must.Succeed(t, h.Remove())
	expect.Success(t, h.Remove(), "second Remove")
	must.Succeed(t, h.Close())
	if got := names(t, d); len(got) > 0 {
		t.Errorf("without a record: %v", got)
	}
}

// The danger is a waiter that locks the file which the holder has just removed, while
// a third makes and locks another.
func TestNoTwoHoldALockWhoseFileComesAndGoes(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	var inside atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 300 {
				h, err := d.Lock(ended, r.Hash()) // without pauses, which would hide it
				if errors.Is(err, file.ErrLocked) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				n := inside.Add(1)
				expect.That(t, n == 1, "%d hold the lock", n)
				time.Sleep(10 * time.Microsecond)
				inside.Add(-1)
				if err := h.Close(); err != nil { // without a record, its file goes
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func TestAWaiterGetsTheLockWhenItIsFree(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	h := lock(t, d, r)
	got := make(chan error, 1)
	go func() {
		other, err := d.Lock(t.Context(), r.Hash())
		if err == nil {
			err = other.Close()
		}
		got <- err
	}()
	must.Succeed(t, h.Close())
	expect.Success(t, <-got)
}

func TestACrashWhileWritingLeavesTheRecordBefore(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	create(t, d, r)
	before := must.Of(d.Load(r.Hash())).Get(t)
	must.Succeed(t, os.WriteFile(d.tempPath(r.Hash()), []byte(`{"version":1,"sta`), 0o600))
	got, bad, err := d.List()
	must.That(t, err == nil && len(bad) == 0 && len(got) == 1, "List: %v, %v, %v", got, bad, err)
	same(t, before, got[0])
	again, err := d.Load(r.Hash())
	must.Succeed(t, err)
	same(t, before, again)
	h := lock(t, d, r)
	r.Error = "what the crash kept from being written"
	expect.Success(t, h.Replace(r), "Replace beside what a crash left")
	if again, err = d.Load(r.Hash()); err != nil || again.Error != r.Error {
		t.Errorf("after Replace the record has the error %q, %v", again.Error, err)
	}
	expect.That(t, !slices.Contains(names(t, d), filepath.Base(d.tempPath(r.Hash()))),
		"what the crash left is still there")
}

func TestDamagedRecordsAreListed(t *testing.T) {
	t.Parallel()
	d, good, bad := open(t), sample(), sample()
	bad.IfName = "eth1"
	create(t, d, good)
	create(t, d, bad)
	must.Succeed(t, os.WriteFile(d.recordPath(bad.Hash()), []byte("{"), 0o600))
	found, damaged, err := d.List()
	must.That(t, err == nil && len(found) == 1 && len(damaged) == 1 && damaged[0].Hash == bad.Hash(),
		"List: %v, %v, %v", found, damaged, err)
	expect.Of(d.Hashes()).Len(t, 2, "Hashes")
}

func TestADirectoryThatIsNotThereIsEmpty(t *testing.T) {
	t.Parallel()
	d := open(t)
	found, bad, err := d.List()
	expect.That(t, len(found)+len(bad) == 0 && err == nil, "List: %v, %v, %v", found, bad, err)
}

func TestAStickyLeaseIsRecalledByItsClient(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	create(t, d, r)
	address, id := r.Lease.Address, r.Client.ClientID
	must.Succeed(t, lock(t, d, r).Remember(t.Context(), r))
	_, err := d.Load(sample().Hash())
	expect.That(t, errors.Is(err, os.ErrNotExist), "the pod's record: %v, want it gone", err)
	got := must.Of(d.Load(ident.Hash("lan", id.String(), ""))).Get(t)
	expect.That(t, got.State == Sticky && got.Lease.Address == address && got.NetNS == "" && got.Applied.Empty(),
		"remembered %+v", got)
	next := func(change func(*Record)) *Record {
		r := sample()
		r.ContainerID, r.Client.Sticky, r.Boot = "next", true, "another"
		change(r)
		return r
	}
	recalled := func(what string, want bool, change func(*Record)) {
		t.Helper()
		l := d.Recall(next(change))
		expect.That(t, (l != nil) == want && (l == nil || l.Address == address), "%s: recalled %v", what, l)
	}
	recalled("the pod's next container", true, func(*Record) {})
	recalled("another network's", false, func(r *Record) { r.Network = "other" })
	recalled("another client", false, func(r *Record) { r.Client.ClientID = []byte("another") })
	recalled("one whose leases are not remembered", false, func(r *Record) { r.Client.Sticky = false })

	// What a power cut leaves is of an earlier boot.
	d = open(t)
	create(t, d, sample())
	recalled("after a boot", true, func(*Record) {})
	recalled("after a boot, the same container", true, func(r *Record) { r.ContainerID, r.Client.Sticky = sample().ContainerID, false })
	recalled("after a boot, another container", false, func(r *Record) { r.Client.Sticky = false })
	recalled("a pod that runs", false, func(r *Record) { r.Boot = sample().Boot })
}

func TestRecordsOfTheSameClientAreFound(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	create(t, d, r)
	for name, tt := range map[string]struct {
		change func(*Record)
		want   bool
	}{
		"another container":       {func(r *Record) {}, true},
		"another MAC address":     {func(r *Record) { r.Client.MAC = dhcpc.Hex{2, 0, 0, 0, 0, 77} }, true},
		"no lease yet":            {func(r *Record) { r.State, r.Lease = Adding, nil }, true},
		"another network":         {func(r *Record) { r.Network = "other" }, false},
		"another identifier":      {func(r *Record) { r.Client.ClientID = dhcpc.Hex{0, 'x'} }, false},
		"none":                    {func(r *Record) { r.Client.ClientID = nil }, false},
		"of a pod that is gone":   {func(r *Record) { r.State = Sticky }, false},
		"its identifier's prefix": {func(r *Record) { r.Client.ClientID = r.Client.ClientID[:3] }, false},
	} {
		other := sample()
		other.ContainerID = "another"
		tt.change(other)
		create(t, d, other)
		got, err := d.Same(r)
		expect.That(t, err == nil && len(got) <= 1 && (len(got) == 1) == tt.want,
			"%s: %v, %v; want %t", name, got, err, tt.want)
		h := lock(t, d, other)
		must.Succeed(t, errors.Join(h.Remove(), h.Close()))
	}
	byMAC, other := sample(), sample()
	byMAC.IfName, other.IfName = "eth1", "eth2"
	byMAC.Client.ClientID, other.Client.ClientID = nil, nil
	create(t, d, byMAC)
	create(t, d, other)
	got, err := d.Same(byMAC)
	expect.That(t, len(got) == 1 && got[0].IfName == "eth2" && err == nil, "by MAC address: %v, %v", got, err)
}

func TestTimesOfARecordSurvive(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	now := time.Now()
	r.Lease.Obtained, r.Lease.Renew, r.Lease.Rebind, r.Lease.Expire = now, now.Add(time.Second), now.Add(2*time.Second), now.Add(3*time.Second)
	create(t, d, r)
	got := must.Of(d.Load(r.Hash())).Get(t)
	// Not to the nanosecond, since two clocks are read one after the other.
	expect.That(t, got.Expires().Sub(r.Expires()).Abs() <= time.Second/2 && got.Lease.Renew.Sub(r.Lease.Renew).Abs() <= time.Second/2,
		"%v; want them as they were", got.Lease)
	if got := (&Record{}).Expires(); !got.IsZero() {
		t.Errorf("no lease expires at %v", got)
	}
}
