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
)

func TestARecordIsWrittenAndRead(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	h := lock(t, d, r)
	if err := h.Create(r); err != nil {
		t.Fatal(err)
	}
	first := r.Token
	if first == sample().Token {
		t.Error("no new token was drawn")
	}
	r.Error = "changed"
	if err := h.Replace(r); err != nil {
		t.Fatal(err)
	}
	if r.Updated.Equal(sample().Updated) {
		t.Error("Updated is as it was")
	}
	got, err := d.Load(r.Hash())
	if err != nil {
		t.Fatal(err)
	}
	r.Booted = got.Booted
	same(t, r, got)
	if got.Token != first {
		t.Errorf("token %s, want %s still", got.Token, first)
	}
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
	if err := h.Create(r); err != nil {
		t.Fatal(err)
	}
	if err := h.Replace(r); err != nil {
		t.Fatalf("the record is there and cannot be replaced: %v", err)
	}
	if err := h.Remove(); err != nil {
		t.Fatal(err)
	}
	if err := h.Replace(r); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Replace: %v, want %v", err, os.ErrNotExist)
	}
	if _, err := d.Load(r.Hash()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Load: %v, want %v", err, os.ErrNotExist)
	}
}

func TestNothingReplacesTheRecordOfALaterAdd(t *testing.T) {
	t.Parallel()
	d, old, next := open(t), sample(), sample()
	h := lock(t, d, old)
	for _, r := range []*Record{old, next} {
		if err := h.Create(r); err != nil {
			t.Fatal(err)
		}
	}
	if err := h.Replace(old); !errors.Is(err, ErrSuperseded) {
		t.Errorf("Replace: %v, want %v", err, ErrSuperseded)
	}
	got, err := d.Load(next.Hash())
	if err != nil || got.Token != next.Token {
		t.Errorf("the record has token %s (%v), want %s", got.Token, err, next.Token)
	}
}

func TestALockKeepsOthersOut(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	h := lock(t, d, r)
	if other, err := d.TryLock(r.Hash()); other != nil || err != nil {
		t.Fatalf("TryLock while it is held: %v, %v", other, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := d.Lock(ctx, r.Hash()); !errors.Is(err, file.ErrLocked) || !errors.Is(err, context.Canceled) {
		t.Errorf("Lock with a context that is done: %v", err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if err := h.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
	other, err := d.TryLock(r.Hash())
	if other == nil || err != nil {
		t.Fatalf("TryLock after Close: %v, %v", other, err)
	}
	other.Close()
	if err := h.Create(r); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Create without the lock: %v, want %v", err, os.ErrClosed)
	}
}

func TestLockFilesGoWithTheirRecords(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	create(t, d, r)
	if got, want := names(t, d), []string{r.Hash() + ".json", r.Hash() + ".lock"}; !slices.Equal(got, want) {
		t.Errorf("with a record: %v, want %v", got, want)
	}
	h := lock(t, d, r)
	if err := h.Remove(); err != nil {
		t.Fatal(err)
	}
	if err := h.Remove(); err != nil {
		t.Errorf("second Remove: %v", err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if got := names(t, d); len(got) > 0 {
		t.Errorf("without a record: %v", got)
	}
}

// The danger is a waiter that locks the file which the holder has just removed, while
// a third makes and locks another.
func TestNoTwoHoldALockWhoseFileComesAndGoes(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	var inside atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 300 {
				h, err := d.TryLock(r.Hash()) // without the pauses of Lock, which would hide it
				if err != nil {
					t.Error(err)
					return
				}
				if h == nil {
					continue
				}
				if n := inside.Add(1); n != 1 {
					t.Errorf("%d hold the lock", n)
				}
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
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Error(err)
	}
}

func TestACrashWhileWritingLeavesTheRecordBefore(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	create(t, d, r)
	before, err := d.Load(r.Hash())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.tempPath(r.Hash()), []byte(`{"version":1,"sta`), 0o600); err != nil {
		t.Fatal(err)
	}
	got, bad, err := d.List()
	if err != nil || len(bad) > 0 || len(got) != 1 {
		t.Fatalf("List: %v, %v, %v", got, bad, err)
	}
	same(t, before, got[0])
	again, err := d.Load(r.Hash())
	if err != nil {
		t.Fatal(err)
	}
	same(t, before, again)
	h := lock(t, d, r)
	r.Error = "what the crash kept from being written"
	if err := h.Replace(r); err != nil {
		t.Errorf("Replace beside what a crash left: %v", err)
	}
	if again, err = d.Load(r.Hash()); err != nil || again.Error != r.Error {
		t.Errorf("after Replace the record has the error %q, %v", again.Error, err)
	}
	if slices.Contains(names(t, d), filepath.Base(d.tempPath(r.Hash()))) {
		t.Error("what the crash left is still there")
	}
}

func TestDamagedRecordsAreListed(t *testing.T) {
	t.Parallel()
	d, good, bad := open(t), sample(), sample()
	bad.IfName = "eth1"
	create(t, d, good)
	create(t, d, bad)
	if err := os.WriteFile(d.recordPath(bad.Hash()), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	found, damaged, err := d.List()
	if err != nil || len(found) != 1 || len(damaged) != 1 || damaged[0].Hash != bad.Hash() {
		t.Fatalf("List: %v, %v, %v", found, damaged, err)
	}
	if hashes, err := d.Hashes(); err != nil || len(hashes) != 2 {
		t.Errorf("Hashes: %v, %v", hashes, err)
	}
}

func TestADirectoryThatIsNotThereIsEmpty(t *testing.T) {
	t.Parallel()
	d := open(t)
	found, bad, err := d.List()
	if len(found)+len(bad) > 0 || err != nil {
		t.Errorf("List: %v, %v, %v", found, bad, err)
	}
}

func TestAStickyLeaseIsRecalledByItsClient(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	create(t, d, r)
	address, id := r.Lease.Address, r.Client.ClientID
	if err := lock(t, d, r).Remember(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Load(sample().Hash()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the pod's record: %v, want it gone", err)
	}
	got, err := d.Recall("lan", id)
	if err != nil || got == nil {
		t.Fatalf("Recall: %v, %v", got, err)
	}
	if got.State != Sticky || got.Lease.Address != address || got.NetNS != "" || !got.Applied.Empty() {
		t.Errorf("recalled %+v", got)
	}
	for _, tt := range []struct {
		network string
		id      []byte
	}{{"other", id}, {"lan", []byte("another")}} {
		if got, err := d.Recall(tt.network, tt.id); got != nil || err != nil {
			t.Errorf("Recall(%s, %q): %v, %v; want nothing", tt.network, tt.id, got, err)
		}
	}
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
		if err != nil || len(got) > 1 || (len(got) == 1) != tt.want {
			t.Errorf("%s: %v, %v; want %t", name, got, err, tt.want)
		}
		h := lock(t, d, other)
		if err := errors.Join(h.Remove(), h.Close()); err != nil {
			t.Fatal(err)
		}
	}
	byMAC, other := sample(), sample()
	byMAC.IfName, other.IfName = "eth1", "eth2"
	byMAC.Client.ClientID, other.Client.ClientID = nil, nil
	create(t, d, byMAC)
	create(t, d, other)
	if got, err := d.Same(byMAC); len(got) != 1 || got[0].IfName != "eth2" || err != nil {
		t.Errorf("by MAC address: %v, %v", got, err)
	}
}

func TestTimesOfARecordSurvive(t *testing.T) {
	t.Parallel()
	d, r := open(t), sample()
	now := time.Now()
	r.Lease.Obtained, r.Lease.Renew, r.Lease.Rebind, r.Lease.Expire = now, now.Add(time.Second), now.Add(2*time.Second), now.Add(3*time.Second)
	create(t, d, r)
	got, err := d.Load(r.Hash())
	if err != nil {
		t.Fatal(err)
	}
	// Not to the nanosecond, since two clocks are read one after the other.
	if got.Expires().Sub(r.Expires()).Abs() > time.Second/2 || got.Lease.Renew.Sub(r.Lease.Renew).Abs() > time.Second/2 {
		t.Errorf("%v; want them as they were", got.Lease)
	}
	if got := (&Record{}).Expires(); !got.IsZero() {
		t.Errorf("no lease expires at %v", got)
	}
}
