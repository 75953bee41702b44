package lan

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// dhcp is the router's server.
type dhcp struct {
	*lan
	leases, log string
	cmd         *exec.Cmd
}

// dnsmasq has the router grant leases and advertise itself and the LAN's prefix.
func (l *lan) dnsmasq() *dhcp {
	l.Helper()
	need(l, "dnsmasq")
	dir := l.TempDir()
	d := &dhcp{lan: l, leases: filepath.Join(dir, "leases"), log: filepath.Join(dir, "log")}
	d.start()
	l.Cleanup(d.stop)
	return d
}

// start runs the server, with more options than it always has. Its log is a new one,
// its leases are those that there are.
func (d *dhcp) start(more ...string) {
	d.Helper()
	writeFile(d, d.log, "")
	d.cmd = exec.Command("dnsmasq", append([]string{
		"--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--no-ping", "--port=0", "--bind-interfaces",
		"--interface=" + nic, "--except-interface=lo", "--dhcp-authoritative", "--pid-file=", "--user=root", "--log-dhcp",
		"--dhcp-leasefile=" + d.leases, "--log-facility=" + d.log,
		"--dhcp-range=192.168.50.100,192.168.50.200,1h", "--enable-ra", "--dhcp-range=fd50::,ra-only,64,1h",
	}, more...)...)
	d.cmd.Stderr = d.Output()
	if err := d.router.ns.Do(d.cmd.Start); err != nil {
		d.Fatal(err)
	}
	d.eventually("dnsmasq serves", func() bool {
		return strings.Contains(readIf(d, d.log), "IPv6 router advertisement enabled")
	})
}

// stop kills the server; it may have been stopped already.
func (d *dhcp) stop() {
	d.cmd.Process.Kill()
	d.cmd.Wait()
}

// forgets waits until the server has no lease of an address, or of a MAC: nobody answers
// a release.
func (d *dhcp) forgets(who string) {
	d.Helper()
	d.eventually("the server ends the lease of "+who, func() bool {
		return !slices.ContainsFunc(strings.Fields(readIf(d, d.leases)), func(field string) bool { return field == who })
	})
}

func readIf(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return string(data)
}

func writeFile(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// need fails the test where a program is missing that it runs, or skips it where
// skips are allowed.
func need(t testing.TB, program string) {
	t.Helper()
	if _, err := exec.LookPath(program); err == nil {
		return
	}
	if os.Getenv("TOMBOLO_ALLOW_SKIPS") == "1" {
		t.Skipf("needs %s, which is not installed", program)
	}
	t.Fatalf("needs %s, which is not installed; TOMBOLO_ALLOW_SKIPS=1 skips such tests", program)
}

// solicit asks routers to advertise themselves, as a machine does whose link has come
// up (RFC 4861, 4.1).
func (l *lan) solicit(link string) {
	l.Helper()
	index := nstest.Index(l, l.host.ns, link)
	err := l.host.ns.Do(func() error {
		// The kernel fills in the checksum.
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
		if err != nil {
			return err
		}
		const solicitation = 133
		allRouters := &unix.SockaddrInet6{Addr: nstest.Addr("ff02::2").As16(), ZoneId: uint32(index)}
		return errors.Join(
			unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255),
			unix.Sendto(fd, []byte{solicitation, 7: 0}, 0, allRouters),
			unix.Close(fd))
	})
	if err != nil {
		l.Fatal(err)
	}
}
