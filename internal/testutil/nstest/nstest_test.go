package nstest_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestMain(m *testing.M) { nstest.Main(m) }

func TestServerSeesTheCaller(t *testing.T) {
	t.Parallel()
	a, b := nstest.Pair(t)
	for _, tt := range []struct{ network, listen, call, want string }{
		{"tcp", "10.9.0.2:0", "10.9.0.2", "10.9.0.1"},
		{"udp", "10.9.0.2:0", "10.9.0.2", "10.9.0.1"},
		{"tcp", "[fd09::2]:0", "fd09::2", "fd09::1"},
		{"udp", "[fd09::2]:0", "fd09::2", "fd09::1"},
		{"tcp", "[::]:0", "10.9.0.2", "10.9.0.1"},
	} {
		t.Run(tt.network+" "+tt.listen, func(t *testing.T) {
			at := nstest.Serve(t, b, tt.network, netip.MustParseAddrPort(tt.listen))
			seen, err := nstest.Ask(t, a, tt.network, netip.AddrPortFrom(nstest.Addr(tt.call), at.Port()))
			must.Succeed(t, err)
			expect.Equal(t, seen.Addr(), nstest.Addr(tt.want), "the server saw %s, want %s", seen, tt.want)
		})
	}
}

func TestSettledAddressesHaveTheirLocalRoutes(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	nstest.Veth(t, ns, "eth0", ns, "eth1")
	nstest.WaitForAddresses(t, ns) // with no address at all
	var want []string
	for _, link := range []string{"eth0", "eth1"} {
		for i := range 20 {
			address := fmt.Sprintf("fd09::%s:%x", link[3:], i+1)
			nstest.Run(t, ns, "ip", "address", "add", address+"/64", "dev", link, "nodad")
			want = append(want, "local "+netip.MustParseAddr(address).String()+" dev "+link+" ")
		}
	}
	nstest.WaitForAddresses(t, ns)
	routes := nstest.Run(t, ns, "ip", "-6", "route", "show", "table", "local")
	for _, w := range want {
		expect.Contains(t, routes, w)
	}
}

func TestPathOpensTheSameNamespace(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	path := nstest.Path(t, ns)
	got, err := netns.Open(path)
	must.Succeed(t, err)
	defer got.Close()
	expect.Equal(t, got.ID(), ns.ID(), "%s is", path)
}

func TestPathMayBeTakenAwayByTheTest(t *testing.T) {
	t.Parallel()
	path := nstest.Path(t, nstest.New(t))
	must.Succeed(t, unix.Unmount(path, unix.MNT_DETACH))
	must.Succeed(t, os.RemoveAll(filepath.Dir(path)))
}

func TestCommandsRunInTheNamespace(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	got := strings.TrimSpace(nstest.Run(t, ns, "readlink", "/proc/self/ns/net"))
	if got != ns.ID().String() {
		t.Errorf("the command ran in %s, want %s", got, ns.ID())
	}
	_, err := nstest.Try(ns, "ip", "link", "show", "none")
	expect.That(t, err != nil && strings.Contains(err.Error(), "does not exist"), "a failing command: %v, want its own words", err)
}

func TestSysctlIsTheNamespacesOwn(t *testing.T) {
	t.Parallel()
	a, b := nstest.New(t), nstest.New(t)
	nstest.Sysctl(t, a, "net/ipv4/ip_forward", "1")
	nstest.Sysctl(t, b, "net/ipv4/ip_forward", "0")
	expect.Equal(t, nstest.Sysctl(t, a, "net/ipv4/ip_forward"), "1", "ip_forward is")
}
