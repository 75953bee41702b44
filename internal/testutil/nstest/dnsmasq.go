package nstest

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/netns"
)

// Dnsmasq is a real DHCP server on a link of a namespace.
type Dnsmasq struct {
	tb   testing.TB
	ns   *netns.NS
	link string
	cmd  *exec.Cmd

	LeaseFile, LogFile string
}

// NewDnsmasq starts one, which serves until the test ends or Stop. What it leases is up to
// the options.
func NewDnsmasq(tb testing.TB, ns *netns.NS, link string, options ...string) *Dnsmasq {
	tb.Helper()
	Need(tb, "dnsmasq")
	dir := tb.TempDir()
	d := &Dnsmasq{tb: tb, ns: ns, link: link, LeaseFile: filepath.Join(dir, "leases"), LogFile: filepath.Join(dir, "log")}
	tb.Cleanup(func() {
		d.Stop()
		if tb.Failed() {
			tb.Logf("dnsmasq:\n%s", d.Logged())
		}
	})
	d.Start(options...)
	return d
}

// Start runs it again, after Stop, and waits until it serves. Its log is a new one, its
// leases are those that there are.
func (d *Dnsmasq) Start(options ...string) {
	d.tb.Helper()
	if err := os.WriteFile(d.LogFile, nil, 0o600); err != nil {
		d.tb.Fatal(err)
	}
	d.cmd = exec.Command("dnsmasq", append([]string{
		"--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--no-ping", "--port=0", "--bind-interfaces",
		"--interface=" + d.link, "--except-interface=lo", "--dhcp-authoritative", "--pid-file=", "--user=root", "--log-dhcp",
		"--dhcp-leasefile=" + d.LeaseFile, "--log-facility=" + d.LogFile,
	}, options...)...)
	var said strings.Builder
	d.cmd.Stderr = &said
	if err := d.ns.Do(d.cmd.Start); err != nil {
		d.tb.Fatal(err)
	}
	for end := time.Now().Add(patience); !strings.Contains(d.Logged(), "started, version "); {
		if time.Now().After(end) {
			d.Stop()
			d.tb.Fatalf("dnsmasq has not come up: %s %s", &said, d.Logged())
		}
		time.Sleep(2 * time.Millisecond) // only so as not to keep a CPU from it
	}
}

// Stop kills it; it may have been stopped already.
func (d *Dnsmasq) Stop() {
	if d.cmd != nil {
		_ = d.cmd.Process.Kill()
		_ = d.cmd.Wait()
	}
}

// Leased is what its file of leases has.
func (d *Dnsmasq) Leased() string { d.tb.Helper(); return ReadIf(d.tb, d.LeaseFile) }

// Logged is what its log has.
func (d *Dnsmasq) Logged() string { d.tb.Helper(); return ReadIf(d.tb, d.LogFile) }

// ReadIf is what is in a file, and nothing where there is none.
func ReadIf(tb testing.TB, path string) string {
	tb.Helper()
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		tb.Fatal(err)
	}
	return string(data)
}

// Need fails the test where a program is missing that it runs, or skips it where skips are
// allowed.
func Need(tb testing.TB, program string) {
	tb.Helper()
	if _, err := exec.LookPath(program); err == nil {
		return
	}
	if os.Getenv("TOMBOLO_ALLOW_SKIPS") == "1" {
		tb.Skipf("needs %s, which is not installed", program)
	}
	tb.Fatalf("needs %s, which is not installed; TOMBOLO_ALLOW_SKIPS=1 skips such tests", program)
}
