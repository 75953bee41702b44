package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// daemon is a tombolod in this process.
type daemon struct {
	dir    string
	told   *net.UnixConn // what the service manager hears
	stop   context.CancelFunc
	status chan int
	log    *nstest.Output
}

func start(t *testing.T, dir string, args ...string) *daemon {
	t.Helper()
	d := &daemon{dir: dir, status: make(chan int, 1), log: &nstest.Output{}}
	// Short: a socket's address has room for 107 bytes.
	run := must.Of(os.MkdirTemp("", "t")).Get(t)
	t.Cleanup(func() { os.RemoveAll(run) })
	path := filepath.Join(run, "notify")
	d.told = must.Of(net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})).Get(t)
	t.Cleanup(func() { d.told.Close() })
	env := map[string]string{"NOTIFY_SOCKET": path, "JOURNAL_STREAM": "8:1"}
	p := &program{getenv: func(name string) string { return env[name] }, stdout: io.Discard, stderr: d.log}
	ctx, cancel := context.WithCancel(context.Background())
	d.stop = cancel
	done := make(chan struct{})
	go func() {
		defer close(done)
		d.status <- p.run(ctx, append([]string{"--leases", dir + "/leases", "--state", dir}, args...))
	}()
	t.Cleanup(func() { cancel(); <-done })
	return d
}

func (d *daemon) hears(t *testing.T, want string) {
	t.Helper()
	must.Succeed(t, d.told.SetReadDeadline(time.Now().Add(3*time.Minute)))
	buf := make([]byte, 256)
	for {
		n, err := d.told.Read(buf)
		must.That(t, err == nil, "no %s: %v; log: %s", want, err, d.log)
		if string(buf[:n]) == want {
			return
		}
	}
}

func fetch(t *testing.T, network, address, path string) (int, string) {
	t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, address)
	}}
	defer transport.CloseIdleConnections()
	r := must.Of((&http.Client{Transport: transport}).Get("http://tombolod" + path)).Get(t)
	defer r.Body.Close()
	body := must.Of(io.ReadAll(r.Body)).Get(t)
	return r.StatusCode, string(body)
}

func shortDir(t *testing.T) string {
	t.Helper()
	dir := must.Of(os.MkdirTemp("", "t")).Get(t)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func TestTheServiceManagerIsTold(t *testing.T) {
	t.Parallel()
	d := start(t, shortDir(t))
	d.hears(t, "READY=1")
	leases := must.Of(lease.Open(d.dir + "/leases")).Get(t)
	expect.Success(t, leases.CheckKeeper(), "ready, but")
	d.hears(t, "WATCHDOG=1")
	d.stop()
	d.hears(t, "STOPPING=1")
	status := <-d.status
	expect.That(t, status == exitOK, "status %d, want %d; log: %s", status, exitOK, d.log)
	expect.Is(t, leases.CheckKeeper(), lease.ErrNoKeeper, "ended, but")
	log := d.log.String()
	expect.That(t, strings.Contains(log, "keeping leases") && !strings.Contains(log, "time="), "log for the journal: %s", log)
}

// One that is stuck keeps no lease from being renewed.
func TestAServiceManagerThatDoesNotListenIsNotWaitedForForEver(t *testing.T) {
	t.Parallel()
	path := shortDir(t) + "/notify"
	deaf := must.Of(net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})).Get(t)
	defer deaf.Close()
	n := must.Of(newNotifier(func(string) string { return path })).Get(t)
	defer n.close()
	n.within = time.Millisecond
	for range 600 { // more than a socket's queue has room for (net.unix.max_dgram_qlen)
		n.tell("WATCHDOG=1")
	}
}

func TestMetricsAndHealthAreServed(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	// What a killed one has left is in nobody's way.
	left := must.Of(net.ListenUnix("unix", &net.UnixAddr{Name: dir + "/tombolod.sock", Net: "unix"})).Get(t)
	left.SetUnlinkOnClose(false)
	left.Close()
	d := start(t, dir)
	d.hears(t, "READY=1")
	socket := dir + "/tombolod.sock"
	code, body := fetch(t, "unix", socket, "/healthz")
	expect.That(t, code == http.StatusOK && json.Valid([]byte(body)), "health: %d %s", code, body)
	if code, body := fetch(t, "unix", socket, "/metrics"); code != http.StatusOK || !strings.Contains(body, "tombolo_lease_renewals_total 0\n") {
		t.Errorf("metrics: %d %s", code, body)
	}
	if st, err := os.Stat(socket); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the socket: %v, %v", st.Mode(), err)
	}
	d.stop()
	<-d.status
	expect.Is(t, expect.Err(os.Lstat(socket)), os.ErrNotExist, "after its end the socket")
}

func TestMetricsAreServedOverTCPWhenAskedFor(t *testing.T) {
	t.Parallel()
	// Of an address that nobody else has, since a port that was free may be another's by now.
	address := fmt.Sprintf("127.%d.%d.%d:9100", 1+rand.N(254), rand.N(256), 1+rand.N(254))
	d := start(t, shortDir(t), "--metrics", address)
	d.hears(t, "READY=1")
	code, _ := fetch(t, "tcp", address, "/metrics")
	expect.That(t, code == http.StatusOK, "metrics: %d; log: %s", code, d.log)
	expect.Of(filepath.Glob(d.dir+"/*.sock")).Len(t, 0, "sockets besides")
}

func TestWithoutMetricsLeasesAreKeptAllTheSame(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	must.Succeed(t, os.WriteFile(dir+"/tombolod.sock", []byte("mine"), 0o600))
	d := start(t, dir)
	d.hears(t, "READY=1")
	got, err := os.ReadFile(dir + "/tombolod.sock")
	expect.That(t, string(got) == "mine", "somebody's file: %q, %v", got, err)
	expect.Contains(t, d.log.String(), "no metrics", "log: %s", d.log)
}

func TestASecondKeeperEnds(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	first := start(t, dir)
	first.hears(t, "READY=1")
	second := start(t, dir)
	status := <-second.status
	expect.That(t, status == exitFailed &&
		strings.Contains(second.log.String(), "another keeper"), "status %d; log: %s", status, second.log)
	code, _ := fetch(t, "unix", dir+"/tombolod.sock", "/healthz")
	expect.That(t, code == http.StatusOK, "the first one's socket is gone")
}

func TestItEndsWhenItsDirectoryIsRemoved(t *testing.T) {
	t.Parallel()
	d := start(t, shortDir(t), "--metrics", "none")
	d.hears(t, "READY=1")
	must.Succeed(t, os.RemoveAll(d.dir+"/leases"))
	status := <-d.status
	expect.That(t, status == exitFailed && strings.Contains(d.log.String(), "tombolod ends"), "status %d; log: %s", status, d.log)
}

func TestItRunsWithoutAServiceManager(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var log nstest.Output
	p := &program{getenv: func(string) string { return "" }, stdout: io.Discard, stderr: &log}
	status := p.run(ctx, []string{"--leases", t.TempDir(), "--metrics", "none"})
	expect.That(t, status == exitOK, "status %d; log: %s", status, &log)
	expect.That(t, strings.Contains(log.String(), "time="), "log without the journal: %s", &log)
	p.getenv = func(string) string { return "/none/notify" }
	if status := p.run(ctx, []string{"--leases", t.TempDir(), "--metrics", "none"}); status != exitOK || !strings.Contains(log.String(), "NOTIFY_SOCKET") {
		t.Errorf("with a service manager that is not there: status %d; log: %s", status, &log)
	}
}

func TestWrongUsage(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"--colour", "red"}, {"now"}, {"--log-level", "loud"}, {"--state", "run"},
		{"--metrics", "unix:x"}, {"--metrics", "9100"}, {"--metrics", "unix:"},
	} {
		var out, errOut bytes.Buffer
		p := &program{getenv: func(string) string { return "" }, stdout: &out, stderr: &errOut}
		if status := p.run(t.Context(), args); status != exitUsage || out.Len() > 0 || !strings.Contains(errOut.String(), "--help") {
			t.Errorf("%v: status %d, %q, %q", args, status, &out, &errOut)
		}
	}
	var errOut bytes.Buffer
	p := &program{getenv: func(string) string { return "" }, stdout: io.Discard, stderr: &errOut}
	if status := p.run(t.Context(), []string{"--leases", "here"}); status != exitFailed || !strings.Contains(errOut.String(), "not absolute") {
		t.Errorf("a relative directory: status %d, %s", status, &errOut)
	}
}

func TestHelpNamesEveryFlagAndStatus(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	p := &program{getenv: func(string) string { return "" }, stdout: &out, stderr: io.Discard}
	expect.Equal(t, p.run(t.Context(), []string{"--help"}), exitOK, "status")
	golden.Compare(t, "../../../deploy/share/tombolod.8", manPage(out.String()))
	for _, want := range []string{"--leases DIR", "--state DIR", "--metrics WHERE", "--log-level L", "--firewalld=false", "--version", lease.DefaultDir, "  0  ", "  1  ", "  2  "} {
		expect.That(t, strings.Contains(out.String(), want), "no %q in\n%s", want, &out)
	}
	expect.Is(t, expect.Err(parse([]string{"-h"})), flag.ErrHelp, "-h")
}

// manPage is what help says, as it is.
func manPage(help string) string {
	return `.\" Written from tombolod --help: go test ./cmd/tombolod -run Help -update
.TH TOMBOLOD 8 "" Tombolo "System administration"
.SH NAME
tombolod \- keeper of DHCP leases, bridges and the firewall of pods
.SH SYNOPSIS
.B tombolod
.RI [ flags ]
.SH DESCRIPTION
.nf
` + strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(help) + `.fi
.SH SEE ALSO
.BR tombolo (8)
`
}

func TestItsVersionIsPrinted(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	p := &program{getenv: func(string) string { return "" }, stdout: &out, stderr: io.Discard}
	status := p.run(t.Context(), []string{"--version"})
	expect.That(t, status == exitOK && out.String() == "tombolod "+version()+"\n", "status %d: %q", status, &out)
}

func TestEndpoints(t *testing.T) {
	t.Parallel()
	for where, want := range map[string][]string{
		"none": {"", ""}, "unix:/run/x.sock": {"unix", "/run/x.sock"}, ":9100": {"tcp", ":9100"},
		"127.0.0.1:9100": {"tcp", "127.0.0.1:9100"}, "[::1]:9100": {"tcp", "[::1]:9100"},
	} {
		network, address, err := endpoint(where)
		got := []string{network, address}
		expect.That(t, slices.Equal(got, want) && err == nil, "endpoint(%s) = %q, %v; want %q", where, got, err, want)
	}
}

const unitFile = "../../deploy/systemd/tombolod.service"

// unit gives a copy of the unit whose program is there.
func unit(t *testing.T) (path string) {
	t.Helper()
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		if os.Getenv("TOMBOLO_ALLOW_SKIPS") == "1" {
			t.Skip("needs systemd-analyze")
		}
		t.Fatal("needs systemd-analyze (package systemd); TOMBOLO_ALLOW_SKIPS=1 skips such tests")
	}
	text := must.Of(os.ReadFile(unitFile)).Get(t)
	self := must.Of(os.Executable()).Get(t)
	path = filepath.Join(t.TempDir(), "tombolod.service")
	must.Succeed(t, os.WriteFile(path, bytes.ReplaceAll(text, []byte("/usr/local/bin/tombolod"), []byte(self)), 0o644))
	return path
}

func TestSystemdTakesTheUnit(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("systemd-analyze", "verify", unit(t)).CombinedOutput()
	expect.That(t, err == nil && len(bytes.TrimSpace(out)) == 0, "systemd-analyze verify: %v\n%s", err, out)
}

func TestTheUnitIsConfined(t *testing.T) {
	t.Parallel()
	// 3.3 is what remains for a process that enters pods' network namespaces as root, in tenths.
	out, err := exec.Command("systemd-analyze", "security", "--offline=true", "--threshold=34", "--no-pager", unit(t)).CombinedOutput()
	expect.That(t, err == nil, "systemd-analyze security: %v\n%s", err, out)
}

func TestTheUnitAgreesWithTheProgram(t *testing.T) {
	t.Parallel()
	text := must.Of(os.ReadFile(unitFile)).Get(t)
	value := func(key string) string {
		m := regexp.MustCompile(`(?m)^` + key + `=(.*)$`).FindSubmatch(text)
		must.That(t, m != nil, "no %s in the unit", key)
		return string(m[1])
	}
	watchdog, err := time.ParseDuration(value("WatchdogSec") + "s")
	expect.That(t, err == nil && watchdog >= 3*lease.Beat,
		"WatchdogSec: %v, %v; want three heartbeats at least", watchdog, err)
	expect.Equal(t, "/var/lib/"+strings.Fields(value("StateDirectory"))[1], lease.DefaultDir, "StateDirectory is")
	if got := "/run/" + value("RuntimeDirectory"); got != state.DefaultDir {
		t.Errorf("RuntimeDirectory is %s, and the plugin's state is in %s", got, state.DefaultDir)
	}
	// An uplink's parameters are there; the rest of the kernel's stays out of reach.
	if value("ReadWritePaths") != "/proc/sys/net" || value("ProtectKernelTunables") != "yes" {
		t.Errorf("of /proc/sys %s is writable", value("ReadWritePaths"))
	}
	expect.That(t, value("Type") == "notify" && value("Restart") == "always" && value("RuntimeDirectoryPreserve") == "yes",
		"the unit does not restart it, or removes the plugin's state")
}
