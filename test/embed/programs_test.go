package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/netns"
)

// program builds one of the small programs, and gives what runs it in a namespace.
func program(t *testing.T, name string, lines int) func(ns *netns.NS, args ...string) *exec.Cmd {
	t.Helper()
	source, err := os.ReadFile(filepath.Join(name, "main.go"))
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(source, []byte("\n")); n >= lines {
		t.Errorf("%s has %d lines, where fewer than %d are promised", name, n, lines)
	}
	path := filepath.Join(t.TempDir(), name)
	if out, err := exec.Command("go", "build", "-o", path, "./"+name).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return func(ns *netns.NS, args ...string) *exec.Cmd { return started(t, ns, path, args...) }
}

func started(t *testing.T, ns *netns.NS, path string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr = new(bytes.Buffer), os.Stderr
	if err := ns.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // one that has ended is none
	return cmd
}

func hostAndPod(t *testing.T) (host, pod *netns.NS, path string) {
	t.Helper()
	w, err := newWorld(2)
	if err != nil {
		t.Fatalf("%v (needs root)", err)
	}
	t.Cleanup(w.close)
	return w.spaces[0], w.spaces[1], fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), w.spaces[1].FD())
}

func mustPing(t *testing.T, from *netns.NS, to string) {
	t.Helper()
	if err := ping(from, netip.MustParseAddr(to)); err != nil {
		t.Fatal(err)
	}
}

func mustEnd(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %v", cmd, err)
	}
	return fmt.Sprint(cmd.Stdout)
}

func TestLinkPutsANamespaceOnABridge(t *testing.T) {
	t.Parallel()
	host, pod, path := hostAndPod(t)
	mustEnd(t, program(t, "link", 50)(host, "br0", "10.8.0.1/24", path, "10.8.0.2/24"))
	mustPing(t, pod, "10.8.0.1")
}

func TestLeaseIsHeldUntilAnInterrupt(t *testing.T) {
	t.Parallel()
	host, pod, path := hostAndPod(t)
	mustEnd(t, program(t, "link", 50)(host, "br0", "10.8.0.1/24", path, "10.8.0.2/24"))
	mustEnd(t, started(t, pod, "ip", "address", "flush", "dev", "eth0"))
	leases := filepath.Join(t.TempDir(), "leases")
	started(t, host, "dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--interface=br0", "--no-ping",
		"--user=root", "--pid-file=", "--dhcp-range=10.8.0.50,10.8.0.60", "--dhcp-leasefile="+leases)
	client := program(t, "lease", 60)(host, path, "eth0")
	given := func() bool { data, _ := os.ReadFile(leases); return strings.Contains(string(data), " 10.8.0.") }
	for end := time.Now().Add(30 * time.Second); ping(pod, netip.MustParseAddr("10.8.0.1")) != nil; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the interface has no address")
		}
	}
	if err := client.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	mustEnd(t, client)
	for end := time.Now().Add(30 * time.Second); given(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the server has the lease still")
		}
	}
}

func TestPodsHaveAPortAndAGuard(t *testing.T) {
	t.Parallel()
	host, pod, path := hostAndPod(t)
	pods, state := program(t, "pods", 70), filepath.Join(t.TempDir(), "state")
	do := func(verb string) string { t.Helper(); return mustEnd(t, pods(host, verb, state, "c1", path)) }
	if got := do("add"); got != "10.22.0.2/24 via 10.22.0.1\n" {
		t.Errorf("add said %s", got)
	}
	mustPing(t, pod, "10.22.0.1")
	if got := throughPort(t, host, pod); got != "the pod" {
		t.Errorf("the host's port 8080 leads to %q", got)
	}
	if got := do("check"); got != "" {
		t.Errorf("check said %s", got)
	}
	mustEnd(t, started(t, pod, "ip", "address", "flush", "dev", "eth0"))
	mustEnd(t, started(t, pod, "ip", "address", "add", "10.22.0.9/24", "dev", "eth0"))
	if got := do("check"); !strings.Contains(got, "10.22.0.2/24") {
		t.Errorf("check said of another address %q", got)
	}
	dial := func() error { _, err := net.DialTimeout("tcp4", "10.22.0.1:1", time.Second); return err }
	if err := pod.Do(dial); !os.IsTimeout(err) {
		t.Errorf("from an address that is not its own it is answered: %v", err)
	}
	do("del")
	do("del")
	mustEnd(t, started(t, host, "sh", "-c", "! ip -o link | grep veth && ! nft list ruleset | grep 10.22.0.2"))
}

// throughPort asks a server in the pod by the host's port.
func throughPort(t *testing.T, host, pod *netns.NS) string {
	t.Helper()
	var l net.Listener
	if err := pod.Do(func() (err error) { l, err = net.Listen("tcp4", ":80"); return err }); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if conn, err := l.Accept(); err == nil {
			_, _ = io.WriteString(conn, "the pod")
			conn.Close()
		}
	}()
	var conn net.Conn
	dial := func() (err error) { conn, err = net.DialTimeout("tcp4", "10.22.0.1:8080", 10*time.Second); return err }
	if err := host.Do(dial); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	answer, err := io.ReadAll(conn)
	if err != nil {
		t.Error(err)
	}
	return string(answer)
}
