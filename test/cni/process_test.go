package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// begun is how strace's line of a call begins. It has others too: of calls that end
// after another thread's, and of threads that it lets go in the midst of one.
var begun = regexp.MustCompile(`^[0-9]+ +[a-z0-9_]+\(`)

// traced runs a verb under strace, and gives a line for each call of these.
func (n *node) traced(c call, calls string) []string {
	n.Helper()
	strace := must.Of(exec.LookPath("strace")).Get(n)
	log := filepath.Join(n.TempDir(), "strace")
	o, err := n.exec(context.Background(), strace, c.stdin, c.environ(), "-f", "-qq", "-e", "trace="+calls, "-e", "signal=none", "-o", log, plugin())
	must.Succeed(n, err)
	must.That(n, o.status == 0, "%s: exit status %d: %s%s", c.verb, o.status, o.stdout, o.stderr)
	data := must.Of(os.ReadFile(log)).Get(n)
	var lines []string
	for line := range strings.Lines(string(data)) {
		if begun.MatchString(line) {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

func TestEachVerbIsOneProcess(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "strace")
	n := newNode(t)
	w := n.podnet(nil)
	p, other := n.pod("a"), n.pod("other")
	result := n.callOK(call{verb: "ADD", id: other.id, netns: other.path, ifName: "eth0", stdin: w.stdin(nil)})
	of := func(verb string, p *pod, fields conf) call {
		return call{verb: verb, id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(fields)}
	}
	for _, c := range []call{
		{verb: "VERSION"},
		{verb: "STATUS", stdin: w.stdin(nil)},
		of("ADD", p, nil),
		of("CHECK", other, conf{"prevResult": json.RawMessage(result)}),
		of("DEL", p, nil),
		{verb: "GC", stdin: w.stdin(conf{"cni.dev/valid-attachments": []any{}})},
	} {
		wantOneExec(t, c.verb, n.traced(c, "execve,execveat"))
	}
	n.wantNothing()
}

func wantOneExec(t *testing.T, verb string, lines []string) {
	t.Helper()
	expect.That(t, len(lines) == 1 && strings.Contains(lines[0], "execve(") && strings.Contains(lines[0], "tombolo"),
		"%s execs %d programs, want one, itself:\n%s", verb, len(lines), strings.Join(lines, "\n"))
}

// TestDelegationIsTheOneExec proves that the trace above would have shown more.
func TestDelegationIsTheOneExec(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "strace")
	n := newNode(t)
	ipam, _ := fake(t, fakeConf{})
	w := n.podnet(conf{"ipam": ipam})
	p := n.pod("a")
	execs := n.traced(call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)}, "execve,execveat")
	expect.That(t, len(execs) == 2 && strings.Contains(execs[1], fakeIPAM),
		"execs:\n%s\nwant the plugin and the ipam", strings.Join(execs, "\n"))
}

// line is one of a log.
type line struct {
	Time        time.Time
	Level       string
	Msg         string
	Verb        string
	Network     string
	ContainerID string
	IfName      string
	Code        uint
	Total       time.Duration
	Steps       map[string]time.Duration
}

func readLog(t *testing.T, path string) []line {
	t.Helper()
	data := must.Of(os.ReadFile(path)).Get(t)
	var list []line
	for _, text := range bytes.Split(bytes.TrimSpace(data), []byte("\n")) {
		var l line
		decoder := json.NewDecoder(bytes.NewReader(text))
		err := decoder.Decode(&l)
		must.That(t, err == nil, "%v: %s", err, text)
		list = append(list, l)
	}
	return list
}

func TestLogHasALineForEachVerb(t *testing.T) {
	n := parallelNode(t)
	log := filepath.Join(t.TempDir(), "tombolo.log")
	w := n.podnet(conf{"logFile": log})
	p := n.pod("a")
	expect.Success(t, w.status())
	w.add(p)
	expect.Success(t, w.check(p))
	_, err := w.tryAdd(p) // there already
	wantError(t, err, 111, "already")
	w.gc(p)
	w.del(p)

	type brief struct {
		Level, Verb, ContainerID string
		Code                     uint
	}
	var got []brief
	for _, l := range readLog(t, log) {
		got = append(got, brief{l.Level, l.Verb, l.ContainerID, l.Code})
		expect.That(t, l.Network == "podnet" && l.Total > 0 && !l.Time.IsZero() && l.Msg != "",
			"line %+v lacks something", l)
		var sum time.Duration
		for _, d := range l.Steps {
			sum += d
		}
		expect.That(t, sum <= l.Total, "the steps %v add up to more than %s", l.Steps, l.Total)
		if l.Verb == "ADD" && l.Code == 0 {
			for _, step := range []string{"open", "record", "ipam", "network", "link", "firewall", "commit"} {
				expect.That(t, l.Steps[step] > 0, "ADD's line has no duration of step %s: %v", step, l.Steps)
			}
		}
	}
	want := []brief{
		{"INFO", "STATUS", "", 0}, {"INFO", "ADD", "a", 0}, {"INFO", "CHECK", "a", 0},
		{"ERROR", "ADD", "a", 111}, {"INFO", "GC", "", 0}, {"INFO", "DEL", "a", 0},
	}
	expect.NoDiff(t, cmp.Diff(want, got), "lines")
}

func TestLogLevelFiltersLines(t *testing.T) {
	n := parallelNode(t)
	log := filepath.Join(t.TempDir(), "tombolo.log")
	w := n.podnet(conf{"logFile": log, "logLevel": "error"})
	p := w.addPod("a")
	wantError(t, expect.Err(w.tryAdd(p)), 111, "already")
	lines := readLog(t, log)
	expect.That(t, len(lines) == 1 && lines[0].Code == 111, "lines %+v, want that of the error", lines)
}

func TestLogOfManyAtOnceIsWhole(t *testing.T) {
	n := parallelNode(t)
	log := filepath.Join(t.TempDir(), "tombolo.log")
	w := n.podnet(conf{"logFile": log})
	pods := n.pods(16)
	atOnce(pods, func(p *pod) { expect.Success(t, expect.Err(w.tryAdd(p))) })
	got := len(readLog(t, log))
	expect.That(t, got == len(pods), "%d lines, want %d", got, len(pods))
}

func TestLogThatCannotBeWrittenKeepsNoPodFromGoing(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	p := w.addPod("a")
	w.callOK(call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(conf{"logFile": "/dev/null/log"})})
	n.wantNothing()
}

func TestOperatorsCommands(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	w.add(n.pod("container-of-a-pod"), arg("IgnoreUnknown", "1"), arg("K8S_POD_NAMESPACE", "default"), arg("K8S_POD_NAME", "web"))
	ls := n.operate("ls", "--state", n.state)
	for _, part := range []string{"NETWORK", "podnet", "default/web", "eth0", "10.77.0.2,fd77::2", "ready"} {
		expect.Contains(t, ls.stdout, part, "tombolo ls")
	}
	var list []struct{ Network, ContainerID string }
	unmarshal(t, n.operate("ls", "--json", "--state", n.state).stdout, &list)
	expect.That(t, len(list) == 1 && list[0].ContainerID == "container-of-a-pod", "tombolo ls --json: %+v", list)
	var version struct {
		Go  string
		CNI []string
	}
	unmarshal(t, n.operate("version", "--json").stdout, &version)
	diff := cmp.Diff(versions(), version.CNI)
	expect.That(t, diff == "" && version.Go != "", "versions (-want +got):\n%s", diff)
	help := n.operate("help")
	expect.That(t, help.status == 0 && strings.Contains(help.stdout, "Exit status"), "tombolo help: %d, %s", help.status, help.stdout)
}

// NLDEBUG prints what an ADD says to the kernel and hears from it, and its result stays as it is.
func TestMessagesArePrintedOnRequest(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	p := n.pod("a")
	c := call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)}
	o := must.Of(n.exec(t.Context(), filepath.Join(built, "tombolo-cni"), c.stdin, append(c.environ(), "NLDEBUG=1"))).Get(t)
	must.That(t, o.status == 0, "exit status %d: %s", o.status, o.stdout)
	var result current.Result
	unmarshal(t, o.stdout, &result) // and nothing besides

	// Each socket numbers its messages, and an answer has its request's number.
	form := regexp.MustCompile(`^nl: fd (\d+) (send|recv) seq (\d+) ([A-Z_]+) flags 0x[0-9a-f]+:(?: .*)?\n$`)
	sent := map[string]int{}
	for line := range strings.Lines(o.stderr) {
		m := form.FindStringSubmatch(line)
		must.That(t, m != nil, "%q is no message", line)
		switch seq := must.Of(strconv.Atoi(m[3])).Get(t); {
		case m[2] == "send":
			expect.That(t, seq == sent[m[1]]+1 || seq == 1, "after message %d: %s", sent[m[1]], line)
			sent[m[1]] = seq
		case m[4] == "ACK" || m[4] == "ERROR" || m[4] == "DONE":
			expect.That(t, seq > 0 && seq <= sent[m[1]], "this answers none of %d messages: %s", sent[m[1]], line)
		}
	}

	name := func(i int) string {
		return fmt.Sprintf("3:%d:%x00", len(result.Interfaces[i].Name)+1, result.Interfaces[i].Name)
	}
	rest := o.stderr
	for _, want := range []string{
		"send seq [0-9]+ RTM_GETLINK flags 0x1: 0{32} " + name(0), "recv seq [0-9]+ ERROR flags 0x100: no such device",
		"send seq [0-9]+ RTM_NEWLINK flags 0x605: .* " + name(0), "recv seq [0-9]+ ACK flags 0x100:",
		"send seq [0-9]+ NFNL_MSG_BATCH_BEGIN ", "send seq [0-9]+ NFT_MSG_NEWTABLE ", "send seq [0-9]+ NFNL_MSG_BATCH_END ",
		"send seq [0-9]+ RTM_NEWLINK .* " + name(1), fmt.Sprintf("send seq [0-9]+ RTM_NEWADDR .* 2:4:%x", ip4(&result).AsSlice()),
		"send seq [0-9]+ NFT_MSG_NEWSETELEM .*{ .* }", "recv seq [0-9]+ ACK ",
	} {
		at := regexp.MustCompile("(?m)^nl: fd [0-9]+ " + want).FindStringIndex(rest)
		must.That(t, at != nil, "no message %s in\n%s", want, rest)
		rest = rest[at[1]:]
	}
	w.del(p)
}
