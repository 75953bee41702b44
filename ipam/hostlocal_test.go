package ipam

import (
	"context"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestAddressesAreGivenInTurn(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	expect.Equal(t, n.add("a")+" "+n.add("b"), "10.1.0.2 10.1.0.3")
	n.expect(map[string]string{"10.1.0.2": "a\r\neth0", "10.1.0.3": "b\r\neth0", "last_reserved_ip.0": "10.1.0.3"})
	n.del("a")
	expect.Equal(t, n.add("c")+" "+n.add("d")+" "+n.add("e"), "10.1.0.4 10.1.0.5 10.1.0.2",
		"a released address must rest until the others were given")
	n.expect(map[string]string{
		"10.1.0.2": "e\r\neth0", "10.1.0.3": "b\r\neth0", "10.1.0.4": "c\r\neth0", "10.1.0.5": "d\r\neth0",
		"last_reserved_ip.0": "10.1.0.2",
	})
	if len(n.All()) > 0 {
		t.Errorf("warnings: %q", n.All())
	}
}

func TestATakenAddressIsNotGivenToAnother(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	r := n.request("a")
	r.want = nstest.Addrs("10.1.0.4")
	must.Succeed(t, expect.Err(n.tryAdd(r)))
	r = n.request("b")
	r.want = nstest.Addrs("10.1.0.4")
	_, err := n.tryAdd(r)
	wantError(t, err, ErrAddressTaken, `network "lan": the requested address 10.1.0.4 is taken by container a`)
	n.put("10.1.0.5", "tombolo:abc\r\n")
	r.want = nstest.Addrs("10.1.0.5")
	wantError(t, expect.Err(n.tryAdd(r)), ErrAddressTaken, `taken by the attachment with hash abc`)
	n.put("10.1.0.3", "not an owner")
	r.want = nstest.Addrs("10.1.0.3")
	wantError(t, expect.Err(n.tryAdd(r)), ErrAddressTaken, `taken by the file `+n.dir()+"/10.1.0.3")
}

func TestTheSameAttachmentAskingAgainIsNoticedWhereItsAddressIsACandidate(t *testing.T) {
	t.Parallel()
	n := newNode(t, `[{"subnet":"10.1.0.0/29","rangeStart":"10.1.0.2","rangeEnd":"10.1.0.2"}]`)
	n.add("a")
	_, err := n.tryAdd(n.request("a"))
	wantError(t, err, ErrDuplicate, `interface eth0 of container a already has 10.1.0.2: DEL it first`)
	n.put("10.1.0.2", "tombolo:"+hashOf(Owner{"a", "eth0"})+"\r\n")
	wantError(t, expect.Err(n.tryAdd(n.request("a"))), ErrDuplicate, "already has 10.1.0.2")
	if got := len(n.files()); got != 2 {
		t.Errorf("a refused ADD changed the directory: %v", n.files())
	}
}

func TestAFullPoolSaysHowFull(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		sets, want string
		size       int
	}{
		"fewer than are probed": {small, `network "lan": range 10.1.0.1-10.1.0.5 of 10.1.0.0/29 is full: 4 of 4 addresses reserved`, 4},
		"a whole subnet":        {`[{"subnet":"10.1.0.0/24"}]`, `network "lan": range 10.1.0.0/24 is full: 253 of 253 addresses reserved`, 253},
		"two ranges": {
			`[{"subnet":"10.1.0.0/28"},{"subnet":"10.2.0.0/29"}]`,
			`network "lan": range set 10.1.0.0/28, 10.2.0.0/29 is full: 18 of 18 addresses reserved`, 18,
		},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t, tt.sets)
			given := map[string]bool{}
			for i := range tt.size {
				given[n.add(fmt.Sprintf("pod%d", i))] = true
			}
			expect.That(t, len(given) == tt.size, "%d different addresses of %d", len(given), tt.size)
			wantError(t, expect.Err(n.tryAdd(n.request("late"))), ErrPoolFull, tt.want)
			wantError(t, n.allocator(n.request("")).Status(context.Background()), ErrPoolFull, tt.want)
			n.del("pod1")
			expect.Success(t, n.allocator(n.request("")).Status(context.Background()), "Status with a free address")
			n.add("late")
		})
	}
}

func TestAFailureInALaterSetReleasesTheEarlierOnes(t *testing.T) {
	t.Parallel()
	n := newNode(t, `[{"subnet":"10.1.0.0/24"}],[{"subnet":"10.2.0.0/30"}]`)
	got := n.add("a")
	must.That(t, got == "10.1.0.2,10.2.0.2", "%v", got)
	wantError(t, expect.Err(n.tryAdd(n.request("b"))), ErrPoolFull, "10.2.0.0/30 is full: 1 of 1")
	n.expect(map[string]string{
		"10.1.0.2": "a\r\neth0", "10.2.0.2": "a\r\neth0", "last_reserved_ip.0": "10.1.0.3", "last_reserved_ip.1": "10.2.0.2",
	})
}

// The file of kept addresses is an operator's to edit, and bounded.
func TestKeptAddressesAreBoundedAndMayBeAnything(t *testing.T) {
	t.Parallel()
	n := newNode(t, `[{"subnet":"10.1.0.0/16"}]`)
	add := func(name string) string {
		r := n.request(strings.ReplaceAll(name, "/", "-"))
		h := must.Of(NewHostLocal(&r.Config)).Get(t).Keep(name)
		return must.Of(h.Bind(r.Node).Add(context.Background(), r.Owner)).Get(t).Addresses[0].Prefix.Addr().String()
	}
	for _, name := range []string{"", " ", "a b", "a\nb", " a", strings.Repeat("x", 401)} {
		h := must.Of(NewHostLocal(&n.request("a").Config)).Get(t).Keep(name)
		wantError(t, expect.Err(h.Add(context.Background(), Owner{"a", "eth0"})), tombolo.ErrInvalid, "the pod needs a name")
	}
	for _, text := range []string{"", "\n", "10.1.0.2", "10.1.0.2 ", "x y z\n", "\x00\xff", "10.1.0.1 a/b eth0\n", "fe80::1%eth0 a/b eth0\n", "10.9.0.1 a/b eth0\n", strings.Repeat("x", 2<<20)} {
		n.put(keptName, text)
		expect.That(t, strings.HasPrefix(add("a/b"), "10.1.0."), "%.20q", text)
		n.del("a-b")
	}

	// The pod that lives longest stays known, although its line is the first.
	var lines strings.Builder
	lines.WriteString("10.1.7.7 a/db eth0\n")
	for i := range maxKept - 1 {
		fmt.Fprintf(&lines, "10.1.%d.%d a/job-%d eth0\n", 100+i/250, i%250, i)
	}
	n.put(keptName, lines.String())
	expect.Equal(t, add("a/db"), "10.1.7.7")
	add("a/another")
	n.del("a-db")
	expect.Equal(t, add("a/db"), "10.1.7.7", "after the list was full")
	got := strings.Count(string(must.Of(os.ReadFile(n.dir()+"/"+keptName)).Get(t)), "\n")
	expect.Equal(t, got, maxKept, "lines")
	expect.Equal(t, add("a/job-0") == "10.1.100.0", false, "the oldest was not forgotten")
}

func TestNamesThatCouldNotBeReadAgainAreRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	for _, owner := range []Owner{{"", "eth0"}, {"a/b", "eth0"}, {"a", ""}, {"a", "eth 0"}} {
		r := n.request(owner.ContainerID)
		r.IfName = owner.IfName
		wantError(t, expect.Err(n.tryAdd(r)), tombolo.ErrInvalid, "not valid names of an attachment")
	}
	for _, network := range []string{"", ".", "..", "a/b", "../x"} {
		r := n.request("a")
		r.Network = network
		wantError(t, expect.Err(r.open()), tombolo.ErrInvalid, "cannot be the name of a directory")
	}
}

func TestDelByHintTakesOnlyItsOwn(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	n.put("10.1.0.2", "a\r\neth0")
	n.put("10.1.0.3", "b\r\neth0")
	n.put("10.1.0.4", "a\r\nnet1")
	n.put("10.1.0.5", "tombolo:"+hashOf(Owner{"a", "eth0"})+"\r\n")
	n.put("10.1.0.7", "tombolo:abc\r\n")
	n.put("10.1.0.8", "a\r\neth0")
	a := n.allocator(n.request("a"))
	hint := nstest.Addrs("10.1.0.2", "10.1.0.3", "10.1.0.4", "10.1.0.5", "10.1.0.6", "10.1.0.7", "10.1.0.99")
	for range 2 {
		must.Succeed(t, a.Del(context.Background(), hint))
	}
	n.expect(map[string]string{
		"10.1.0.3": "b\r\neth0", "10.1.0.4": "a\r\nnet1", "10.1.0.7": "tombolo:abc\r\n", "10.1.0.8": "a\r\neth0",
	})
}

func TestDelWithoutHintSearches(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	n.put("10.1.0.2", "a\r\neth0")
	n.put("10.9.9.9", "a\r\neth0") // outside of today's ranges
	n.put("10.1.0.3", "b\r\neth0")
	n.put("fd00::1", "tombolo:"+hashOf(Owner{"a", "eth0"})+"\r\n")
	n.put("note", "a\r\neth0")
	n.del("a")
	left := map[string]string{"10.1.0.3": "b\r\neth0", "note": "a\r\neth0"}
	n.expect(left)
	n.del("a")
	n.expect(left)
}

func TestWithoutADirectoryThereIsNothingToDo(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	a := n.allocator(n.request("a"))
	ctx := context.Background()
	for name, err := range map[string]error{
		"Del":           a.Del(ctx, nil),
		"Del by hint":   a.Del(ctx, nstest.Addrs("10.1.0.2")),
		"GC":            a.Collect(ctx, nil),
		"Status":        a.Status(ctx),
		"Status, epoch": n.allocatorIn(Epoch{Token: "x"}).Status(ctx),
	} {
		expect.Success(t, err, "%s", name)
	}
	expect.Is(t, expect.Err(os.Stat(n.dir())), os.ErrNotExist, "the directory was made")
	wantError(t, a.Check(ctx, nil), ErrNotReserved, "has no address of range")
}

func (n *node) allocatorIn(epoch Epoch) asker {
	n.t.Helper()
	r := n.request("")
	r.Epoch = epoch
	return n.allocator(r)
}

func TestGCReleasesWhatNoValidOwnerClaims(t *testing.T) {
	t.Parallel()
	fill := func(n *node) {
		n.add("a")
		n.put("10.1.0.10", "b\r\neth0")
		n.put("10.1.0.11", "b\r\nnet1")
		n.put("10.1.0.14", "tombolo:"+hashOf(Owner{"b", "eth0"})+"\r\n")
		n.put("10.1.0.15", "tombolo:abc\r\neth0")
		n.put("10.1.0.16", "")
		n.put("10.1.0.17", "who knows?")
		n.put("fd00::7", "d\r\neth0")
		n.put("note", "c")
	}
	always := map[string]string{"last_reserved_ip.0": "10.1.0.2", "note": "c", "10.1.0.17": "who knows?"}
	for name, tt := range map[string]struct {
		valid []Owner
		stays []string
	}{
		"some":            {[]Owner{{"a", "eth0"}, {"b", "eth0"}}, []string{"10.1.0.2", "10.1.0.10", "10.1.0.14"}},
		"other interface": {[]Owner{{"b", "net1"}}, []string{"10.1.0.11"}},
		"none":            {nil, nil},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t, `[{"subnet":"10.1.0.0/24"}]`)
			fill(n)
			before := n.files()
			must.Succeed(t, n.allocator(n.request("")).Collect(context.Background(), tt.valid))
			want := map[string]string{}
			for name, content := range always {
				want[name] = content
			}
			for _, name := range tt.stays {
				want[name] = before[name]
			}
			n.expect(want)
			expect.That(t, n.Warned("10.1.0.17 holds no reservation: left alone"), "the foreign file is not reported")
		})
	}
}

func TestGCOfOneNetworkLeavesTheOthersAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	r := n.request("a")
	r.Network = "other"
	must.Succeed(t, expect.Err(n.tryAdd(r)))
	n.add("a")
	must.Succeed(t, n.allocator(n.request("")).Collect(context.Background(), nil))
	expect.Success(t, expect.Err(os.Stat(filepath.Join(n.dataDir, "other", "10.1.0.2"))))
}

func TestCheckFindsWhatIsNotReserved(t *testing.T) {
	t.Parallel()
	n := newNode(t, small+`,[{"subnet":"fd00::/64"}]`)
	given := must.Of(n.tryAdd(n.request("a"))).Get(t)
	result := given.Addresses
	without := func(prefix string) []Address {
		return slices.DeleteFunc(slices.Clone(result), func(a Address) bool {
			return strings.HasPrefix(a.String(), prefix)
		})
	}
	a := n.allocator(n.request("a"))
	ctx := context.Background()
	for name, held := range map[string][]Address{
		"as given": result, "without the IPv6 address": without("fd00"), "empty": {}, "nil": nil, "with nothing": {{}},
	} {
		expect.Success(t, a.Check(ctx, held), "%s", name)
	}
	n.put("fd00::2", "b\r\neth0")
	wantError(t, a.Check(ctx, result), ErrNotReserved,
		`fd00::2 is not reserved for interface "eth0" of container "a" (file `+n.dir()+`/fd00::2)`)
	wantError(t, a.Check(ctx, without("fd00")), ErrNotReserved, `container "a" has no address of range fd00::/64`)
	n.put("fd00::2", "tombolo:"+hashOf(Owner{"a", "eth0"})+"\r\n")
	expect.Success(t, a.Check(ctx, result), "rebuilt from the kernel")
	must.Succeed(t, os.Remove(filepath.Join(n.dir(), "10.1.0.2")))
	wantError(t, a.Check(ctx, result), ErrNotReserved, "10.1.0.2 is not reserved")
	wantError(t, a.Check(ctx, result), fs.ErrNotExist, "10.1.0.2 is not reserved")
}

func TestStatusNeedsAPlaceToWrite(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	n.add("a")
	expect.Success(t, n.allocator(n.request("")).Status(context.Background()), "Status")
	file := filepath.Join(t.TempDir(), "file")
	must.Succeed(t, os.WriteFile(file, nil, 0o600))
	n.dataDir = file
	wantError(t, n.allocator(n.request("")).Status(context.Background()), unix.ENOTDIR, "not a directory")
}

func TestStatusFailsForAPoolWithoutAddresses(t *testing.T) {
	t.Parallel()
	n := newNode(t, `[{"subnet":"10.1.0.0/24","rangeEnd":"10.1.0.1"}]`)
	n.put("10.1.0.9", "a\r\neth0")
	wantError(t, n.allocator(n.request("")).Status(context.Background()), ErrPoolFull, "is full: 0 of 0")
}

func TestManyAtOnceGetDifferentAddresses(t *testing.T) {
	t.Parallel()
	n := newNode(t, `[{"subnet":"10.1.0.0/24"}],[{"subnet":"fd00::/64"}]`)
	n.epoch = Epoch{Token: "now"}
	const pods = 64
	var wg sync.WaitGroup
	var mu sync.Mutex
	given := map[string]string{}
	for i := range pods {
		id := fmt.Sprintf("pod%d", i)
		a := n.allocator(n.request(id))
		wg.Go(func() {
			result, err := a.Add(context.Background())
			if err != nil {
				t.Errorf("%s: %v", id, err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			given[addressesOf(result)] = id
		})
	}
	wg.Wait()
	if len(given) != pods || len(n.files()) != 2*pods+2 {
		t.Errorf("%d different addresses, %d files", len(given), len(n.files()))
	}
	for i := range pods {
		a := n.allocator(n.request(fmt.Sprintf("pod%d", i)))
		wg.Go(func() { expect.Success(t, a.Del(context.Background(), nil)) })
	}
	wg.Wait()
	got := n.files()
	expect.That(t, len(got) == 2, "left: %v", got)
}

// An ADD that is under way is on no runtime's list.
func TestGCLeavesWhatIsOnRecord(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	n.add("a")
	n.put("10.1.0.10", "b\r\neth0")
	n.put("10.1.0.11", "tombolo:"+hashOf(Owner{"c", "eth0"})+"\r\n")
	n.put("10.1.0.12", "b\r\nnet1")
	r := n.request("")
	r.InUse = func(hash string) bool {
		return hash == hashOf(Owner{"b", "eth0"}) || hash == hashOf(Owner{"c", "eth0"})
	}
	must.Succeed(t, n.allocator(r).Collect(t.Context(), nil))
	for address, want := range map[string]bool{"10.1.0.2": false, "10.1.0.10": true, "10.1.0.11": true, "10.1.0.12": false} {
		_, err := os.Stat(filepath.Join(n.dataDir, n.request("").Network, address))
		expect.Equal(t, err == nil, want, "%s is reserved: %v, want %t", address, err, want)
	}
}

func TestPoolsTellHowFarRangesAreUsedUp(t *testing.T) {
	t.Parallel()
	n := newNode(t, `[{"subnet": "10.1.0.0/29"}, {"subnet": "10.2.0.0/24", "rangeStart": "10.2.0.9", "rangeEnd": "10.2.0.10"}], [{"subnet": "fd01::/64"}]`)
	h := must.Of(NewHostLocal(&Config{Network: "lan", Dir: n.dataDir, Ranges: rangesOf(t, n.sets)})).Get(t)
	want := []Pool{
		{Name: "10.1.0.0/29, 10.2.0.9-10.2.0.10 of 10.2.0.0/24", Size: 5 + 2},
		{Name: "fd01::/64", IPv6: true, Size: math.MaxUint64 - 1},
	}
	for count := range uint64(3) {
		want[0].Reserved, want[1].Reserved = count, count
		got, err := h.Pools(t.Context())
		diff := cmp.Diff(want, got)
		expect.That(t, diff == "" && err == nil, "with %d pods: %v, pools (-want +got):\n%s", count, err, diff)
		n.add(fmt.Sprintf("c%d", count))
	}
	again := must.Of(NewHostLocal(&Config{Network: "lan", Dir: n.dataDir, Ranges: h.RangeSets()})).Get(t)
	if diff := cmp.Diff(h.pool, again.pool, cmp.Comparer(func(a, b RangeSet) bool { return slices.Equal(a.Ranges, b.Ranges) })); diff != "" {
		t.Errorf("ranges made again (-want +got):\n%s", diff)
	}
	expect.That(t, RangeSetsOf(h.Bind(Node{}))[1].Ranges[0].Subnet == nstest.Prefix("fd01::/64") && RangeSetsOf(nil) == nil,
		"an Allocator's ranges are others")
}
