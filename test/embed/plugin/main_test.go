package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/netns"
)

// beThePlugin makes the test's own binary the plugin.
const beThePlugin = "EMBED_BE_THE_PLUGIN"

func TestMain(m *testing.M) {
	if os.Getenv(beThePlugin) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

func space(t *testing.T) (*netns.NS, string) {
	t.Helper()
	ns, err := netns.New()
	if err != nil {
		t.Fatalf("%v (needs root)", err)
	}
	path := filepath.Join(t.TempDir(), "netns")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	mount := func() error { return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "") }
	if err := ns.Do(mount); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
		ns.Close()
	})
	return ns, path
}

// TestPluginOfOnesOwn goes through a pod's life with the plugin as a runtime runs it.
func TestPluginOfOnesOwn(t *testing.T) {
	host, _ := space(t)
	pod, path := space(t)
	state := filepath.Join(t.TempDir(), "state")
	call := func(verb, more string) (string, error) {
		var out bytes.Buffer
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = []string{beThePlugin + "=1", "CNI_COMMAND=" + verb, "CNI_CONTAINERID=c1", "CNI_IFNAME=eth0", "CNI_NETNS=" + path}
		cmd.Stdin = strings.NewReader(fmt.Sprintf(`{"cniVersion": "1.1.0", "name": "embedded", "type": "plugin", "stateDir": %q, "subnet": "10.99.0.0/24"%s}`, state, more))
		cmd.Stdout, cmd.Stderr = &out, os.Stderr
		if err := host.Do(cmd.Start); err != nil {
			return "", err
		}
		err := cmd.Wait()
		return out.String(), err
	}
	must := func(verb, more string) string {
		t.Helper()
		out, err := call(verb, more)
		if err != nil {
			t.Fatalf("%s: %v: %s", verb, err, out)
		}
		return out
	}
	const asked = `, "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80}], "bandwidth": {"ingressRate": 8000000, "egressRate": 8000000}}`
	if out := must("VERSION", ""); !strings.Contains(out, `"supportedVersions"`) {
		t.Errorf("VERSION said %s", out)
	}
	must("STATUS", "")
	if out, err := call("UPDATE", asked); err == nil || !strings.Contains(out, "UPDATE") {
		t.Errorf("a verb that is none: %v, %s", err, out)
	}
	var result struct {
		IPs []struct{ Address string }
	}
	if out := must("ADD", asked); json.Unmarshal([]byte(out), &result) != nil || len(result.IPs) != 1 || result.IPs[0].Address != "10.99.0.2/24" {
		t.Errorf("ADD said %s", out)
	}
	must("CHECK", asked)
	if got := through(t, host, pod); got != "the pod" {
		t.Errorf("the host's port 8080 leads to %q", got)
	}
	count := func() (links, reserved int) {
		err := host.Do(func() error {
			list, err := net.Interfaces()
			for _, l := range list {
				if strings.HasPrefix(l.Name, "veth") || strings.HasPrefix(l.Name, "ifb") {
					links++
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		files, err := filepath.Glob(filepath.Join(state, "ipam", "embedded", "10.*"))
		if err != nil {
			t.Fatal(err)
		}
		return links, len(files)
	}
	if links, reserved := count(); links != 2 || reserved != 1 {
		t.Errorf("with the pod there are %d links and %d addresses", links, reserved)
	}
	must("GC", asked+`, "cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}]`)
	must("CHECK", asked)
	must("GC", "") // the runtime has lost its list
	must("CHECK", asked)
	must("GC", `, "cni.dev/valid-attachments": []`)
	if links, reserved := count(); links != 0 || reserved != 0 {
		t.Errorf("after GC there are %d links and %d addresses", links, reserved)
	}
	if out, err := call("CHECK", asked); err == nil || !strings.Contains(out, "has no attachment") {
		t.Errorf("CHECK of what is gone: %s", out)
	}
	must("ADD", asked)
	must("DEL", "")
	must("DEL", "")
	if links, reserved := count(); links != 0 || reserved != 0 {
		t.Errorf("after DEL there are %d links and %d addresses", links, reserved)
	}
}

// through asks a server in the pod by the host's port.
func through(t *testing.T, host, pod *netns.NS) string {
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
	var answer []byte
	err := host.Do(func() error {
		conn, err := net.DialTimeout("tcp4", "10.99.0.1:8080", 10*time.Second)
		if err != nil {
			return err
		}
		defer conn.Close()
		answer, err = io.ReadAll(conn)
		return err
	})
	if err != nil {
		t.Error(err)
	}
	return string(answer)
}

func TestPluginIsShort(t *testing.T) {
	data, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(data, []byte("\n")); n >= 100 {
		t.Errorf("it has %d lines, where fewer than 100 are promised", n)
	}
}
