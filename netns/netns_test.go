package netns_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// here is the namespace of the calling thread, by the kernel's own word.
func here(tb testing.TB) string {
	tb.Helper()
	return must.Of(os.Readlink("/proc/thread-self/ns/net")).Get(tb)
}

// The tests that count threads and files come first and are not parallel.

func TestNoThreadStaysBehindInAnotherNamespace(t *testing.T) {
	home := here(t)
	a, b := nstest.New(t), nstest.New(t)
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			ns := a
			if i%2 == 1 {
				ns = b
			}
			for j := range 10 {
				expect.Success(t, ns.Do(func() error {
					if got := here(t); got != ns.ID().String() {
						return fmt.Errorf("ran in %s, want %s", got, ns.ID())
					}
					if j == 7 {
						runtime.Gosched() // and come back to the same thread
					}
					if got := here(t); got != ns.ID().String() {
						return fmt.Errorf("went on in %s, want %s", got, ns.ID())
					}
					return nil
				}))
			}
		})
	}
	wg.Wait()
	tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
	must.That(t, err == nil && len(tasks) > 0, "no threads: %v", err)
	for _, task := range tasks {
		// A thread may end between the listing and this.
		got, err := os.Readlink(task)
		expect.That(t, err != nil || got == home, "%s is %s, want %s", task, got, home)
	}
}

func TestNothingIsLeftOfNamespacesThatWereClosed(t *testing.T) {
	nstest.RequireRoot(t)
	filesBefore := nstest.FDs()
	threads := func() int {
		list := must.Of(os.ReadDir("/proc/self/task")).Get(t)
		return len(list)
	}
	threadsBefore := threads()
	const n = 100
	for range n {
		ns := must.Of(netns.New()).Get(t)
		expect.Success(t, ns.Do(func() error { return nil }))
		expect.Success(t, expect.Err(ns.Cookie()))
		expect.Success(t, ns.Close())
	}
	after := nstest.FDs()
	expect.That(t, len(after) <= len(filesBefore), "files before %v, after %v", filesBefore, after)
	// A thread ends a moment after its goroutine. The runtime may have started some
	// of its own meanwhile, but not one for each namespace.
	must.Until(t, fmt.Sprintf("%d threads before, hardly more after", threadsBefore), func() bool { return threads() <= threadsBefore+n/4 })
}

func TestOpenTakesNetworkNamespacesOnly(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	empty := filepath.Join(dir, "empty")
	must.Succeed(t, os.WriteFile(empty, nil, 0o600))
	fifo := filepath.Join(dir, "fifo")
	must.Succeed(t, unix.Mkfifo(fifo, 0o600))
	for _, tt := range []struct {
		name, path string
		want       error
	}{
		{"nothing", filepath.Join(dir, "none"), fs.ErrNotExist},
		{"no path", "", fs.ErrNotExist},
		{"below a file", filepath.Join(empty, "x"), unix.ENOTDIR},
		{"the empty file that a removed namespace leaves", empty, netns.ErrNotNetNS},
		{"a directory", dir, netns.ErrNotNetNS},
		{"a FIFO that nobody writes to", fifo, netns.ErrNotNetNS},
		{"a device", "/dev/null", netns.ErrNotNetNS},
		{"another kind of namespace", "/proc/self/ns/mnt", netns.ErrNotNetNS},
		{"a file of proc", "/proc/self/status", netns.ErrNotNetNS},
		{"a network namespace", "/proc/self/ns/net", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ns, err := netns.Open(tt.path)
			must.That(t, errors.Is(err, tt.want), "Open: %v, want %v", err, tt.want)
			if err == nil {
				expect.Equal(t, ns.String(), tt.path, "named %q, want %q", ns, tt.path)
				ns.Close()
				return
			}
			var opErr *tombolo.OpError
			expect.That(t, errors.As(err, &opErr) && opErr.Object == tt.path,
				"%v is not an OpError about %q", err, tt.path)
		})
	}
}

func TestHandleOutlivesItsPath(t *testing.T) {
	t.Parallel()
	made := nstest.New(t)
	path := nstest.Path(t, made)
	ns := must.Of(netns.Open(path)).Get(t)
	defer ns.Close()
	must.Succeed(t, unix.Unmount(path, unix.MNT_DETACH))
	must.Succeed(t, os.Remove(path))
	expect.Is(t, expect.Err(netns.Open(path)), fs.ErrNotExist, "Open of the removed path")
	expect.Success(t, ns.Do(func() error {
		if got := here(t); got != made.ID().String() {
			t.Errorf("ran in %s, want %s", got, made.ID())
		}
		return nil
	}))
}

func TestNewNamespaceHasLoopbackOnly(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	var names []string
	err := ns.Do(func() error {
		links, err := net.Interfaces()
		for _, l := range links {
			names = append(names, l.Name)
			expect.Equal(t, l.Flags&net.FlagUp, 0, "%s is up", l.Name)
		}
		return err
	})
	expect.That(t, err == nil && len(names) == 1 && names[0] == "lo", "links %q, %v, want lo alone", names, err)
}

// TestNamespaceEndsWithItsHandle sees the namespace end by what the kernel says of
// a veth end whose other end was in it.
func TestNamespaceEndsWithItsHandle(t *testing.T) {
	t.Parallel()
	home := nstest.New(t)
	other := must.Of(netns.New()).Get(t)
	nstest.Veth(t, home, "eth0", other, "eth0")
	watch := must.Of(nl.Subscribe(unix.NETLINK_ROUTE, home, unix.RTNLGRP_LINK)).Get(t)
	defer watch.Close()
	must.Succeed(t, other.Close())
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		if _, err := nstest.Try(home, "ip", "link", "show", "eth0"); err != nil {
			return
		}
		must.Succeed(t, expect.Err(watch.Next(ctx)), "the link is still there")
	}
}

func TestClosedHandleIsOfNoUse(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	must.Succeed(t, ns.Close())
	expect.Is(t, ns.Do(func() error { t.Error("fn was called"); return nil }), unix.EBADF, "Do")
	expect.Is(t, expect.Err(ns.Cookie()), unix.EBADF, "Cookie")
	expect.Is(t, ns.Close(), unix.EBADF, "Close")
}

func TestDoReturnsWhereItCameFrom(t *testing.T) {
	t.Parallel()
	a, b := nstest.New(t), nstest.New(t)
	// On one thread throughout, so that its namespace means something.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	home := here(t)
	inA, inB, backInA := "", "", ""
	must.Succeed(t, a.Do(func() error {
		inA = here(t)
		err := b.Do(func() error { inB = here(t); return nil })
		backInA = here(t)
		return err
	}))
	if inA != a.ID().String() || inB != b.ID().String() || backInA != inA {
		t.Errorf("ran in %s, %s and %s again, want %s, %s and the first", inA, inB, backInA, a.ID(), b.ID())
	}
	expect.Equal(t, here(t), home, "back in")
}

func TestDoGivesTheFunctionsError(t *testing.T) {
	t.Parallel()
	want := errors.New("mine")
	expect.Equal(t, nstest.New(t).Do(func() error { return want }), want, "Do")
}

func TestPanicGoesOnInTheCaller(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	func() {
		defer func() {
			expect.Equal(t, recover(), "help", "recovered")
		}()
		ns.Do(func() error { panic("help") })
	}()
	expect.Success(t, ns.Do(func() error { return nil }), "the next Do")
}

func TestGoexitGoesOnInTheCaller(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	ended := make(chan bool)
	go func() {
		returned := false
		defer func() { ended <- returned }()
		ns.Do(func() error { runtime.Goexit(); return nil })
		returned = true
	}()
	expect.That(t, !<-ended, "Do returned")
}

func TestSocketKeepsItsNamespace(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	nstest.Run(t, ns, "ip", "link", "set", "lo", "up")
	var conn net.PacketConn
	must.Succeed(t, ns.Do(func() error {
		var err error
		conn, err = net.ListenPacket("udp", "127.0.0.1:0")
		return err
	}))
	defer conn.Close()
	// Nobody in the test's own namespace hears at that port.
	must.Succeed(t, expect.Err(conn.WriteTo([]byte("hello"), conn.LocalAddr())))
	buf := make([]byte, 16)
	n, _, err := conn.ReadFrom(buf)
	if err != nil || !bytes.Equal(buf[:n], []byte("hello")) {
		t.Errorf("read %q, %v", buf[:n], err)
	}
}

func TestIdentity(t *testing.T) {
	t.Parallel()
	a, b := nstest.New(t), nstest.New(t)
	again := must.Of(netns.Open(nstest.Path(t, a))).Get(t)
	defer again.Close()
	if a.ID() != again.ID() || a.ID() == b.ID() {
		t.Errorf("ids %v, %v again, and %v of another", a.ID(), again.ID(), b.ID())
	}
	expect.Equal(t, strings.TrimSpace(nstest.Run(t, a, "readlink", "/proc/self/ns/net")), a.ID().String(), "id %s, and the kernel says", a.ID())
	cookies := map[uint64]bool{}
	for _, ns := range []*netns.NS{a, b} {
		cookie, err := ns.Cookie()
		expect.That(t, err == nil && cookie != 0, "cookie %d, %v", cookie, err)
		cookies[cookie] = true
	}
	expect.Equal(t, len(cookies), 2, "two namespaces have the cookies %v", cookies)
	first := must.Of(a.Cookie()).Get(t)
	second, err := again.Cookie()
	expect.That(t, err == nil && second == first, "cookie %d by one handle, %d by another (%v)", first, second, err)
}

func TestHandleIsNamedInErrors(t *testing.T) {
	t.Parallel()
	made := nstest.New(t)
	path := nstest.Path(t, made)
	opened := must.Of(netns.Open(path)).Get(t)
	opened.Close()
	made.Close()
	for _, tt := range []struct {
		ns   *netns.NS
		name string
	}{{opened, path}, {made, made.ID().String()}} {
		expect.Equal(t, tt.ns.String(), tt.name, "name %q, want %q", tt.ns, tt.name)
		want := "enter network namespace " + tt.name + ": invalid argument: the handle is closed: bad file descriptor"
		err := tt.ns.Do(func() error { return nil })
		expect.That(t, err != nil && err.Error() == want, "Do: %v, want %s", err, want)
	}
}

func TestCurrentIsTheCallersOwn(t *testing.T) {
	t.Parallel()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ns, err := netns.Current()
	must.Succeed(t, err)
	defer ns.Close()
	expect.Equal(t, here(t), ns.ID().String(), "Current is %s, and the thread is in", ns.ID())
	other := nstest.New(t)
	expect.Success(t, other.Do(func() error {
		ns, err := netns.Current()
		if err != nil {
			return err
		}
		defer ns.Close()
		expect.Equal(t, ns.ID(), other.ID(), "in Do, Current is")
		return nil
	}))
}

func TestLeavingTwiceIsAnErrorThatTouchesNothing(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	leave := must.Of(ns.Enter()).Get(t)
	must.Succeed(t, leave())
	home := must.Of(netns.Current()).Get(t)
	defer home.Close()
	// This file gets the number that the first leave gave up.
	file := must.Of(os.Open(os.DevNull)).Get(t)
	defer file.Close()
	expect.Is(t, leave(), tombolo.ErrInvalid, "the second leave")
	_, err := file.Stat()
	expect.Success(t, err, "a file that was opened between the two")
	again := must.Of(netns.Current()).Get(t)
	defer again.Close()
	expect.Equal(t, again.ID(), home.ID(), "the namespace after the second leave")
}
