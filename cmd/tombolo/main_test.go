package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/tombolo-cni/tombolo/internal/cni"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestMain(m *testing.M) { nstest.ProgramMain(m, main) }

// outcome is what a run of the command came to.
type outcome struct {
	status         int
	stdout, stderr string
}

// err is what went wrong, nil where nothing did.
func (o outcome) err() error {
	if o.status == 0 {
		return nil
	}
	return fmt.Errorf("%+v", o)
}

// run runs the command in a namespace, nil for the test's own, with further
// environment variables.
func run(t *testing.T, ns *netns.NS, env []string, stdin string, args ...string) outcome {
	t.Helper()
	cmd := exec.Command(must.Of(os.Executable()).Get(t), args...)
	cmd.Env, cmd.Stdin = env, strings.NewReader(stdin)
	var o outcome
	o.status, o.stdout, o.stderr = nstest.Finish(t, ns, cmd)
	return o
}

func below(c *cobra.Command) []*cobra.Command {
	list := []*cobra.Command{c}
	for _, sub := range c.Commands() {
		list = append(list, below(sub)...)
	}
	return list
}

func TestHelp(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	for _, c := range below((&options{}).root()) {
		words := strings.Fields(c.CommandPath())[1:]
		got := run(t, nil, nil, "", append(words, "--help")...)
		same := run(t, nil, nil, "", append([]string{"help"}, words...)...)
		expect.That(t, got.status == 0 && got.stderr == "" && got == same, "%q: %+v, and by help %+v", words, got, same)
		for line := range strings.Lines(got.stdout) {
			expect.That(t, len(line) <= 160, "%q: a line of %d bytes: %s", words, len(line), line)
		}
		text.WriteString("# " + c.CommandPath() + "\n" + got.stdout + "\n")
	}
	golden.Compare(t, "commands.txt", text.String())
}

func TestCommandLinesThatAreWrong(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ line, stderr string }{
		{"add", "unknown command \"add\" for \"tombolo\"\nsee tombolo --help\n"},
		{"lss", "unknown command \"lss\" for \"tombolo\"\n\nDid you mean this?\n\tls\nsee tombolo --help\n"},
		{"ls --yaml", "unknown flag: --yaml\nsee tombolo ls --help\n"},
		{"ls --jsno", "unknown flag: --jsno: did you mean --json?\nsee tombolo ls --help\n"},
		{"gc --dry-rnu --stat x", "unknown flag: --dry-rnu: did you mean --dry-run?\nsee tombolo gc --help\n"},
		{"gc --stat x", "unknown flag: --stat: did you mean --state?\nsee tombolo gc --help\n"},
		{"check -x", "unknown shorthand flag: 'x' in -x\nsee tombolo check --help\n"},
		{"ls --network", "flag needs an argument: --network\nsee tombolo ls --help\n"},
		{"uplink stauts eth0", "unknown command \"stauts\" for \"tombolo uplink\": did you mean status?\nsee tombolo uplink --help\n"},
		{"init everything", "unknown command \"everything\" for \"tombolo init\"\nsee tombolo init --help\n"},
		{"ls a b", "tombolo ls takes [POD]; given: a b\nsee tombolo ls --help\n"},
		{"check all", "tombolo check takes no arguments; given: all\nsee tombolo check --help\n"},
		{"remove", "tombolo remove takes NETWORK; given: none\nsee tombolo remove --help\n"},
		{"validate", "tombolo validate takes FILE...; given: none\nsee tombolo validate --help\n"},
		{"doctor --dns x", "the command line is wrong: --dns: ParseAddr(\"x\"): unable to parse IP\nsee tombolo doctor --help\n"},
	} {
		nstest.RunParallel(t, tt.line, func(t *testing.T) {
			want := outcome{exitUsage, "", "tombolo: " + tt.stderr}
			expect.NoDiff(t, cmp.Diff(want, run(t, nstest.New(t), nil, "", strings.Fields(tt.line)...), cmp.AllowUnexported(outcome{})), "outcome")
		})
	}
}

func TestWithoutRootACommandSaysWhatItLacks(t *testing.T) {
	t.Parallel()
	exe := must.Of(os.Executable()).Get(t)
	// Nobody can read what go test makes below a directory of root's.
	dir, err := os.MkdirTemp("/tmp", "tombolo-nobody-")
	must.Succeed(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	// By another process: a child of a test beside this one would inherit what it is written
	// by, and nothing can be executed that is open for writing (ETXTBSY).
	program := filepath.Join(dir, "tombolo")
	if out, err := exec.Command("install", "-m", "755", exe, program).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	must.Succeed(t, os.Chmod(dir, 0o755))
	nobody := func(args ...string) (o outcome) {
		cmd := exec.Command(program, args...)
		cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		o.status, o.stdout, o.stderr = nstest.Finish(t, nil, cmd)
		return o
	}
	closed := t.TempDir() // below a directory of root's
	for _, line := range []string{"status", "ls", "ls networks", "ls map", "check", "repair", "gc", "doctor", "leases", "remove pods", "uplink status", "uplink take lo br0"} {
		got := nobody(append(strings.Fields(line), "--state", closed, "--leases", closed)...)
		expect.That(t, got.status == exitFailed && got.stdout == "" &&
			strings.HasSuffix(got.stderr, ": run it as root; it needs CAP_NET_ADMIN and CAP_SYS_ADMIN\n"),
			"%s: %+v", line, got)
	}
	expect.Success(t, nobody("version").err(), "version")
	must.Succeed(t, os.Chmod(dir, 0o777))
	got := nobody("bugreport", dir+"/report", "--state", closed, "--leases", closed)
	expect.That(t, got.status == exitFailed && strings.Contains(got.stderr, ": run it as root;"), "bugreport: %+v", got)
}

func TestVersion(t *testing.T) {
	t.Parallel()
	got := run(t, nil, nil, "", "version")
	expect.That(t, got.status == 0 && got.stderr == "", "status %d: %s", got.status, got.stderr)
	first, second, _ := strings.Cut(got.stdout, "\n")
	for _, want := range []string{"tombolo ", "(commit ", "go1.", "linux/"} {
		expect.Contains(t, first, want)
	}
	want := "CNI 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0\n"
	expect.That(t, second == want, "second line is %q, want %q", second, want)

	var v struct {
		Version, Commit, Go string
		CNI                 []string
	}
	asJSON := run(t, nil, nil, "", "version", "--json")
	err := json.Unmarshal([]byte(asJSON.stdout), &v)
	must.That(t, err == nil, "%v: %q", err, asJSON.stdout)
	expect.That(t, v.Version != "" && v.Commit != "" && strings.Contains(first, v.Go), "version is %+v", v)
	expect.NoDiff(t, cmp.Diff(cni.SupportedVersions(), v.CNI), "CNI versions")
}

// forge makes a state directory with two networks and three attachments.
func forge(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state")
	d := must.Of(state.Open(dir)).Get(t)
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
			MAC: state.MAC{0x0a, 0x58, 0x0a, 0x3d, 0, 2}, HostMAC: state.MAC{2, 0, 0, 0, 0, 1}, Addresses: addresses("10.61.0.2/24", "fd61::2/64")},
		{Network: "pods", ContainerID: "unfinished", IfName: "eth0", Created: at, HostIf: "veth00000000002"},
		{Network: "lab", ContainerID: "c3", IfName: "net1", Created: at, HostIf: "veth00000000003", Up: true},
	} {
		pending, err := d.Create(a)
		must.Succeed(t, err)
		if a.ContainerID == "unfinished" {
			err = pending.Close()
		} else {
			err = pending.Commit(a)
		}
		must.Succeed(t, err)
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
		got := run(t, nstest.New(t), nil, "", args...)
		expect.That(t, got.status == 0 && got.stderr == "", "%v: status %d: %s", args, got.status, got.stderr)
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
		"":                               {[]string{"c3", "0123456789abcdef0123456789abcdef", "unfinished"}, ""},
		"web-0":                          {[]string{"0123456789abcdef0123456789abcdef"}, ""},
		"default/web-0":                  {[]string{"0123456789abcdef0123456789abcdef"}, ""},
		"0123":                           {[]string{"0123456789abcdef0123456789abcdef"}, ""},
		"--network pods":                 {[]string{"0123456789abcdef0123456789abcdef", "unfinished"}, ""},
		"default/web-*":                  {[]string{"0123456789abcdef0123456789abcdef"}, ""},
		"--network lab web-0":            {nil, ""},
		"nothing-*":                      {nil, ""},
		"c3 --network pods":              {nil, ""},
		"unfinished --network pods":      {[]string{"unfinished"}, ""},
		"web":                            {nil, `no pod "web": tombolo ls lists the pods`},
		"--network never":                {nil, `there is no network "never": those on record are lab, pods`},
		"[":                              {nil, `pod "[": syntax error in pattern`},
		"--network pods */* --state /no": {nil, "/no is no state directory: name the stateDir of the network's configuration"},
	} {
		nstest.RunParallel(t, line, func(t *testing.T) {
			args := append([]string{"ls", "--json", "--state", dir}, strings.Fields(line)...)
			got := run(t, nstest.New(t), nil, "", args...)
			if want.stderr != "" {
				expect.NoDiff(t, cmp.Diff(outcome{exitFailed, "", "tombolo: " + want.stderr + "\n"}, got, cmp.AllowUnexported(outcome{})), "outcome")
				return
			}
			var list []struct{ ContainerID string }
			err := json.Unmarshal([]byte(got.stdout), &list)
			must.That(t, err == nil && list != nil && got.status == 0 && got.stderr == "", "%v: %+v", err, got)
			var ids []string
			for _, a := range list {
				ids = append(ids, a.ContainerID)
			}
			expect.NoDiff(t, cmp.Diff(want.containers, ids), "containers")
		})
	}
	// What is wrong with others is not said.
	got := run(t, nstest.New(t), nil, "", "ls", "--state", dir, "unfinished")
	if want := "container unfinished, eth0 of network pods: its ADD did not finish [recreate pod]\n"; got.status != 0 || !strings.HasSuffix(got.stdout, "adding\n"+want) {
		t.Errorf("outcome is %+v", got)
	}
}

// Where there is nothing, every command says so in a line, and JSON is empty.
func TestOnANodeWithNothing(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"ls": "no pod is on record\n", "ls networks": "no network is on record\n", "ls map": "no network is on record\nnothing is wrong\n",
		"check": "0 attachments: nothing differs\n", "repair": "nothing to repair\n", "gc": "nothing is left of dead pods\n", "gc --dry-run": "nothing is left of dead pods\n",
		"leases": "no lease is on record\n", "doctor": "no pod is on record\n", "uplink status": "no NIC is shared or taken over\n",
		"ls --json": "[]\n", "ls networks --json": "[]\n", "gc --json": "[]\n", "leases --json": "[]\n", "doctor --json": "[]\n", "check --json": `{"attachments":[]}` + "\n",
	} {
		dir := t.TempDir()
		got := run(t, nstest.New(t), nil, "", append(strings.Fields(line), "--state", dir, "--leases", dir)...)
		expect.NoDiff(t, cmp.Diff(outcome{0, want, ""}, got, cmp.AllowUnexported(outcome{})), "%v", line)
		if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 && !strings.HasPrefix(line, "repair") && !strings.HasPrefix(line, "gc") {
			t.Errorf("%s made %v, %v", line, entries, err)
		}
	}
}

func TestStatusOfANodeWithNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	got := run(t, nstest.New(t), nil, "", "status", "--state", dir, "--leases", dir)
	_, rest, _ := strings.Cut(got.stdout, "\n")
	const want = `networks   none is on record: no ADD has succeeded since the boot, or --state is another directory
pods       none
leases     none
keeper     tombolod does not run, and no lease needs it
forwarding IPv4: none; IPv6: none
firewall   as it was set up
drift      as it was set up
all is well
`
	expect.That(t, got.status == 0 && got.stderr == "" && strings.HasPrefix(got.stdout, "node       ") && rest == want,
		"outcome is %+v", got)
}

func TestStatusOfWhatIsForged(t *testing.T) {
	t.Parallel()
	got := run(t, nstest.New(t), nil, "", "status", "--state", forge(t), "--leases", t.TempDir())
	for _, want := range []string{"\nnetworks   lab on -, pods on cbr0\n", "\npods       3, 3 of them not as they were made\n", "\ndrift      ", " more: tombolo check\n"} {
		expect.That(t, got.status == exitFound && strings.Contains(got.stdout, want) &&
			!strings.Contains(got.stdout, "all is well") && got.stderr == "tombolo: not all is well\n",
			"no %q in %+v", want, got)
	}
	var list []struct {
		Of, Is string
		Well   bool
	}
	got = run(t, nstest.New(t), nil, "", "status", "--json", "--state", forge(t))
	if err := json.Unmarshal([]byte(got.stdout), &list); err != nil || got.status != exitFound || len(list) != 8 || list[0].Of != "node" || !list[0].Well || list[7].Of != "drift" || list[7].Well {
		t.Errorf("%v, %+v", err, got)
	}
}

// Of a mistyped directory nothing good is to be said.
func TestAStateDirectoryThatIsNotThereIsAnError(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "never")
	for _, args := range [][]string{{"ls"}, {"ls", "networks"}, {"ls", "map"}, {"status"}, {"check"}, {"gc"}, {"repair"}, {"remove", "pods"}} {
		args = append(args, "--state", dir)
		want := outcome{exitFailed, "", "tombolo: " + dir + " is no state directory: name the stateDir of the network's configuration\n"}
		expect.NoDiff(t, cmp.Diff(want, run(t, nstest.New(t), nil, "", args...), cmp.AllowUnexported(outcome{})), "%v", args)
	}
	expect.Is(t, expect.Err(os.Stat(dir)), os.ErrNotExist, "one of them made it")
}

func TestNetworksAndMapOfWhatIsForged(t *testing.T) {
	t.Parallel()
	dir, empty := forge(t), t.TempDir()
	for _, tt := range []struct {
		line, stdout string
	}{
		{"ls networks --state " + empty, "no network is on record\n"},
		{"ls networks --json --state " + empty, "[]\n"},
		{"ls networks --state " + dir + " lab", "lab\n  record         missing: recreate its pods\n  pods           1\n  pool           none: pods get no addresses from an IPAM\n"},
		{"ls map --state " + empty, "no network is on record\nnothing is wrong\n"},
		{"ls map --state " + dir, "no bridge\n`- network lab: no record, 1 pod\n   x container c3\nbridge cbr0\n`- network pods: no record, 2 pods\n" +
			"   x container unfinished\n   x default/web-0  10.61.0.2 fd61::2\n\nwrong:\n  its network has no " +
			"record (affects container c3, default/web-0) [recreate\n    pod]\n  container unfinished, eth0 of " +
			"network pods: its ADD did not finish [recreate\n    pod]\n"},
	} {
		expect.Equal(t, run(t, nstest.New(t), nil, "", strings.Fields(tt.line)...), (outcome{0, tt.stdout, ""}), "%s", tt.line)
	}
}

// Damage goes to stderr, so that JSON stays JSON.
func TestLsTellsOfDamagedRecordsAndListsTheRest(t *testing.T) {
	t.Parallel()
	dir := forge(t)
	path := filepath.Join(dir, "attachments", "pods", "0000000000a.json")
	must.Succeed(t, os.WriteFile(path, []byte("{"), 0o600))
	got := run(t, nstest.New(t), nil, "", "ls", "--json", "--state", dir)
	var list []map[string]any
	err := json.Unmarshal([]byte(got.stdout), &list)
	expect.That(t, err == nil && len(list) == 3 && got.status == 0, "status %d, %d attachments, %v", got.status, len(list), err)
	want := "tombolo: record " + path + `: damaged: not valid JSON at line 1, column 2: it ends too early; a DEL or GC of the attachment removes it [recreate pod]` + "\n"
	expect.NoDiff(t, cmp.Diff(want, got.stderr), "stderr")
}

func TestCheckTellsWhatDiffersByItsExitStatus(t *testing.T) {
	t.Parallel()
	dir := forge(t)
	got := run(t, nstest.New(t), nil, "", "check", "--state", dir)
	expect.That(t, got.status == exitFound && strings.HasSuffix(got.stdout, "\n3 attachments, 3 of them differ\n"),
		"outcome is %+v", got)
	var in struct {
		Attachments []struct {
			Differences []struct{ Text, Remedy string }
		}
	}
	got = run(t, nstest.New(t), nil, "", "check", "--json", "--state", dir)
	if err := json.Unmarshal([]byte(got.stdout), &in); err != nil || got.status != exitFound || len(in.Attachments) != 3 ||
		len(in.Attachments[0].Differences) != 1 || in.Attachments[0].Differences[0].Remedy != "recreate pod" {
		t.Errorf("outcome is %+v, %v", got, err)
	}
}

func TestRepairSaysWhatIsLeft(t *testing.T) {
	t.Parallel()
	dir, ns := forge(t), nstest.New(t)
	got := run(t, ns, nil, "", "repair", "--state", dir)
	expect.That(t, got.status == exitFound && !strings.Contains(got.stdout, "repaired:") &&
		strings.Contains(got.stdout, "left: its network has no record (affects container c3, default/web-0) [recreate pod]\n"),
		"outcome is %+v", got)
	path := filepath.Join(dir, "networks", "pods.json")
	must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o700))
	must.Succeed(t, os.WriteFile(path, []byte("{"), 0o600))
	got = run(t, ns, nil, "", "repair", "--state", dir)
	expect.That(t, got.status == exitFound && strings.Contains(got.stderr, path) &&
		strings.Contains(got.stdout, "left: load network: record "+path),
		"outcome is %+v", got)
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
			`tombolo: open state directory: "relative": the path is not absolute` + "\n"}},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			expect.NoDiff(t, cmp.Diff(tt.want, run(t, nstest.New(t), nil, "", tt.args...), cmp.AllowUnexported(outcome{})), "outcome")
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
		must.Succeed(t, os.WriteFile(path, []byte(text), 0o600))
	}
	if got := run(t, nil, nil, "", "validate", good); got.status != 0 || got.stderr != "" || !strings.HasPrefix(got.stdout, good+": valid\n  bridge: network \"pods\" is on bridge cbr0") {
		t.Errorf("a good one: %+v", got)
	}
	odd := dir + "/odd.conf"
	must.Succeed(t, os.WriteFile(odd, []byte(`{"cniVersion": "1.0.0", "name": "pods", "type": "tombolo", "mode": "l2", "capabilities": {"portMapping": true}, "publishFrom": "lo, eth77 tcp, br0, ::/0"}`), 0o600))
	if got := run(t, nil, nil, "", "validate", odd); got.status != 0 || !strings.HasPrefix(got.stdout, odd+": valid\n  warning: capability \"portMapping\" has no effect") ||
		!strings.Contains(got.stdout, "\n  warning: publishFrom names link \"eth77\", which does not exist") || strings.Count(got.stdout, "names link") != 1 {
		t.Errorf("one that has a misspelt capability, and a link that does not exist: %+v", got)
	}
	got := run(t, nil, nil, "", "validate", good, bad)
	for _, want := range []string{good + ": valid\n", bad + ": invalid\n", "mtu 7 ", `"brigde"`} {
		expect.That(t, got.status == exitFound && strings.Contains(got.stdout, want),
			"a bad one: %+v; want %s", got, want)
	}
	if got := run(t, nil, nil, "", "validate", dir+"/none", bad); !strings.Contains(got.stdout, "mtu 7 ") {
		t.Errorf("what follows a file that is not there is passed over: %+v", got)
	}
	for from, to := range map[string]string{good: dir + "/list.conf", bad: dir + "/single.conflist"} {
		must.Succeed(t, os.Rename(from, to))
		if got := run(t, nil, nil, "", "validate", to); got.status != exitFound || !strings.Contains(got.stdout, "runtimes take a "+filepath.Ext(to)+" file only as ") {
			t.Errorf("a file whose name tells of the other form: %+v", got)
		}
	}
	got = run(t, nil, nil, "", "validate", dir+"/none")
	expect.That(t, got.status == exitFailed && strings.Contains(got.stderr, "none"), "no file: %+v", got)
}
