package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// Tests share one build of the program, which takes longer than all of them.
func TestDemo(t *testing.T) {
	t.Parallel()
	tombolo := build(t)
	for name, test := range map[string]func(*testing.T, string){
		"five pods get on and leave nothing":           testFivePods,
		"one pod has none to ping":                     testOnePod,
		"numbers of pods out of bounds are refused":    testBounds,
		"root of a user namespace will do":             testUserNamespace,
		"without root it says what it needs":           testNobody,
		"whatever is broken is named":                  testBroken,
		"a done context ends it":                       testCancel,
		"killed halfway, it leaves the host as it was": testKilled,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, tombolo)
		})
	}
}

// fivePods is what the demo prints, figures apart. So the documentation has it.
const fivePods = `A node, a host outside and 5 pods, each in a network namespace of its own\.
The pods are of network "demo": 10\.22\.0\.0/16 and fd22::/64 behind bridge cbr0, masqueraded\.

POD +IPV4 +IPV6 +GATEWAY +ADD
pod1 +10\.22\.0\.2 +fd22::2 +10\.22\.0\.1, fd22::1 +MS ms \(the first also builds the network\)
pod2 +10\.22\.0\.3 +fd22::3 +10\.22\.0\.1, fd22::1 +MS ms
pod3 +10\.22\.0\.4 +fd22::4 +10\.22\.0\.1, fd22::1 +MS ms
pod4 +10\.22\.0\.5 +fd22::5 +10\.22\.0\.1, fd22::1 +MS ms
pod5 +10\.22\.0\.6 +fd22::6 +10\.22\.0\.1, fd22::1 +MS ms

PING \(IPv4, IPv6\) +NEXT POD +GATEWAY +OUTSIDE +WHICH SEES IT AS
pod1 +MS, MS ms +MS, MS ms +MS, MS ms +192\.0\.2\.1, 2001:db8::1
pod2 +MS, MS ms +MS, MS ms +MS, MS ms +192\.0\.2\.1, 2001:db8::1
pod3 +MS, MS ms +MS, MS ms +MS, MS ms +192\.0\.2\.1, 2001:db8::1
pod4 +MS, MS ms +MS, MS ms +MS, MS ms +192\.0\.2\.1, 2001:db8::1
pod5 +MS, MS ms +MS, MS ms +MS, MS ms +192\.0\.2\.1, 2001:db8::1

WHAT THERE IS +VETH ENDS +IN NF_TABLES +RESERVATIONS +RECORDS +BRIDGE
with 5 pods +10 +5 +10 +5 +cbr0
after DEL +0 +0 +0 +0 +cbr0
after tombolo remove +0 +0 +0 +0 +-

DEL took MS ms a pod, and left nothing\.
`

// sharedNIC is what it prints of a container on the LAN.
const sharedNIC = `
ON THE LAN BY enp1s0 +ADDRESSES +PINGS ITS NEIGHBOURS
the node +192\.168\.50\.1, fd50::1 +a laptop: MS, MS ms; the container: MS, MS ms
a laptop +192\.168\.50\.2, fd50::2 +the node: MS, MS ms; the container: MS, MS ms
the container +192\.168\.50\.3, fd50::3 +the node: MS, MS ms; a laptop: MS, MS ms

enp1s0 kept its addresses and routes: before, beside the container, and after\.
`

func wantPattern(t *testing.T, pattern string, got outcome) {
	t.Helper()
	pattern = `\A` + strings.ReplaceAll(pattern, "MS", `\d+\.\d+`) + `\z`
	expect.That(t, got.status == 0 && got.stderr == "" && regexp.MustCompile(pattern).MatchString(got.stdout),
		"exit status %d, stderr %q, stdout:\n%s", got.status, got.stderr, got.stdout)
}

func testFivePods(t *testing.T, tombolo string) {
	host := nstest.New(t)
	wantPattern(t, fivePods+sharedNIC, start(t, host, nil, tombolo+"-demo", tombolo+"-cni"))
	wantUntouched(t, host)
}

func testOnePod(t *testing.T, tombolo string) {
	got := start(t, nstest.New(t), nil, tombolo+"-demo", "--pods", "1", tombolo+"-cni")
	wantPattern(t, `(?s).* and 1 pod, .*\npod1 +- +MS, MS ms .* left nothing\.\n`+sharedNIC, got)
}

func testBounds(t *testing.T, tombolo string) {
	for _, pods := range []string{"0", "-1", "101"} {
		got := start(t, nstest.New(t), nil, tombolo+"-demo", "--pods", pods, tombolo+"-cni")
		if got.status != 1 || got.stdout != "" || got.stderr != "tombolo: demo with "+pods+" pods: it takes 1 to 100\n" {
			t.Errorf("%s pods: %+v", pods, got)
		}
	}
}

// nobody is an ordinary user's id.
const nobody = 65534

func testUserNamespace(t *testing.T, tombolo string) {
	attr := &syscall.SysProcAttr{
		// A network namespace too: to that of the host there would be no way back.
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: nobody, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: nobody, Size: 1}},
		Credential:  &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: true},
	}
	wantPattern(t, `(?s).* and 2 pods, .* left nothing\.\n\nTo share a NIC .* left out\.\n`, start(t, nstest.New(t), attr, tombolo+"-demo", "--pods", "2", tombolo+"-cni"))
}

func testNobody(t *testing.T, tombolo string) {
	attr := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	got := start(t, nstest.New(t), attr, tombolo+"-demo", tombolo+"-cni")
	if got.status != 1 || got.stdout != "" || !strings.Contains(got.stderr, "demo needs root") || !strings.Contains(got.stderr, "sudo") {
		t.Errorf("%+v", got)
	}
}

// testBroken puts plugins in the real one's place that do one thing less or otherwise.
func testBroken(t *testing.T, tombolo string) {
	edit := func(field string) string {
		return `/bin/sed 's/"type": "tombolo"/&, ` + field + `/' | "$tombolo"`
	}
	for name, tt := range map[string]struct {
		plugin string
		want   string // in the error
		after  string // begins a line that is printed before it
	}{
		"no plugin":                     {"", "ADD of pod1: find plugin", "POD "},
		"one that does nothing":         {`exit 0`, "ADD of pod1: result of plugin broken: plugin printed no valid CNI result", "POD "},
		"one that fails":                {`echo it hurts >&2; exit 3`, `ADD of pod1: run plugin broken: exit status 3; stderr: "it hurts"`, "POD "},
		"one that refuses":              {edit(`"nosuch": 1`), `ADD of pod1: unknown field "nosuch"`, "POD "},
		"one family only":               {`/bin/sed 's/, \[{"subnet": "fd22.*}\]]/]/' | "$tombolo"`, "ADD of pod1: the result has 1 addresses", "POD "},
		"pods kept apart":               {edit(`"portIsolation": true`), "pod1 to pod2: ping 10.22.0.3: ", "pod2 "},
		"no gateway":                    {edit(`"isGateway": false, "isDefaultGateway": false`), "pod1 to its gateway: ping 10.22.0.1: ", "pod2 "},
		"no masquerade":                 {edit(`"ipMasq": false`), "pod1 to the outside: not masqueraded: the host outside sees the pod's own address 10.22.0.2", "pod2 "},
		"a DEL that does nothing":       {`[ $CNI_COMMAND = DEL ] || "$tombolo"`, "after DEL there should be 0 veth ends, 0 owners of nf_tables elements, 0 reservations, 0 records and bridge cbr0, and there are 4 veth ends, 2 owners of nf_tables elements, 4 reservations, 2 records", "with 2 pods "},
		"another address on the LAN":    {`/bin/sed 's/"192.168.50.3/"192.168.50.4/' | "$tombolo"`, "the node to the container: ping 192.168.50.3: ", "DEL took"},
		"a DEL that fails":              {`[ $CNI_COMMAND = DEL ] && exit 1; "$tombolo"`, "DEL of pod1: run plugin broken: exit status 1", "with 2 pods "},
		"a DEL that forgets the record": {`[ $CNI_COMMAND = DEL ] && mkdir -p /run/keep && cp -r /run/tombolo/attachments /run/keep; "$tombolo" && { [ $CNI_COMMAND = ADD ] || cp -r /run/keep/attachments /run/tombolo; }`, "and there are 0 veth ends, 0 owners of nf_tables elements, 0 reservations, 2 records and", "with 2 pods "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			plugin := "/nosuch/plugin"
			if tt.plugin != "" {
				plugin = broken(t, tombolo+"-cni", tt.plugin)
			}
			var out bytes.Buffer
			err := Run(t.Context(), &out, plugin, 2)
			expect.That(t, err != nil && strings.Contains(err.Error(), tt.want), "got  %v\nwant …%s…", err, tt.want)
			if !strings.Contains(out.String(), "\n"+tt.after) || strings.Contains(out.String(), "left nothing") != (tt.after == "DEL took") || strings.Contains(out.String(), "kept its") {
				t.Errorf("want it to end after %q, and got\n%s", tt.after, out.String())
			}
		})
	}
}

// testCancel ends the context before the first ADD, and during it.
func testCancel(t *testing.T, tombolo string) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w := writerFunc(func(p []byte) (int, error) {
		cancel() // with the first line
		return len(p), nil
	})
	expect.Is(t, Run(ctx, w, tombolo+"-cni", 2), context.Canceled, "done before the first ADD")

	started := filepath.Join(t.TempDir(), "started")
	must.Succeed(t, unix.Mkfifo(started, 0o600))
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	hangs := broken(t, tombolo+"-cni", "echo yes >'"+started+"'; exec /bin/sleep 600")
	ended := make(chan error)
	go func() {
		ended <- Run(ctx, io.Discard, hangs, 2)
	}()
	said, err := os.ReadFile(started)
	expect.That(t, err == nil && string(said) == "yes\n", "the plugin said %q, %v", said, err)
	cancel()
	expect.Is(t, <-ended, context.Canceled, "done during the first ADD")
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// testKilled kills the program when it has begun, in the midst of its ADDs.
func testKilled(t *testing.T, tombolo string) {
	host := nstest.New(t)
	c := exec.Command(tombolo+"-demo", "--pods", "100", tombolo+"-cni")
	stdout := must.Of(c.StdoutPipe()).Get(t)
	must.Succeed(t, host.Do(c.Start))
	expect.Success(t, expect.Err(bufio.NewReader(stdout).ReadString('\n')))
	expect.Success(t, c.Process.Kill())
	expect.Failure(t, c.Wait(), "it ended before it was killed")
	wantUntouched(t, host)
}
