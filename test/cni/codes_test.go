package cni

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestAnEpochThatCannotBeReadIsCode5(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(path string) error{
		"a directory":     func(path string) error { return os.Mkdir(path, 0o700) },
		"of a newer one":  func(path string) error { return os.WriteFile(path, []byte(`{"version":99}`), 0o600) },
		"a pipe":          func(path string) error { return unix.Mkfifo(path, 0o600) },
		"a symbolic link": func(path string) error { return os.Symlink("/dev/zero", path) },
		"endless links":   func(path string) error { return os.Symlink(path, path) },
		"too long":        func(path string) error { return os.WriteFile(path, make([]byte, 1<<20), 0o600) },
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(nil)
			p := w.addPod("a")
			path := filepath.Join(n.state, "epoch")
			must.Succeed(t, os.Remove(path))
			must.Succeed(t, spoil(path))
			spoiled := name != "a pipe" && name != "too long" // those count as damaged, and are made anew
			for verb, err := range map[string]error{
				"ADD": func() error { _, err := w.tryAdd(n.pod("b")); return err }(), "CHECK": w.check(p), "DEL": w.tryDel(p),
			} {
				if spoiled {
					wantError(t, err, 5, path)
				} else if err != nil {
					t.Errorf("%s: %v", verb, err)
				}
			}
			if spoiled { // so that nothing on record is dropped, until it can be read
				wantError(t, w.status(), 50, path)
				must.Succeed(t, os.Remove(path))
			}
			expect.Success(t, w.status())
			w.add(n.pod("c"))
		})
	}
}

func TestOneHostPortTwiceIsCode7(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.portnet(nil)
	for _, m := range [][]string{
		{"8080:80/tcp", "8080:81/tcp"}, {uplink4 + ":8080:80/tcp", "8080:81/tcp"}, {uplink4 + ":8080:80/tcp", "0.0.0.0:8080:81/tcp"},
		{uplink4 + ":8080:80/udp", uplink4 + ":8080:81/udp"},
	} {
		wantError(t, expect.Err(w.tryAdd(n.pod("b"), publish(t, m...))), 7, "publish a port of the host once")
	}
	n.wantNothing()
	for i, m := range [][]string{
		{"8080:80/tcp", "8080:80/tcp"}, {"8081:80/tcp", "8081:81/udp"}, {uplink4 + ":8082:80/tcp", gateway4 + ":8082:81/tcp"},
		{uplink4 + ":8083:80/tcp", ":::8083:81/tcp"}, {uplink4 + ":8084:80/tcp", "8084:80/tcp"},
	} {
		expect.Success(t, expect.Err(w.tryAdd(n.pod(string(rune('c'+i))), publish(t, m...))), "%q", m)
	}
}

// What comes from outside reaches neither a terminal nor a log as it is.
func TestMessagesHaveNothingThatATerminalObeys(t *testing.T) {
	n := parallelNode(t)
	const evil = "\x1b[2J\u202e\u009b31m\r"
	long := strings.Repeat("x", 5000)
	log := filepath.Join(t.TempDir(), "log")
	p := n.pod("a")
	for name, c := range map[string]struct {
		fields conf
		args   string
	}{
		"a mode":          {fields: conf{"mode": evil + long}},
		"a bridge":        {fields: conf{"bridge": evil}},
		"an unknown key":  {fields: conf{evil + long: 1}},
		"a subnet":        {fields: conf{"ipam": hostLocal(evil + long)}},
		"an ipam":         {fields: conf{"ipam": conf{"type": "x" + evil + long}}},
		"a path":          {fields: conf{"stateDir": "/dev/null/" + evil + long}},
		"a log level":     {fields: conf{"logLevel": evil + long}},
		"an address":      {fields: conf{"ipam": fixed(conf{"address": evil + long})}},
		"CNI_ARGS":        {args: evil + long},
		"CNI_ARGS, a key": {args: evil + long + "=" + evil},
		"CNI_ARGS, IP":    {args: "IP=" + evil + long},
		"a MAC":           {args: "MAC=" + evil + long},
	} {
		fields := conf{"logFile": log}
		for k, v := range c.fields {
			fields[k] = v
		}
		w := n.podnet(fields)
		o := n.call(call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", args: c.args, stdin: w.stdin(nil)})
		failure := failure(o.stdout)
		must.That(t, failure != nil && o.status != 0, "%s: %+v", name, o)
		i := strings.IndexFunc(failure.Msg, func(r rune) bool { return !unicode.IsPrint(r) })
		expect.That(t, i < 0, "%s: byte %d of %q", name, i, failure.Msg)
		expect.That(t, !strings.Contains(failure.Msg, long[:201]),
			"%s: quotes more than 200 bytes: %d in all", name, len(failure.Msg))
	}
	// Names that a pod's owner chose are printed by the operator's commands.
	w := n.podnet(conf{"logFile": log})
	w.add(p, arg("K8S_POD_NAMESPACE", "ns"), arg("K8S_POD_NAME", evil+"\t\v"), arg("IgnoreUnknown", "1"))
	n.run("ip", "link", "set", w.port(p), "alias", evil)
	for _, args := range [][]string{{"ls", "--state", n.state}, {"check", "--state", n.state}, {"ls", "--json", "--state", n.state}, {"ls", "networks", "--state", n.state}, {"ls", "map", "--state", n.state}, {"ls", "map", "--svg", "--state", n.state}, {"repair", "--state", "/dev/null/" + evil}} {
		o, err := n.exec(t.Context(), command(), nil, os.Environ(), args...)
		expect.That(t, err == nil && o.stdout+o.stderr != "", "%q: %+v, %v", args, o, err)
		i := strings.IndexFunc(o.stdout+o.stderr, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) })
		expect.That(t, i < 0, "%q prints, at %d, %q", args, i, o.stdout+o.stderr)
	}
	data, err := os.ReadFile(log)
	expect.That(t, err == nil && len(data) != 0 && !strings.ContainsFunc(string(data), func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }),
		"the log: %q, %v", data, err)
}
