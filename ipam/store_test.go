package ipam

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// holdLock takes the lock of the node's directory as another process would, and returns what releases it.
func (n *node) holdLock() (release func()) {
	n.t.Helper()
	must.Succeed(n.t, os.MkdirAll(n.dir(), 0o755))
	file := must.Of(os.OpenFile(filepath.Join(n.dir(), lockName), os.O_CREATE|os.O_RDONLY, 0o600)).Get(n.t)
	n.t.Cleanup(func() { file.Close() })
	// This waits, so a test that calls it after a wait that was given up would hang if the lock had leaked.
	must.Succeed(n.t, unix.Flock(int(file.Fd()), unix.LOCK_EX))
	return func() { file.Close() }
}

func TestALockThatIsNotHadInTimeIsTryAgainLater(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	release := n.holdLock()
	r := n.request("a")
	r.LockWait = time.Millisecond
	a := n.allocator(r)
	_, err := a.Add(context.Background())
	text := fmt.Sprintf(`network "lan": reservations: lock %s/lock: locked by another process: waited`, n.dir())
	wantError(t, err, ErrLocked, text)
	wantError(t, a.Del(context.Background(), nil), ErrLocked, text)
	wantError(t, a.Collect(context.Background(), nil), ErrLocked, text)
	expect.Success(t, a.Status(context.Background()), "Status waits for the lock")
	n.expect(map[string]string{})
	release()
	n.holdLock()()
	expect.Equal(t, n.add("a"), "10.1.0.2", "after the lock was free")
}

func TestTheWaitForTheLockEndsWithTheContext(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	release := n.holdLock()
	a := n.allocator(n.request("a"))
	for _, end := range []struct {
		name string
		ctx  func() (context.Context, context.CancelFunc)
		want error
	}{
		{"deadline", func() (context.Context, context.CancelFunc) {
			return context.WithTimeout(context.Background(), time.Millisecond)
		}, context.DeadlineExceeded},
		{"cancelled before", func() (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			return ctx, cancel
		}, context.Canceled},
	} {
		ctx, cancel := end.ctx()
		_, err := a.Add(ctx)
		cancel()
		wantError(t, err, ErrLocked, end.want.Error())
		expect.That(t, errors.Is(err, end.want), "%s: %v does not match the context's error", end.name, err)
	}
	release()
	n.holdLock()()
}

// awaitWaiter returns once somebody waits for the flock of the file with this inode, as /proc/locks tells.
func awaitWaiter(t *testing.T, inode uint64) {
	t.Helper()
	for {
		locks := must.Of(os.ReadFile("/proc/locks")).Get(t)
		for line := range strings.Lines(string(locks)) {
			if strings.Contains(line, "-> FLOCK") && strings.Contains(line, fmt.Sprintf(":%d ", inode)) {
				return
			}
		}
		runtime.Gosched()
	}
}

func TestAWaiterGetsTheLockWhenItIsFree(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	time.AfterFunc(10*time.Millisecond, n.holdLock())
	expect.Equal(t, n.add("a"), "10.1.0.2")
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	var stat unix.Stat_t
	must.Succeed(t, unix.Stat(path, &stat))
	return stat.Ino
}

func TestALockFileThatCannotBeOpenedIsAnIOError(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	n.put("x", "")
	must.Succeed(t, os.Mkdir(filepath.Join(n.dir(), lockName), 0o755))
	_, err := n.tryAdd(n.request("a"))
	wantIOError(t, err, unix.EISDIR, `network "lan": lock the reservations`)
}

// TestAddNeverReadsTheDirectory takes away the right to read the directory, also root's: only files in it can be opened.
func TestAddNeverReadsTheDirectory(t *testing.T) {
	t.Parallel()
	n := newNode(t, `[{"subnet":"10.1.0.0/16"}],[{"subnet":"fd00::/64"}]`)
	n.epoch = Epoch{Token: "now"}
	for i := range 1000 {
		n.put(fmt.Sprintf("10.1.100.%d", i%250), "other\r\neth0")
	}
	n.add("first")
	must.Succeed(t, os.Chmod(n.dir(), 0o300))
	t.Cleanup(func() { _ = os.Chmod(n.dir(), 0o700) })
	onThread(t, func() {
		if err := dropFileCapabilities(); err != nil {
			t.Errorf("drop capabilities: %v", err)
			return
		}
		if _, err := os.ReadDir(n.dir()); !errors.Is(err, os.ErrPermission) {
			t.Errorf("the directory can be read (%v): this test would prove nothing", err)
			return
		}
		// Two taken candidates in a row do not make it read the directory either.
		for _, name := range []string{"10.1.0.3", "10.1.0.4"} {
			expect.Success(t, os.WriteFile(filepath.Join(n.dir(), name), []byte("x\r\neth0"), 0o600))
		}
		result, err := n.tryAdd(n.request("a"))
		if err != nil {
			t.Error(err)
			return
		}
		expect.Equal(t, addressesOf(result), "10.1.0.5,fd00::3")
		expect.Success(t, n.allocator(n.request("a")).Check(context.Background(), result.Addresses), "Check")
		expect.Success(t, n.allocator(n.request("a")).Del(context.Background(), resultAddrs(result)), "Del by hint")
		// Past the candidates that are probed the directory is needed, and its absence is an error, not a full pool.
		for i := range maxProbes {
			expect.Success(t, os.WriteFile(filepath.Join(n.dir(), fmt.Sprintf("10.1.0.%d", 6+i)), []byte("x\r\neth0"), 0o600))
		}
		_, err = n.tryAdd(n.request("b"))
		wantIOError(t, err, os.ErrPermission, "list the reservations")
	})
}

func TestManyTakenCandidatesInARowAreSkippedAtOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t, `[{"subnet":"10.1.0.0/16"}]`)
	for i := 2; i < 250; i++ {
		n.put(fmt.Sprintf("10.1.0.%d", i), "other\r\neth0")
	}
	n.put("10.1.0.251", "other\r\neth0")
	expect.Equal(t, n.add("a")+" "+n.add("b"), "10.1.0.250 10.1.0.252")
}

func TestWhatADeadCreatorLeftIsReclaimed(t *testing.T) {
	t.Parallel()
	for name, content := range map[string]string{"empty": "", "zero bytes": "\x00\x00\x00"} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t, small)
			n.put("10.1.0.2", content)
			expect.Equal(t, n.add("a"), "10.1.0.2")
			expect.That(t, n.Warned(`network "lan": reclaimed 10.1.0.2`), "no warning")
			n.expect(map[string]string{"10.1.0.2": "a\r\neth0", "last_reserved_ip.0": "10.1.0.2"})
		})
	}
}

func TestAFullPoolIsSearchedForEmptyFiles(t *testing.T) {
	t.Parallel()
	n := newNode(t, `[{"subnet":"10.1.0.0/24"}]`)
	for i := 2; i < 255; i++ {
		n.put(fmt.Sprintf("10.1.0.%d", i), "other\r\neth0")
	}
	n.put("10.1.0.99", "")
	expect.Success(t, n.allocator(n.request("")).Status(context.Background()), "Status")
	expect.Equal(t, n.add("a"), "10.1.0.99")
	expect.Is(t, expect.Err(n.tryAdd(n.request("b"))), ErrPoolFull)
}

func TestForeignFilesAreToleratedAndKept(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	n.put("note", "x")
	for _, name := range []string{"b", "c", "d", "e", "f", "::ffff:10.1.0.2", "FD00::1", "fe80::1%eth0", "10.1.0.02"} {
		n.put(name, "a\r\neth0")
	}
	n.put("10.1.0.2", "who knows?")
	must.Succeed(t, os.MkdirAll(filepath.Join(n.dir(), "10.1.0.3", "sub"), 0o755))
	must.Succeed(t, os.Symlink("nowhere", filepath.Join(n.dir(), "10.1.0.4")))
	must.Succeed(t, syscall.Mkfifo(filepath.Join(n.dir(), "10.1.0.99"), 0o600))
	must.Succeed(t, os.Mkdir(filepath.Join(n.dir(), "last_reserved_ip.0"), 0o755))
	expect.Equal(t, n.add("a"), "10.1.0.5")
	warnings := strings.Join(n.All(), "\n")
	for _, want := range []string{
		"10.1.0.2 is not given to anyone", "10.1.0.3 is not given to anyone",
		"10.1.0.4 is not given to anyone",
	} {
		expect.Contains(t, warnings, want, "no warning that")
	}
	ctx := context.Background()
	expect.Success(t, n.allocator(n.request("a")).Del(ctx, nstest.Addrs("10.1.0.2", "10.1.0.3", "10.1.0.4", "10.1.0.5", "10.1.0.99")))
	expect.Success(t, n.allocator(n.request("")).Collect(ctx, nil))
	for _, name := range []string{"note", "b", "fe80::1%eth0", "10.1.0.2", "10.1.0.3/sub", "10.1.0.4", "10.1.0.99", "last_reserved_ip.0"} {
		expect.Success(t, expect.Err(os.Lstat(filepath.Join(n.dir(), name))), "deleted")
	}
}

func TestRubbishInLastReservedStartsAtTheBeginning(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	n.put("last_reserved_ip.0", strings.Repeat("rubbish", 20))
	expect.Equal(t, n.add("a"), "10.1.0.2")
	n.expect(map[string]string{"10.1.0.2": "a\r\neth0", "last_reserved_ip.0": "10.1.0.2"})
}

// TestAFullDiskLeavesNothingBehind fills a small file system, so that a file can be made in it but not written.
func TestAFullDiskLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	must.Succeed(t, os.MkdirAll(n.dir(), 0o755))
	skip := ""
	onThread(t, func() {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			skip = "needs CAP_SYS_ADMIN for a mount namespace of its own: " + err.Error()
			return
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			t.Error(err)
			return
		}
		if err := unix.Mount("tmpfs", n.dir(), "tmpfs", 0, "size=8k"); err != nil {
			t.Error(err)
			return
		}
		if err := os.WriteFile(filepath.Join(n.dir(), "ballast"), make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("the disk is not full (%v): this test would prove nothing", err)
			return
		}
		_, err := n.tryAdd(n.request("a"))
		wantIOError(t, err, unix.ENOSPC, `network "lan": reserve 10.1.0.2: write `+n.dir()+"/10.1.0.2")
		expect.Is(t, expect.Err(os.Lstat(filepath.Join(n.dir(), "10.1.0.2"))), os.ErrNotExist, "what could not be written is still there")
		// With room for the reservation only, the file that spreads the addresses is dispensable.
		expect.Success(t, os.Truncate(filepath.Join(n.dir(), "ballast"), 4096))
		result, err := n.tryAdd(n.request("a"))
		expect.That(t, err == nil && addressesOf(result) == "10.1.0.2", "got %v, %v", result, err)
	})
	if skip != "" {
		t.Skip(skip)
	}
}

func TestADirectoryThatCannotBeMadeIsAnIOError(t *testing.T) {
	t.Parallel()
	n := newNode(t, small)
	n.dataDir = filepath.Join(n.dataDir, "file")
	must.Succeed(t, os.WriteFile(n.dataDir, nil, 0o600))
	_, err := n.tryAdd(n.request("a"))
	wantIOError(t, err, unix.ENOTDIR, n.dataDir)
}
