package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/golden"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
)

// runMain makes the test's own binary the command.
const runMain = "TOMBOLO_TEST_RUN_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(runMain) != "" {
		main()
		return
	}
	nstest.Main(m)
}

// outcome is what a run of the command came to.
type outcome struct {
	status         int
	stdout, stderr string
}

// tombolo runs the command in a namespace, nil for the test's own, with further
// environment variables.
func tombolo(t *testing.T, ns *netns.NS, env []string, stdin string, args ...string) outcome {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	cmd := exec.Command(exe, args...)
	cmd.Env = append([]string{runMain + "=1"}, env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errOut
	if ns == nil {
		err = cmd.Start()
	} else {
		err = ns.Do(cmd.Start)
	}
	if err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return outcome{cmd.ProcessState.ExitCode(), out.String(), errOut.String()}
}

func TestHelpIsAllThereIsToKnow(t *testing.T) {
	t.Parallel()
	got := tombolo(t, nil, nil, "", "help")
	if got.status != 0 || got.stderr != "" {
		t.Errorf("status %d: %s", got.status, got.stderr)
	}
	golden.Compare(t, "help.txt", got.stdout)
	for line := range strings.Lines(got.stdout) {
		if len(line) > 100 {
			t.Errorf("a line of %d bytes: %s", len(line), line)
		}
	}
}

func TestCommandLinesThatAreWrong(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		args   []string
		stderr string
	}{
		{[]string{"add"}, `tombolo: no command "add": see tombolo help` + "\n"},
		{[]string{"lss"}, `tombolo: no command "lss"; did you mean "ls"? see tombolo help` + "\n"},
		{[]string{"help", "repiar"}, `tombolo: no command "repiar"; did you mean "repair"? see tombolo help` + "\n"},
		{[]string{"ls", "--yaml"}, "tombolo: ls: flag provided but not defined: -yaml: see tombolo help\n"},
		{[]string{"ls", "a", "b"}, "tombolo: ls: 2 arguments given, 0 to 1 expected: see tombolo help\n"},
		{[]string{"remove"}, "tombolo: remove: 0 arguments given, 1 expected: see tombolo help\n"},
		{[]string{"remove", "a", "b"}, "tombolo: remove: 2 arguments given, 1 expected: see tombolo help\n"},
		{[]string{"demo", "--pods", "many"}, `tombolo: demo: invalid value "many" for flag -pods: parse error: see tombolo help` + "\n"},
		{nil, overview(commands()) + "tombolo: no command: see tombolo help\n"},
	} {
		t.Run(strings.Join(tt.args, " "), func(t *testing.T) {
			t.Parallel()
			want := outcome{exitUsage, "", tt.stderr}
			if diff := cmp.Diff(want, tombolo(t, nil, nil, "", tt.args...), cmp.AllowUnexported(outcome{})); diff != "" {
				t.Errorf("outcome (-want +got):\n%s", diff)
			}
		})
	}
}

func TestEveryCommandSaysWhatItTakesAndHowItExits(t *testing.T) {
	t.Parallel()
	var all strings.Builder
	for _, c := range commands() {
		want := c.describe()
		for _, args := range [][]string{
			append(strings.Fields(c.name), "--help"),
			append(strings.Fields(c.name), "-h"),
			append([]string{"help"}, strings.Fields(c.name)...),
		} {
			if diff := cmp.Diff(outcome{0, want, ""}, tombolo(t, nil, nil, "", args...), cmp.AllowUnexported(outcome{})); diff != "" {
				t.Errorf("%q (-want +got):\n%s", args, diff)
			}
		}
		for _, s := range append(common(), c.statuses...) {
			if !strings.Contains(want, fmt.Sprintf("\n  %d  %s", s.code, s.text)) {
				t.Errorf("help of %s does not have exit status %d:\n%s", c.name, s.code, want)
			}
		}
		for _, f := range c.flags() {
			if f.text == "" {
				t.Errorf("flag --%s of %s has no help", f.name, c.name)
			}
		}
		all.WriteString(want + "\n")
	}
	golden.Compare(t, "commands.txt", all.String())
	for _, args := range [][]string{{"uplink", "--help"}, {"help", "uplink"}} {
		got := tombolo(t, nil, nil, "", args...)
		if got.status != 0 || strings.Count(got.stdout, "usage: tombolo uplink ") != len(group(commands(), "uplink")) {
			t.Errorf("%q: %+v", args, got)
		}
	}
	if got, want := tombolo(t, nil, nil, "", "--help"), tombolo(t, nil, nil, "", "help"); got != want {
		t.Errorf("--help: %+v", got)
	}
	if got, want := tombolo(t, nil, nil, "", "--version"), tombolo(t, nil, nil, "", "version"); got != want || got.status != 0 {
		t.Errorf("--version: %+v", got)
	}
}

func TestFlagsMayStandAmongArguments(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		line       []string
		json       bool
		state      string
		args       []string
		wantFailed bool
	}{
		{line: []string{"pods", "--json", "more", "--state", "d"}, json: true, state: "d", args: []string{"pods", "more"}},
		{line: []string{"--json", "--", "--state", "-x"}, json: true, args: []string{"--state", "-x"}},
		{line: []string{"a", "--", "--json"}, args: []string{"a", "--json"}},
		{line: nil},
		{line: []string{"a", "--nothing"}, wantFailed: true},
	} {
		flags := flag.NewFlagSet("t", flag.ContinueOnError)
		flags.SetOutput(io.Discard)
		asJSON, dir := flags.Bool("json", false, ""), flags.String("state", "", "")
		args, err := parse(flags, tt.line)
		if failed := err != nil; failed != tt.wantFailed || *asJSON != tt.json || *dir != tt.state {
			t.Errorf("%q: json %v, state %q, %v", tt.line, *asJSON, *dir, err)
		}
		if diff := cmp.Diff(tt.args, args); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tt.line, diff)
		}
	}
}

// A command that root alone can run says so before it fails in the midst of its work.
func TestWithoutRootACommandSaysWhatItLacks(t *testing.T) {
	t.Parallel()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// Nobody can read what go test makes below a directory of root's.
	dir, err := os.MkdirTemp("/tmp", "tombolo-nobody-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	// By another process: a child of a test beside this one would inherit what it is written
	// by, and nothing can be executed that is open for writing (ETXTBSY).
	program := filepath.Join(dir, "tombolo")
	if out, err := exec.Command("install", "-m", "755", exe, program).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	nobody := func(args ...string) outcome {
		var out, errOut bytes.Buffer
		cmd := exec.Command(program, args...)
		cmd.Dir, cmd.Env = "/", []string{runMain + "=1"}
		cmd.Stdout, cmd.Stderr = &out, &errOut
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		var exit *exec.ExitError
		if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return outcome{cmd.ProcessState.ExitCode(), out.String(), errOut.String()}
	}
	privileged := 0
	for _, c := range commands() {
		if !c.privileged {
			continue
		}
		privileged++
		args := append(strings.Fields(c.name), "a", "b")
		if _, most := c.count(); most >= 0 {
			args = args[:len(strings.Fields(c.name))+min(most, 2)]
		}
		want := outcome{exitFailed, "", "tombolo: " + c.name + ": user 65534 lacks CAP_NET_ADMIN and CAP_SYS_ADMIN: run it as root, with sudo for example\n"}
		if diff := cmp.Diff(want, nobody(args...), cmp.AllowUnexported(outcome{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
	if privileged < 5 {
		t.Errorf("%d commands need privileges: the search cannot be right", privileged)
	}
	closed := t.TempDir() // below a directory of root's
	if got := nobody("leases", "--leases", closed); got.status != exitFailed || !strings.HasSuffix(got.stderr, "permission denied: run it as root\n") {
		t.Errorf("leases: %+v", got)
	}
	if got := nobody("networks", "--state", closed); got.status != exitFailed || !strings.HasSuffix(got.stderr, "permission denied: run it as root\n") {
		t.Errorf("networks: %+v", got)
	}
	if got := nobody("version"); got.status != 0 {
		t.Errorf("version: %+v", got)
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	got := tombolo(t, nil, nil, "", "version")
	if got.status != 0 || got.stderr != "" {
		t.Errorf("status %d: %s", got.status, got.stderr)
	}
	first, second, _ := strings.Cut(got.stdout, "\n")
	for _, want := range []string{"tombolo ", "(commit ", "go1.", "linux/"} {
		if !strings.Contains(first, want) {
			t.Errorf("no %q in %q", want, first)
		}
	}
	if want := "CNI 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0\n"; second != want {
		t.Errorf("second line is %q, want %q", second, want)
	}

	var v struct {
		Version, Commit, Go string
		CNI                 []string
	}
	asJSON := tombolo(t, nil, nil, "", "version", "--json")
	if err := json.Unmarshal([]byte(asJSON.stdout), &v); err != nil {
		t.Fatalf("%v: %q", err, asJSON.stdout)
	}
	if v.Version == "" || v.Commit == "" || !strings.Contains(first, v.Go) {
		t.Errorf("version is %+v", v)
	}
	if diff := cmp.Diff(cni.SupportedVersions(), v.CNI); diff != "" {
		t.Errorf("CNI versions (-want +got):\n%s", diff)
	}
}

// forge makes a state directory with two networks and three attachments.
func forge(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	d, err := state.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	addresses := func(texts ...string) []ipam.Address {
		var list []ipam.Address
		for _, s := range texts {
			list = append(list, ipam.Address{Prefix: nstest.Prefix(s)})
		}
		return list
	}
	for _, a := range []*state.Attachment{
		{Network: "pods", ContainerID: "0123456789abcdef0123456789abcdef", IfName: "eth0", Pod: "default/web-0", Created: at,
			HostIf: "veth00000000001", Bridge: "cbr0", MTU: 1500, Up: true, Masquerade: true, IPAMType: "host-local",
			MAC: "0a:58:0a:3d:00:02", HostMAC: "02:00:00:00:00:01", Addresses: addresses("10.61.0.2/24", "fd61::2/64")},
		{Network: "pods", ContainerID: "unfinished", IfName: "eth0", Created: at, HostIf: "veth00000000002"},
		{Network: "lab", ContainerID: "c3", IfName: "net1", Created: at, HostIf: "veth00000000003", Up: true},
	} {
		pending, err := d.Create(a)
		if err != nil {
			t.Fatal(err)
		}
		if a.ContainerID == "unfinished" {
			err = pending.Close()
		} else {
			err = pending.Commit(a)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestLsListsTheAttachmentsOfAllNetworks(t *testing.T) {
	t.Parallel()
	dir := forge(t)
	for name, args := range map[string][]string{
		"ls.txt":  {"ls", "--state", dir},
		"ls.json": {"ls", "--json", "--state", dir},
	} {
		got := tombolo(t, nstest.New(t), nil, "", args...)
		if got.status != 0 || got.stderr != "" {
			t.Errorf("%v: status %d: %s", args, got.status, got.stderr)
		}
		golden.Compare(t, name, got.stdout)
	}
}

func TestLsListsWhatIsAskedFor(t *testing.T) {
	t.Parallel()
	dir := forge(t)
	for line, want := range map[string]struct {
		containers []string
		stderr     string
	}{
		"":                                     {[]string{"c3", "0123456789abcdef0123456789abcdef", "unfinished"}, ""},
		"web-0":                                {[]string{"0123456789abcdef0123456789abcdef"}, ""},
		"default/web-0":                        {[]string{"0123456789abcdef0123456789abcdef"}, ""},
		"0123":                                 {[]string{"0123456789abcdef0123456789abcdef"}, ""},
		"--network pods":                       {[]string{"0123456789abcdef0123456789abcdef", "unfinished"}, ""},
		"--pod default/web-*":                  {[]string{"0123456789abcdef0123456789abcdef"}, ""},
		"--network lab --pod web-0":            {nil, ""},
		"c3 --network pods":                    {nil, ""},
		"unfinished --network pods":            {[]string{"unfinished"}, ""},
		"web":                                  {nil, `no pod "web": tombolo ls lists those that there are`},
		"--network never":                      {nil, `there is no network "never": those on record are lab, pods`},
		"--pod [":                              {nil, `pod "[": syntax error in pattern`},
		"--network pods --pod */* --state /no": {nil, "/no is no state directory: name the stateDir of the network's configuration"},
	} {
		t.Run(line, func(t *testing.T) {
			t.Parallel()
			args := append([]string{"ls", "--json", "--state", dir}, strings.Fields(line)...)
			got := tombolo(t, nstest.New(t), nil, "", args...)
			if want.stderr != "" {
				if diff := cmp.Diff(outcome{exitFailed, "", "tombolo: " + want.stderr + "\n"}, got, cmp.AllowUnexported(outcome{})); diff != "" {
					t.Errorf("outcome (-want +got):\n%s", diff)
				}
				return
			}
			var list []struct{ ContainerID string }
			if err := json.Unmarshal([]byte(got.stdout), &list); err != nil || list == nil || got.status != 0 || got.stderr != "" {
				t.Fatalf("%v: %+v", err, got)
			}
			var ids []string
			for _, a := range list {
				ids = append(ids, a.ContainerID)
			}
			if diff := cmp.Diff(want.containers, ids); diff != "" {
				t.Errorf("containers (-want +got):\n%s", diff)
			}
		})
	}
	// What is wrong with others is not said.
	got := tombolo(t, nstest.New(t), nil, "", "ls", "--state", dir, "unfinished")
	if want := "container unfinished, eth0 of network pods: its ADD did not finish [recreate pod]\n"; got.status != 0 || !strings.HasSuffix(got.stdout, "adding\n"+want) {
		t.Errorf("outcome is %+v", got)
	}
}

func TestLsWhereThereIsNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"ls", "--state", dir}, "NETWORK  POD  CONTAINER  INTERFACE  PORT  ADDRESSES  HOST PORTS  IN/OUT  STATE\n"},
		{[]string{"ls", "--json", "--state", dir}, "[]\n"},
	} {
		if diff := cmp.Diff(outcome{0, tt.want, ""}, tombolo(t, nstest.New(t), nil, "", tt.args...), cmp.AllowUnexported(outcome{})); diff != "" {
			t.Errorf("%v (-want +got):\n%s", tt.args, diff)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("ls made %v, %v", entries, err)
	}
}

// Of a mistyped directory nothing good is to be said.
func TestAStateDirectoryThatIsNotThereIsAnError(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "never")
	for _, args := range [][]string{{"ls"}, {"networks"}, {"map"}, {"check"}, {"repair"}, {"remove", "pods"}} {
		args = append([]string{args[0], "--state", dir}, args[1:]...)
		want := outcome{exitFailed, "", "tombolo: " + dir + " is no state directory: name the stateDir of the network's configuration\n"}
		if diff := cmp.Diff(want, tombolo(t, nstest.New(t), nil, "", args...), cmp.AllowUnexported(outcome{})); diff != "" {
			t.Errorf("%v (-want +got):\n%s", args, diff)
		}
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("one of them made it: %v", err)
	}
}

func TestNetworksAndMapOfWhatIsForged(t *testing.T) {
	t.Parallel()
	dir, empty := forge(t), t.TempDir()
	for _, tt := range []struct {
		line, stdout string
	}{
		{"networks --state " + empty, "no network is on record\n"},
		{"networks --json --state " + empty, "[]\n"},
		{"networks --state " + dir + " lab", "lab\n  record         none of the network itself: recreate its pods\n  pods           1\n  pool           none: pods get no addresses from an IPAM\n"},
		{"map --state " + empty, "no network is on record\nnothing is wrong\n"},
		{"map --state " + dir, "no bridge\n`- network lab: no record, 1 pod\n   x container c3\nbridge cbr0\n`- network pods: no record, 2 pods\n" +
			"   x container unfinished\n   x default/web-0         10.61.0.2 fd61::2\n\nwrong:\n  its network has no record (2 pods affected) [recreate pod]\n" +
			"  container unfinished, eth0 of network pods: its ADD did not finish [recreate\n    pod]\n"},
	} {
		if got := tombolo(t, nstest.New(t), nil, "", strings.Fields(tt.line)...); got != (outcome{0, tt.stdout, ""}) {
			t.Errorf("%s: %+v", tt.line, got)
		}
	}
}

// Damage goes to stderr, so that JSON stays JSON.
func TestLsTellsOfDamagedRecordsAndListsTheRest(t *testing.T) {
	t.Parallel()
	dir := forge(t)
	path := filepath.Join(dir, "attachments", "pods", "0000000000a.json")
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	got := tombolo(t, nstest.New(t), nil, "", "ls", "--json", "--state", dir)
	var list []map[string]any
	if err := json.Unmarshal([]byte(got.stdout), &list); err != nil || len(list) != 3 || got.status != 0 {
		t.Errorf("status %d, %d attachments, %v", got.status, len(list), err)
	}
	want := "tombolo: record " + path + `: damaged: not valid JSON at line 1, column 2: it ends too early; a DEL or GC of the attachment removes it [recreate pod]` + "\n"
	if diff := cmp.Diff(want, got.stderr); diff != "" {
		t.Errorf("stderr (-want +got):\n%s", diff)
	}
}

func TestCheckTellsWhatDiffersByItsExitStatus(t *testing.T) {
	t.Parallel()
	want := outcome{0, "0 attachments\n", ""}
	if diff := cmp.Diff(want, tombolo(t, nstest.New(t), nil, "", "check", "--state", t.TempDir()), cmp.AllowUnexported(outcome{})); diff != "" {
		t.Errorf("where there is nothing (-want +got):\n%s", diff)
	}
	dir := forge(t)
	got := tombolo(t, nstest.New(t), nil, "", "check", "--state", dir)
	if got.status != exitDiffers || !strings.HasSuffix(got.stdout, "\n3 attachments, 3 of them differ\n") {
		t.Errorf("outcome is %+v", got)
	}
	var in struct {
		Attachments []struct {
			Differences []struct{ Text, Remedy string }
		}
	}
	got = tombolo(t, nstest.New(t), nil, "", "check", "--json", "--state", dir)
	if err := json.Unmarshal([]byte(got.stdout), &in); err != nil || got.status != exitDiffers || len(in.Attachments) != 3 ||
		len(in.Attachments[0].Differences) != 1 || in.Attachments[0].Differences[0].Remedy != "recreate pod" {
		t.Errorf("outcome is %+v, %v", got, err)
	}
}

func TestRepairSaysWhatIsLeft(t *testing.T) {
	t.Parallel()
	dir := forge(t)
	got := tombolo(t, nstest.New(t), nil, "", "repair", "--state", dir)
	if got.status != exitDiffers || strings.Contains(got.stdout, "repaired:") || !strings.Contains(got.stdout, "left: its network has no record (2 pods affected) [recreate pod]\n") {
		t.Errorf("outcome is %+v", got)
	}
	path := filepath.Join(dir, "networks", "pods.json")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	got = tombolo(t, nstest.New(t), nil, "", "repair", "--state", dir)
	if got.status != exitDiffers || !strings.Contains(got.stderr, path) || !strings.Contains(got.stdout, "left: load network: record "+path) {
		t.Errorf("outcome is %+v", got)
	}
	if got := tombolo(t, nstest.New(t), nil, "", "repair", "--state", t.TempDir()); got != (outcome{}) {
		t.Errorf("where nothing is to be repaired: %+v", got)
	}
}

func TestRemove(t *testing.T) {
	t.Parallel()
	dir := forge(t)
	for _, tt := range []struct {
		name string
		args []string
		want outcome
	}{
		{"a network that never was", []string{"remove", "--state", dir, "never"}, outcome{exitFailed, "",
			`tombolo: there is no network "never": those on record are lab, pods` + "\n"}},
		{"one that has attachments", []string{"remove", "--state", dir, "pods"}, outcome{exitAttached, "",
			`tombolo: network "pods" has 2 attachments: remove the pods first; tombolo gc reclaims 2 attachments whose pods are gone` + "\n"}},
		{"what cannot be a network", []string{"remove", "--state", dir, "a/b"}, outcome{exitFailed, "",
			`tombolo: "a/b" is not the name of a network` + "\n"}},
		{"in a directory that cannot be one", []string{"remove", "--state", "relative", "pods"}, outcome{exitFailed, "",
			`tombolo: open state directory "relative": the path is not absolute` + "\n"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tt.want, tombolo(t, nstest.New(t), nil, "", tt.args...), cmp.AllowUnexported(outcome{})); diff != "" {
				t.Errorf("outcome (-want +got):\n%s", diff)
			}
		})
	}
}

func TestValidateTellsScripts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	good, bad := filepath.Join(dir, "good.conflist"), filepath.Join(dir, "bad.conf")
	for path, text := range map[string]string{
		good: `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "tombolo", "ipam": {"type": "host-local", "subnet": "10.22.0.0/16"}}]}`,
		bad:  `{"cniVersion": "1.0.0", "name": "pods", "type": "tombolo", "mtu": 7, "brigde": "cbr0"}`,
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got := tombolo(t, nil, nil, "", "validate", good); got.status != 0 || got.stderr != "" || !strings.HasPrefix(got.stdout, good+": valid\n  bridge: network \"pods\" is on bridge cbr0") {
		t.Errorf("a good one: %+v", got)
	}
	odd := dir + "/odd.conf"
	if err := os.WriteFile(odd, []byte(`{"cniVersion": "1.0.0", "name": "pods", "type": "tombolo", "mode": "l2", "capabilities": {"portMapping": true}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := tombolo(t, nil, nil, "", "validate", odd); got.status != 0 || !strings.HasPrefix(got.stdout, odd+": valid\n  warning: capability \"portMapping\" has no effect") {
		t.Errorf("one that has a misspelt capability: %+v", got)
	}
	got := tombolo(t, nil, nil, "", "validate", good, bad)
	for _, want := range []string{good + ": valid\n", bad + ": invalid\n", "mtu 7 ", `"brigde"`} {
		if got.status != exitDiffers || !strings.Contains(got.stdout, want) {
			t.Errorf("a bad one: %+v; want %s", got, want)
		}
	}
	if got := tombolo(t, nil, nil, "", "validate", dir+"/none", bad); !strings.Contains(got.stdout, "mtu 7 ") {
		t.Errorf("what follows a file that is not there is passed over: %+v", got)
	}
	if got := tombolo(t, nil, nil, "", "validate", "/dev/zero"); got.status != exitFailed || !strings.Contains(got.stderr, "more than 16 MiB") {
		t.Errorf("a file without an end: %+v", got)
	}
	for from, to := range map[string]string{good: dir + "/list.conf", bad: dir + "/single.conflist"} {
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
		if got := tombolo(t, nil, nil, "", "validate", to); got.status != exitDiffers || !strings.Contains(got.stdout, "runtimes take a "+filepath.Ext(to)+" file only as ") {
			t.Errorf("a file whose name tells of the other form: %+v", got)
		}
	}
	if got := tombolo(t, nil, nil, "", "validate", dir+"/none"); got.status != exitFailed || !strings.Contains(got.stderr, "none") {
		t.Errorf("no file: %+v", got)
	}
}
