package cni

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A leadback is a node whose CNI_PATH has a plugin that is, or leads to, the plugin
// under test.
type leadback struct {
	*node
	dir, log string
}

// newLeadback has a script that counts its runs, gives up after 40, so that the fault
// it shows has an end, and runs the plugin. The line before is the script's own.
func newLeadback(t *testing.T, line string) *leadback {
	t.Helper()
	l := &leadback{node: newNode(t), dir: t.TempDir()}
	l.log = filepath.Join(l.dir, "log")
	script := fmt.Sprintf("#!/bin/sh\necho $CNI_COMMAND >>%[1]s\n[ $(wc -l <%[1]s) -lt 40 ] || exit 1\n%[2]s\nexec %[3]s\n", l.log, line, plugin())
	must.Succeed(t, os.WriteFile(filepath.Join(l.dir, "round"), []byte(script), 0o755))
	return l
}

// runs counts those of the script, and forgets them.
func (l *leadback) runs() int {
	l.Helper()
	data, err := os.ReadFile(l.log)
	must.That(l, err == nil || os.IsNotExist(err), "%v", err)
	err = os.Remove(l.log)
	must.That(l, err == nil || os.IsNotExist(err), "%v", err)
	return strings.Count(string(data), "\n")
}

// verb runs one verb of a network whose ipam.type is kind.
func (l *leadback) verb(verb, kind string, p *pod) outcome {
	l.Helper()
	w := l.podnet(conf{"ipam": conf{"type": kind}, "deadline": "20s"})
	c := call{verb: verb, id: p.id, netns: p.path, ifName: "eth0"}
	if c.stdin = w.stdin(nil); verb == "GC" {
		c.stdin = w.stdin(conf{"cni.dev/valid-attachments": []any{}})
	}
	environ := append(c.environ(), "CNI_PATH="+l.dir)
	return must.Of(l.exec(l.Context(), plugin(), c.stdin, environ)).Get(l)
}

func TestAnIPAMThatLeadsBackComesToAnEnd(t *testing.T) {
	t.Parallel()
	for _, verb := range []string{"ADD", "DEL", "STATUS"} {
		nstest.RunParallel(t, verb, func(t *testing.T) {
			// Without what tells the depth, each plugin runs the next.
			endless := newLeadback(t, "unset TOMBOLO_DEPTH")
			if o := endless.verb(verb, "round", endless.pod("a")); o.status == 0 {
				t.Errorf("%s succeeded: %+v", verb, o)
			}
			if got := endless.runs(); verb != "ADD" && got < 40 {
				// ADD ends by itself: the attachment is on record.
				t.Fatalf("the fault is not there: %d runs of the plugin", got)
			}
			l := newLeadback(t, "")
			o := l.verb(verb, "round", l.pod("a"))
			got := l.runs()
			expect.That(t, got != 0 && got <= 4, "%d runs of the plugin", got)
			if o.status == 0 || verb != "ADD" && !strings.Contains(o.stdout, "has to name a plugin that does not lead back here") {
				t.Errorf("%s: %+v", verb, o)
			}
		})
	}
}

func TestThePluginNeverRunsItselfForAnIPAM(t *testing.T) {
	t.Parallel()
	binary := must.Of(filepath.EvalSymlinks(plugin())).Get(t)
	for name, install := range map[string]func(from, to string) error{
		"link": os.Symlink, "copy": copyProgram,
		"name": func(from, to string) error { return os.WriteFile(to, []byte("#!"+from+" as\n"), 0o755) },
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			l := newLeadback(t, "")
			must.Succeed(t, install(binary, filepath.Join(l.dir, "tombolo")))
			p := l.pod("a")
			before := l.traces()
			for _, verb := range []string{"ADD", "STATUS"} {
				e := failure(l.verb(verb, "tombolo", p).stdout)
				must.That(t, e != nil, "%s succeeded", verb)
				wantError(t, e, 7, "is this program itself: name an IPAM plugin")
			}
			l.wantTraces(before)
			for _, verb := range []string{"DEL", "GC"} {
				expect.Success(t, l.verb(verb, "tombolo", p).err(), "%s", verb)
			}
			l.wantTraces(before)
		})
	}
}

// copyProgram keeps others from forking meanwhile: a child would have the copy open for writing, and
// it could not be executed (ETXTBSY).
func copyProgram(from, to string) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		return err
	}
	return out.Close()
}

// The names that are built in are never those of programs.
func TestBuiltInIPAMsAreNeverRun(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"host-local", "static", "dhcp"} {
		l := newLeadback(t, "")
		must.Succeed(t, os.Rename(filepath.Join(l.dir, "round"), filepath.Join(l.dir, kind)))
		p := l.pod("a")
		for _, verb := range []string{"STATUS", "ADD", "DEL", "GC"} {
			l.verb(verb, kind, p)
		}
		// The addresses came otherwise, and then the configuration changed.
		w := l.podnet(nil)
		result := w.add(p)
		stdin := l.podnet(conf{"ipam": conf{"type": kind}}).stdin(conf{"prevResult": result})
		c := call{verb: "CHECK", id: p.id, netns: p.path, ifName: "eth0", stdin: stdin}
		o, err := l.exec(t.Context(), plugin(), stdin, append(c.environ(), "CNI_PATH="+l.dir))
		expect.That(t, err == nil && (o.status != 0 || kind != "dhcp"), "CHECK by %s: %+v, %v", kind, o, err)
		expect.Equal(t, l.runs(), 0, "a program named %s was run", kind)
	}
}
