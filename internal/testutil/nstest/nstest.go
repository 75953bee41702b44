package nstest

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/netns"
)

// RequireRoot fails the test unless it runs as root. Where TOMBOLO_ALLOW_SKIPS=1
// is set, it skips it instead: nobody is to take a run for a full one by mistake.
func RequireRoot(tb testing.TB) {
	tb.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("TOMBOLO_ALLOW_SKIPS") == "1" {
		tb.Skip("needs root: creates network namespaces")
	}
	tb.Fatal("needs root, to create network namespaces; TOMBOLO_ALLOW_SKIPS=1 skips such tests")
}

// RequireInitialUserNS fails or skips the test, as RequireRoot does, in a user
// namespace that is not the machine's first: some limits cannot be passed there.
func RequireInitialUserNS(tb testing.TB) {
	tb.Helper()
	RequireRoot(tb)
	uids, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		tb.Fatal(err)
	}
	if f := strings.Fields(string(uids)); len(f) == 3 && f[0] == "0" && f[1] == "0" && f[2] == "4294967295" {
		return
	}
	if os.Getenv("TOMBOLO_ALLOW_SKIPS") == "1" {
		tb.Skip("needs the initial user namespace: goes past net.core.rmem_max")
	}
	tb.Fatal("needs the initial user namespace, to go past net.core.rmem_max; TOMBOLO_ALLOW_SKIPS=1 skips such tests")
}

// HasIPv6 says whether the kernel has IPv6, which ipv6.disable=1 on its command line
// switches off in all namespaces: test/vm/run.sh noipv6 boots such a one.
func HasIPv6() bool {
	_, err := os.Stat("/proc/self/net/if_inet6")
	return err == nil
}

// New makes a network namespace for the test. Its loopback interface is down.
func New(tb testing.TB) *netns.NS {
	tb.Helper()
	RequireRoot(tb)
	ns, err := netns.New()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { ns.Close() })
	return ns
}

// Path gives the namespace a name in the file system, as runtimes do for
// CNI_NETNS: a bind mount that ends with the test.
func Path(tb testing.TB, ns *netns.NS) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "netns")
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		tb.Fatal(err)
	}
	if err := unix.Mount(fdPath(ns), path, "", unix.MS_BIND, ""); err != nil {
		tb.Fatalf("mount namespace at %s: %v", path, err)
	}
	tb.Cleanup(func() {
		// ErrNotExist and EINVAL: the test itself took it away, as kubelets do.
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && err != unix.ENOENT && err != unix.EINVAL {
			tb.Errorf("unmount %s: %v", path, err)
		}
	})
	return path
}

func fdPath(ns *netns.NS) string {
	return "/proc/" + strconv.Itoa(os.Getpid()) + "/fd/" + strconv.Itoa(ns.FD())
}

// Run runs a command in a namespace (nil: in the test's own) and gives what it
// printed; the test fails if the command does.
func Run(tb testing.TB, ns *netns.NS, name string, args ...string) string {
	tb.Helper()
	out, err := Try(ns, name, args...)
	if err != nil {
		tb.Fatal(err)
	}
	return out
}

// Try is Run for a command that may fail: the error has what it printed on stderr.
func Try(ns *netns.NS, name string, args ...string) (string, error) {
	var out, errOut bytes.Buffer
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	// A child belongs to the namespace of the thread that forks it.
	start := cmd.Start
	if ns != nil {
		start = func() error { return ns.Do(cmd.Start) }
	}
	err := start()
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, bytes.TrimSpace(errOut.Bytes()))
	}
	return out.String(), err
}

// Veth makes a veth pair whose ends are in two namespaces, which may be the same,
// and sets both up. Neither has an address, not even a link-local one.
func Veth(tb testing.TB, a *netns.NS, nameA string, b *netns.NS, nameB string) (indexA, indexB int) {
	tb.Helper()
	Run(tb, a, "ip", "link", "add", "name", nameA, "type", "veth", "peer", "name", nameB, "netns", fdPath(b))
	for _, end := range []struct {
		ns   *netns.NS
		name string
	}{{a, nameA}, {b, nameB}} {
		if HasIPv6() {
			Run(tb, end.ns, "ip", "link", "set", end.name, "addrgenmode", "none")
		}
		Run(tb, end.ns, "ip", "link", "set", end.name, "up")
	}
	return Index(tb, a, nameA), Index(tb, b, nameB)
}

// Pair makes two namespaces that are joined by a veth pair: 10.9.0.1 and fd09::1 are
// a's, 10.9.0.2 and fd09::2 are b's.
func Pair(tb testing.TB) (a, b *netns.NS) {
	tb.Helper()
	a, b = New(tb), New(tb)
	Veth(tb, a, "eth0", b, "eth0")
	for i, ns := range []*netns.NS{a, b} {
		host := string(rune('1' + i))
		Run(tb, ns, "ip", "address", "add", "10.9.0."+host+"/24", "dev", "eth0")
		Run(tb, ns, "ip", "address", "add", "fd09::"+host+"/64", "dev", "eth0", "nodad")
	}
	WaitForAddresses(tb, a, b)
	return a, b
}

// Index gives a link's index, and fails the test if there is no such link.
func Index(tb testing.TB, ns *netns.NS, name string) int {
	tb.Helper()
	var link *net.Interface
	err := ns.Do(func() error {
		var err error
		link, err = net.InterfaceByName(name)
		return err
	})
	if err != nil {
		tb.Fatalf("index of link %s: %v", name, err)
	}
	return link.Index
}

// Sysctl reads a file below /proc/sys in a namespace, or writes it where there is
// a value.
func Sysctl(tb testing.TB, ns *netns.NS, name string, value ...string) string {
	tb.Helper()
	path := filepath.Join("/proc/sys", name)
	var got []byte
	err := ns.Do(func() error {
		if len(value) > 0 {
			return os.WriteFile(path, []byte(value[0]), 0)
		}
		var err error
		got, err = os.ReadFile(path)
		return err
	})
	if err != nil {
		tb.Fatal(err)
	}
	return strings.TrimSpace(string(got))
}

// Prefix is netip.MustParsePrefix with a name that reads well in tables.
func Prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

// Addr is netip.MustParseAddr, likewise.
func Addr(s string) netip.Addr { return netip.MustParseAddr(s) }
