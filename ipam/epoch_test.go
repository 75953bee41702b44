package ipam

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// The tests have a boot at this time, and reservations from before and after it.
var (
	boot      = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	beforeIt  = boot.Add(-time.Hour)
	afterIt   = boot.Add(time.Minute)
	thisEpoch = Epoch{Token: "boot-2", Started: boot}
)

const oldMarker = "boot-1"

// liveAddrs is a Live function.
func liveAddrs(live ...Live) func(context.Context) ([]Live, error) {
	return func(context.Context) ([]Live, error) { return live, nil }
}

func liveAt(addr string, o Owner) Live { return Live{Hash: hashOf(o), Addr: nstest.Addrs(addr)[0]} }

// marker is the content of the directory's marker file.
func (n *node) marker() string {
	n.t.Helper()
	data := must.Of(os.ReadFile(filepath.Join(n.dir(), markerName))).Get(n.t)
	return string(data)
}

func TestReservationsOfAnEarlierEpochAreDropped(t *testing.T) {
	t.Parallel()
	n := newNode(t, `[{"subnet":"10.1.0.0/24"}]`)
	n.epoch = thisEpoch
	n.live = liveAddrs(
		liveAt("10.1.0.12", Owner{"alive", "eth0"}),
		liveAt("10.1.0.13", Owner{"newcomer", "eth0"}),
		liveAt("10.1.0.14", Owner{"anyone", "eth0"}),
		liveAt("10.1.0.18", Owner{"byhash", "eth0"}),
		liveAt("10.1.0.21", Owner{"newcomer", "eth0"}),
	)
	n.put(markerName, oldMarker)
	n.put("10.1.0.10", "gone\r\neth0", beforeIt)
	n.put("10.1.0.11", "young\r\neth0", afterIt)
	n.put("10.1.0.12", "alive\r\neth0", beforeIt)
	n.put("10.1.0.13", "gone\r\neth0", beforeIt) // its address is now another's
	n.put("10.1.0.16", "", beforeIt)
	n.put("10.1.0.17", "who knows?", beforeIt)
	n.put("10.1.0.18", "tombolo:"+hashOf(Owner{"byhash", "eth0"})+"\r\neth0", beforeIt)
	n.put("10.1.0.19", "tombolo:abc\r\n", beforeIt)
	n.put("10.1.0.20", "at-the-very-start\r\neth0", boot)
	n.put("10.1.0.21", "tombolo:"+hashOf(Owner{"gone", "eth0"})+"\r\n", beforeIt) // its address is now another's
	n.put("10.9.0.1", "gone\r\neth0", beforeIt)                                   // outside of the ranges
	n.put("note", "x", beforeIt)
	n.put("last_reserved_ip.0", "10.1.0.9", beforeIt)
	expect.Equal(t, n.add("a"), "10.1.0.10")
	n.expect(map[string]string{
		"10.1.0.10": "a\r\neth0",
		"10.1.0.11": "young\r\neth0",
		"10.1.0.12": "alive\r\neth0",
		"10.1.0.13": "tombolo:" + hashOf(Owner{"newcomer", "eth0"}) + "\r\n",
		"10.1.0.14": "tombolo:" + hashOf(Owner{"anyone", "eth0"}) + "\r\n",
		"10.1.0.17": "who knows?",
		"10.1.0.18": "tombolo:" + hashOf(Owner{"byhash", "eth0"}) + "\r\neth0",
		"10.1.0.20": "at-the-very-start\r\neth0",
		"10.1.0.21": "tombolo:" + hashOf(Owner{"newcomer", "eth0"}) + "\r\n",
		"note":      "x", "last_reserved_ip.0": "10.1.0.10",
	})
	got, want := n.marker(), "boot-2"
	expect.That(t, got == want, "marker %s, want %s", got, want)
	expect.That(t, n.Warned("dropped 6 reservations from before 2026-01-02 03:04:05 UTC"), "no warning")
	// In the same epoch nothing is dropped again.
	n.put("10.1.0.30", "kept\r\neth0", beforeIt)
	n.add("b")
	expect.That(t, n.files()["10.1.0.30"] != "", "a reservation was dropped in its own epoch")
}

// Without a battery, a machine's clock may be behind after a boot: what was reserved before it
// seems to be of the future.
func TestReservationsOfTheFutureAreOfAnEarlierEpoch(t *testing.T) {
	t.Parallel()
	future := time.Now().Add(24 * time.Hour)
	n := newNode(t, small)
	n.epoch = thisEpoch
	n.live = liveAddrs(liveAt("10.1.0.3", Owner{"alive", "eth0"}))
	n.inUse = func(hash string) bool { return hash == hashOf(Owner{"adding", "eth0"}) }
	n.put(markerName, oldMarker)
	n.put("10.1.0.2", "gone\r\neth0", future)
	n.put("10.1.0.3", "alive\r\neth0", future)
	n.put("10.1.0.4", "adding\r\neth0", future)
	n.put("10.1.0.5", "young\r\neth0", time.Now().Add(time.Second))
	expect.Equal(t, n.add("a"), "10.1.0.2")
	for addr, owner := range map[string]string{"10.1.0.2": "a", "10.1.0.3": "alive", "10.1.0.4": "adding", "10.1.0.5": "young"} {
		got := n.files()[addr]
		expect.That(t, got == owner+"\r\neth0", "%s is reserved for %q, want %s", addr, got, owner)
	}
}

func TestWithoutAMarkerNothingIsDropped(t *testing.T) {
	t.Parallel()
	for name, marker := range map[string]string{"missing": "", "empty": ""} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t, small)
			n.epoch = thisEpoch
			n.live = liveAddrs(liveAt("10.1.0.4", Owner{"alive", "eth0"}))
			if name != "missing" {
				n.put(markerName, marker)
			}
			n.put("10.1.0.2", "reference-pod\r\neth0", beforeIt)
			expect.Equal(t, n.add("a"), "10.1.0.3")
			n.expect(map[string]string{
				"10.1.0.2": "reference-pod\r\neth0", "10.1.0.3": "a\r\neth0", "last_reserved_ip.0": "10.1.0.3",
				"10.1.0.4": "tombolo:" + hashOf(Owner{"alive", "eth0"}) + "\r\n",
			})
			expect.Equal(t, n.marker(), "boot-2", "marker")
		})
	}
}

func TestADirectoryDeletedWhilePodsRunIsRebuilt(t *testing.T) {
	t.Parallel()
	n := newNode(t, small+`,[{"subnet":"fd00::/64"}]`)
	n.epoch = thisEpoch
	n.add("a")
	n.add("b")
	must.Succeed(t, os.RemoveAll(n.dataDir))
	a, b := Owner{"a", "eth0"}, Owner{"b", "eth0"}
	calls := 0
	n.live = func(context.Context) ([]Live, error) {
		calls++
		return []Live{
			liveAt("10.1.0.2", a), liveAt("fd00::2", a), liveAt("10.1.0.3", b), liveAt("fd00::3", b), liveAt("10.1.0.1", a),
			liveAt("10.77.0.1", b), {Hash: "not a hash", Addr: nstest.Addrs("::ffff:10.1.0.5")[0]}, {},
		}, nil
	}
	expect.Equal(t, n.add("c"), "10.1.0.4,fd00::4", "an address in use was given again")
	n.expect(map[string]string{
		"10.1.0.2": "tombolo:" + hashOf(a) + "\r\n", "fd00::2": "tombolo:" + hashOf(a) + "\r\n",
		"10.1.0.3": "tombolo:" + hashOf(b) + "\r\n", "fd00::3": "tombolo:" + hashOf(b) + "\r\n",
		"10.1.0.4": "c\r\neth0", "fd00::4": "c\r\neth0", "10.1.0.5": "tombolo:0\r\n",
		"last_reserved_ip.0": "10.1.0.4", "last_reserved_ip.1": "fd00::4",
	})
	expect.That(t, n.Warned("reserved 5 addresses that are in use but had no reservation"), "no warning")
	n.del("a")
	expect.Success(t, n.allocator(n.request("b")).Del(context.Background(), nstest.Addrs("10.1.0.3", "fd00::3")))
	n.add("d")
	if _, ok := n.files()["fd00::2"]; ok || calls != 1 {
		t.Errorf("after the DELs: %v; Live was called %d times", n.files(), calls)
	}
}

func TestARebuiltReservationReplacesAnEmptyFile(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	n.epoch = thisEpoch
	n.live = liveAddrs(liveAt("10.1.0.2", Owner{"alive", "eth0"}))
	n.put("10.1.0.2", "")
	expect.Equal(t, n.add("a"), "10.1.0.3")
}

func TestWithoutKnowingWhatIsAliveNothingIsGiven(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	n.epoch = thisEpoch
	broken := errors.New("dump interrupted")
	n.live = func(context.Context) ([]Live, error) { return nil, broken }
	_, err := n.tryAdd(n.request("a"))
	wantError(t, err, broken, `network "lan": cannot tell which addresses are in use: dump interrupted`)
	n.expect(map[string]string{})
	expect.Is(t, expect.Err(os.Stat(filepath.Join(n.dir(), markerName))), os.ErrNotExist, "the epoch counts as entered")
}

func TestStatusDoesNotCountWhatIsAboutToBeDropped(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	n.put(markerName, oldMarker)
	for _, name := range []string{"10.1.0.2", "10.1.0.3", "10.1.0.4"} {
		n.put(name, "young\r\neth0", afterIt)
	}
	n.put("10.1.0.5", "gone\r\neth0", beforeIt)
	before := n.files()
	ready := map[string]Epoch{"a new epoch": thisEpoch, "a new epoch, of unknown start": {Token: "boot-2"}}
	for name, epoch := range ready {
		expect.Success(t, n.allocatorIn(epoch).Status(context.Background()), "%s", name)
	}
	full := map[string]Epoch{
		"no epochs": {}, "the same epoch": {Token: "boot-1", Started: boot}, "nothing is old": {Token: "boot-2", Started: beforeIt},
	}
	for _, epoch := range full {
		wantError(t, n.allocatorIn(epoch).Status(context.Background()), ErrPoolFull, "4 of 4")
	}
	n.expect(before)
	expect.Equal(t, n.marker(), oldMarker, "the marker after Status")
	n.put(markerName, "")
	wantError(t, n.allocatorIn(thisEpoch).Status(context.Background()), ErrPoolFull, "4 of 4")
}

func TestInAnEpochOfUnknownStartNothingIsDropped(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	n.epoch = Epoch{Token: "boot-2"}
	n.put(markerName, oldMarker)
	n.put("10.1.0.2", "perhaps-gone\r\neth0", beforeIt)
	expect.Equal(t, n.add("a"), "10.1.0.3")
	n.expect(map[string]string{"10.1.0.2": "perhaps-gone\r\neth0", "10.1.0.3": "a\r\neth0", "last_reserved_ip.0": "10.1.0.3"})
}

func TestWithoutATokenThereAreNoEpochs(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	n.live = func(context.Context) ([]Live, error) {
		t.Error("Live was called")
		return nil, nil
	}
	n.put(markerName, oldMarker)
	n.put("10.1.0.2", "old\r\neth0", beforeIt)
	expect.Equal(t, n.add("a"), "10.1.0.3")
	expect.Equal(t, n.marker(), oldMarker, "marker")
}

func TestWithoutHashesOldReservationsOfLiveAddressesStay(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	n.put(markerName, oldMarker)
	n.put("10.1.0.2", "someone\r\neth0", beforeIt)
	r := n.request("a")
	r.Epoch, r.Hash = thisEpoch, nil
	r.Live = liveAddrs(Live{Hash: "abc", Addr: nstest.Addrs("10.1.0.2")[0]})
	result, err := n.tryAdd(r)
	expect.That(t, err == nil && addressesOf(result) == "10.1.0.3", "got %v, %v", result, err)
}

func TestAMarkerThatCannotBeWrittenIsAWarning(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	n.epoch = thisEpoch
	must.Succeed(t, os.MkdirAll(filepath.Join(n.dir(), markerName+tempSuffix), 0o755))
	expect.Equal(t, n.add("a"), "10.1.0.2")
	expect.That(t, n.Warned("write epoch marker"), "no warning")
	n.del("a")
	must.Succeed(t, os.Remove(filepath.Join(n.dir(), markerName+tempSuffix)))
	// One that a crash left there is overwritten.
	n.put(markerName+tempSuffix, "longer than the marker itself, for it has to be cut, not only overwritten")
	n.add("b")
	got, want := n.marker(), "boot-2"
	expect.That(t, got == want, "marker %s, want %s", got, want)
}
