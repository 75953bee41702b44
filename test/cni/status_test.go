package cni

import (
	"context"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// small is an ipam section with room for so many pods.
func small(pods string) conf {
	return conf{"type": "host-local", "ranges": []any{
		[]any{conf{"subnet": subnet6}},
		[]any{conf{"subnet": subnet4, "rangeStart": "10.77.0.2", "rangeEnd": "10.77.0." + pods}},
	}}
}

func TestSTATUSOfAnEmptyNodeIsReadyAndMakesNothing(t *testing.T) {
	n := parallelNode(t)
	before := links(t, n.ns)
	for _, fields := range []conf{nil, {"mode": "l2", "ipam": nil}, {"ipam": fixed()}, {"ipam": fixed(conf{"address": "10.77.0.2/24"})}} {
		w := n.podnet(fields)
		expect.Success(t, w.status())
		expect.Equal(t, n.callOK(call{verb: "STATUS", stdin: w.stdin(nil)}), "", "STATUS printed")
	}
	_, err := os.Stat(n.state)
	expect.That(t, os.IsNotExist(err), "STATUS made the state directory: %v", err)
	expect.NoDiff(t, cmp.Diff(before, links(t, n.ns)), "links")
	expect.Equal(t, n.ruleset(), "", "STATUS made")
}

func TestSTATUSIsNotReadyWhereAPoolIsFull(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"ipam": small("3")})
	a, b := n.pod("a"), n.pod("b")
	w.add(a)
	expect.Success(t, w.status(), "with an address left")
	w.add(b)
	before := n.traces()
	wantError(t, w.status(), 50, "range 10.77.0.2-10.77.0.3 of 10.77.0.0/24 is full: 2 of 2 addresses reserved")
	wantError(t, expect.Err(w.tryAdd(n.pod("c"))), 100, "is full: 2 of 2 addresses reserved")
	n.wantTraces(before)
	// A full pool keeps no pod from going.
	w.del(a)
	expect.Success(t, w.status())
	w.add(n.pod("d"))
}

func TestSTATUSAsksTheDelegatedIPAM(t *testing.T) {
	n := parallelNode(t)
	wantError(t, n.podnet(conf{"ipam": conf{"type": "nosuch-ipam"}}).status(), 50, "nosuch-ipam")
	ready, _ := fake(t, fakeConf{})
	expect.Success(t, n.podnet(conf{"ipam": ready}).status())
	down, _ := fake(t, fakeConf{Fail: map[string]json.RawMessage{"STATUS": json.RawMessage(`{"code":51,"msg":"my server is down"}`)}})
	wantError(t, n.podnet(conf{"ipam": down}).status(), 51, "my server is down")
}

func TestSTATUSIsNotReadyWhereReservationsCannotBeWritten(t *testing.T) {
	n := parallelNode(t)
	ipam := small("3")
	ipam["dataDir"] = "/dev/null/reservations"
	w := n.podnet(conf{"ipam": ipam})
	wantError(t, w.status(), 50, "/dev/null/reservations")
	wantError(t, expect.Err(w.tryAdd(n.pod("a"))), 5, "/dev/null/reservations")
}

func TestSTATUSOfARunningNode(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"ipam": small("3")})
	unchanged := func() func() {
		before, rules, files := n.traces(), n.ruleset(), n.files(n.state)
		return func() {
			t.Helper()
			n.wantTraces(before)
			expect.NoDiff(t, cmp.Diff(rules, n.ruleset()), "rules")
			expect.NoDiff(t, cmp.Diff(files, n.files(n.state)), "files")
		}
	}
	w.add(n.pod("a"))
	compare := unchanged()
	expect.Success(t, w.status())
	compare()
	// It looks, whatever it answers.
	w.add(n.pod("b"))
	compare = unchanged()
	wantError(t, w.status(), 50, "is full")
	compare()
}

// The kernel of the test has br_netfilter built in, so what shows it is hidden.
func TestStatusTellsOfAMissingModuleAndWhatToDo(t *testing.T) {
	n := parallelNode(t)
	status := func(fields conf) outcome {
		t.Helper()
		w := n.podnet(fields)
		path := filepath.Join(t.TempDir(), "stdin")
		must.Succeed(t, os.WriteFile(path, w.stdin(nil), 0o600))
		o, err := n.exec(t.Context(), "/bin/sh", nil, append(os.Environ(), "CNI_COMMAND=STATUS"), "-c",
			`exec unshare -m sh -c 'mount -t tmpfs none /proc/sys/net/bridge && exec "$0" <"$1"' "$0" "$1"`, plugin(), path)
		must.Succeed(t, err)
		return o
	}
	o := status(nil)
	for _, want := range []string{`"code":50,`, "br_netfilter", "modprobe br_netfilter", "/etc/modules-load.d", "set bridgeNFCall to false"} {
		expect.That(t, o.status != 0 && strings.Contains(o.stdout, want),
			"status %d, no %q in %s%s", o.status, want, o.stdout, o.stderr)
	}
	for _, fields := range []conf{{"bridgeNFCall": false}, {"mode": "l2"}} {
		o := status(fields)
		expect.That(t, o.status == 0, "%v: %s%s", fields, o.stdout, o.stderr)
	}
}

// An ADD would fail, and so would its undoing.
func TestStatusOfAStateDirectoryThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	wantError(t, newNode(t).podnet(conf{"stateDir": "/dev/null/state"}).status(), 50, "/dev/null/state")
	for name, tc := range map[string]struct{ mount, harm, says string }{
		"full":             {"mount -t tmpfs -o size=64k none $D", "head -c 64k /dev/zero > $D/filler || true", "no space left on device"},
		"out of inodes":    {"mount -t tmpfs -o nr_inodes=8 none $D", "i=0; while touch $D/$i 2>/dev/null; do i=$((i+1)); done", "no space left on device"},
		"read-only":        {"mount -t tmpfs none $D", "mount -o remount,ro $D", "read-only file system"},
		"a read-only bind": {"mount -t tmpfs none $D; mount --bind $D $D", "mount -o remount,ro,bind $D", "read-only file system"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			dir := t.TempDir()
			n.state = dir + "/state" // not made yet
			script := func(line string) { n.run("sh", "-ec", strings.ReplaceAll(line, "$D", dir)) }
			script(tc.mount)
			t.Cleanup(func() { n.run("sh", "-c", "umount "+dir+"; umount "+dir+"; true") })
			w := n.podnet(conf{"ipam": fixed(conf{"address": "10.77.0.9/24", "gateway": gateway4})})
			must.Succeed(t, w.status())
			before := n.run("ls", "-A", dir)
			expect.Equal(t, before, "", "STATUS left")
			script(tc.harm)
			wantError(t, w.status(), 50, "the state directory "+n.state+" cannot be written: ")
			wantError(t, w.status(), 50, tc.says)
			expect.Failure(t, expect.Err(w.tryAdd(n.pod("a"))), "and an ADD succeeds")
		})
	}
}

// shownNetwork is what tombolo ls networks --json says of one.
type shownNetwork struct {
	Network, Mode, Bridge   string
	Subnets, Gateways, IPAM []string
	Masquerade, Guard       bool
	Attachments, Adding     int
	PoolNote                string
	Pools                   []shownPool
	Ports                   []shownPort
}

type shownPool struct {
	Range            string
	Family           int
	Size, Used, Free uint64
}

type shownPort struct {
	Protocol, HostIP, Pod, ContainerID string
	HostPort, PodPort                  int
}

// networks are those that tombolo ls networks shows.
func (n *node) networks(args ...string) []shownNetwork {
	n.Helper()
	o := n.operate(append([]string{"ls", "networks", "--json", "--state", n.state}, args...)...)
	var list []shownNetwork
	err := json.Unmarshal([]byte(o.stdout), &list)
	must.That(n, err == nil && o.status == 0 && o.stderr == "", "tombolo ls networks: %v: %+v", err, o)
	return list
}

// A network whose first ADD failed is none yet: nobody has pods to make anew, or to remove.
func TestNetworkWithoutASuccessfulADDIsNone(t *testing.T) {
	n := parallelNode(t)
	wantError(t, expect.Err(n.podnet(conf{"bridge": "lo"}).tryAdd(n.pod("a"))), 116, "not a bridge")
	got := n.networks()
	expect.That(t, len(got) == 0, "networks: %+v", got)
	o := n.operate("ls", "map", "--state", n.state)
	expect.That(t, o.status == 0 && strings.HasPrefix(o.stdout, "no network is on record\n"), "map: %+v", o)
	o = n.operate("ls", "networks", "--state", n.state, "podnet")
	expect.That(t, strings.Contains(o.stdout, "no ADD of it has succeeded\n"), "by its name: %+v", o)
	expect.Success(t, n.operate("remove", "--state", n.state, "podnet").err(), "remove")
	o = n.operate("ls", "networks", "--state", n.state, "podnet")
	expect.That(t, o.status == 1, "it is there after remove: %+v", o)
}

func TestNetworksShowWhatPodsHave(t *testing.T) {
	n := parallelNode(t)
	pool := func(first, last string) conf {
		return conf{"type": "host-local", "ranges": []any{[]any{conf{"subnet": subnet4, "rangeStart": first, "rangeEnd": last}}, []any{conf{"subnet": subnet6}}}}
	}
	w := n.portnet(conf{"ipam": pool("10.77.0.10", "10.77.0.13"), "ipMasq": true})
	pods := n.pods(3)
	for i, p := range pods {
		w.add(p, append(named(fmt.Sprintf("web-%d", i)), publish(t, fmt.Sprintf("%d:80/tcp", 8080+i)))...)
	}
	want := shownNetwork{
		Network: "podnet", Mode: "gateway", Bridge: "cbr0", Subnets: []string{subnet4, subnet6}, Gateways: []string{gateway4 + "/24", gateway6 + "/64"},
		IPAM: []string{"host-local"}, Masquerade: true, Attachments: 3,
		Pools: []shownPool{
			{"10.77.0.10-10.77.0.13 of 10.77.0.0/24", 4, 4, 3, 1},
			{"fd77::/64", 6, 1<<64 - 2, 3, 1<<64 - 5},
		},
	}
	for i, p := range pods {
		want.Ports = append(want.Ports, shownPort{"tcp", "", fmt.Sprintf("default/web-%d", i), p.id, 8080 + i, 80})
	}
	expect.NoDiff(t, cmp.Diff([]shownNetwork{want}, n.networks()), "networks")
	// Another pod's ADD tells of a larger range, without which there would be no address soon.
	rules := n.ruleset()
	larger := w.with(conf{"ipam": pool("10.77.0.10", "10.77.0.99")})
	next := larger.addPod("next")
	larger.del(next)
	want.Pools[0] = shownPool{"10.77.0.10-10.77.0.99 of 10.77.0.0/24", 4, 90, 3, 87}
	expect.NoDiff(t, cmp.Diff([]shownNetwork{want}, n.networks("podnet")), "with a larger range")
	expect.NoDiff(t, cmp.Diff(rules, n.ruleset()), "the range has changed rules")
	ipam, _ := fake(t, fakeConf{})
	d := n.network("delegated", conf{"bridge": "br1", "ipMasq": false, "isGateway": false, "ipam": ipam})
	d.add(n.pod("elsewhere"))
	if got := n.networks("delegated"); len(got) != 1 || len(got[0].Pools) > 0 || !strings.Contains(got[0].PoolNote, "unknown: the IPAM plugin") || got[0].Attachments != 1 {
		t.Errorf("a delegated IPAM's: %+v", got)
	}
	if o := n.operate("ls", "networks", "--state", n.state, "podne"); o.status != 1 || !strings.Contains(o.stderr, `no network "podne": those on record are delegated, podnet`) {
		t.Errorf("a mistyped name: %+v", o)
	}
	if o := n.operate("ls", "networks", "--state", n.state); o.status != 0 || !strings.Contains(o.stdout, "10.77.0.10-10.77.0.99 of 10.77.0.0/24: 3 of 90 in use, 87 free\n") ||
		!strings.Contains(o.stdout, "8081/tcp -> default/web-1 port 80 (container pod-1, eth0)\n") {
		t.Errorf("as text: %+v", o)
	}
}

// Nothing that is under way makes it fail, or say that something is damaged.
func TestNetworksAreShownBesideADDs(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	w.add(n.pod("first"))
	var busy sync.WaitGroup
	done := make(chan struct{})
	for _, p := range n.pods(2) {
		busy.Go(func() {
			for range 6 {
				c := call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)}
				o, err := n.exec(context.Background(), plugin(), c.stdin, c.environ())
				expect.That(t, err == nil && o.status == 0, "ADD: %v, %+v", err, o)
				c.verb = "DEL"
				o, err = n.exec(context.Background(), plugin(), c.stdin, c.environ())
				expect.That(t, err == nil && o.status == 0, "DEL: %v, %+v", err, o)
			}
		})
	}
	go func() { busy.Wait(); close(done) }()
	for looks := 0; ; looks++ {
		got := n.networks()
		expect.That(t, len(got) == 1 && got[0].Attachments >= 1 && got[0].Attachments <= 3, "%+v", got)
		select {
		case <-done:
			if got := n.networks(); got[0].Attachments != 1 || got[0].Adding != 0 || got[0].Pools[0].Used != 1 {
				t.Errorf("after %d looks: %+v", looks, got)
			}
			return
		default:
		}
	}
}

// terminal runs a command of the operator's whose stdout is a terminal, and gives what that gets.
func (n *node) terminal(columns uint16, environ []string, args ...string) string {
	n.Helper()
	master := must.Of(os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)).Get(n)
	defer master.Close()
	must.Succeed(n, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	number := must.Of(unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)).Get(n)
	slave := must.Of(os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY, 0)).Get(n)
	must.Succeed(n, unix.IoctlSetWinsize(int(slave.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns}))
	cmd := exec.Command(command(), args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = environ, slave, os.Stderr
	err := n.ns.Do(cmd.Start)
	slave.Close()
	must.Succeed(n, err)
	out, _ := io.ReadAll(master) // ends in EIO
	expect.Success(n, cmd.Wait(), "tombolo %q", args)
	return strings.ReplaceAll(string(out), "\r\n", "\n")
}

func TestTheMapShowsANodeAndWhatIsWrong(t *testing.T) {
	n := parallelNode(t)
	w := n.portnet(nil)
	evil := "x\x1b[2J<svg>&"
	web, hurt, other := n.pod("web"), n.pod("hurt"), n.pod("other")
	w.add(web, append(named("web"), publish(t, "8080:80/tcp"))...)
	w.add(hurt, named(evil)...)
	w.add(other, named("other")...)
	utf8 := []string{"LANG=C.UTF-8", "TERM=xterm"}
	if text := n.terminal(100, utf8, "ls", "map", "--state", n.state); !strings.HasSuffix(text, "nothing is wrong\n") || strings.Contains(text, "\x1b[31m") || !strings.Contains(text, "\x1b[1mbridge cbr0\x1b[m (MTU 1500) 10.77.0.1/24 fd77::1/64") {
		t.Errorf("a good node: %q", text)
	}
	n.ip("link set " + w.port(hurt) + " down")
	text := n.terminal(100, utf8, "ls", "map", "--state", n.state)
	red := regexp.MustCompile("\x1b\\[31m([^\x1b]*)\x1b\\[m").FindAllStringSubmatch(text, -1)
	expect.That(t, len(red) >= 2 && strings.HasPrefix(red[0][1], `✗ default/x\u001b[2J<svg>&  10.77.0.3 fd77::3`) && strings.Contains(red[1][1], w.port(hurt)),
		"red is %q in\n%s", red, text)
	for _, want := range []string{"└─ \x1b[1mnetwork podnet\x1b[m: gateway", "● default/web  10.77.0.2 fd77::2 ← 8080->80/tcp\n", "● default/other  10.77.0.4 fd77::4\n"} {
		expect.Contains(t, text, want)
	}
	expect.That(t, !strings.Contains(regexp.MustCompile("\x1b\\[(1|31)?m").ReplaceAllString(text, ""), "\x1b"),
		"a name has got to the terminal: %q", text)
	lines := strings.Count(text, "\n")
	narrow := n.terminal(50, utf8, "ls", "map", "--state", n.state)
	expect.That(t, strings.Count(narrow, "\n") > lines, "the width of the terminal is not followed:\n%s", narrow)
	for _, environ := range [][]string{append(utf8, "NO_COLOR=1"), {"TERM=dumb"}} {
		if text := n.terminal(100, environ, "ls", "map", "--state", n.state); strings.Contains(text, "\x1b") || !strings.Contains(text, "default/web") {
			t.Errorf("with %q: %q", environ, text)
		}
	}
	o := n.operate("ls", "map", "--state", n.state)
	expect.That(t, o.status == 0 && o.stderr == "" && !strings.Contains(o.stdout, "\x1b") && strings.Contains(o.stdout, "default/web"),
		"without a terminal: %+v", o)
	o = n.operate("ls", "map", "--svg", "--state", n.state)
	var svg struct {
		Texts []string `xml:"g>text"`
	}
	if err := xml.Unmarshal([]byte(o.stdout), &svg); err != nil || o.status != 0 || !strings.Contains(strings.Join(svg.Texts, "\n"), `default/x\u001b[2J<svg>&`) {
		t.Errorf("SVG: %v, %q", err, o.stdout)
	}
}

func TestTheOperatorsStatusSaysWhetherAllIsWell(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	want := func(when string, status int, lines ...string) {
		t.Helper()
		o := n.operate("status", "--state", n.state, "--leases", n.state+"-leases")
		expect.That(t, o.status == status && strings.HasSuffix(o.stdout, "\nall is well\n") == (status == 0) && strings.Count(o.stdout, "\n") <= 10,
			"%s: exit status %d\n%s%s", when, o.status, o.stdout, o.stderr)
		for _, line := range lines {
			expect.Contains(t, o.stdout, "\n"+line, "%s: no %q in", when, line)
		}
	}
	w.add(n.pod("a"))
	well := []string{"networks   podnet on cbr0\n", "pods       1\n", "leases     none\n", "keeper     tombolod does not run", "firewall   as it was set up\n", "drift      as it was set up\n"}
	want("with a pod", 0, well...)
	n.nft("flush ruleset")
	want("without the firewall", 4, "firewall   table ", "drift      as it was set up\n")
	n.operate("repair", "--state", n.state)
	want("repaired", 0, well...)
	n.ip("link set cbr0 down")
	want("with the bridge down", 4, "firewall   as it was set up\n", "drift      bridge cbr0: link is down")
	n.operate("repair", "--state", n.state)
	want("repaired again", 0, well...)
}

func TestRepairAndGCSayThatThereWasNothingToDo(t *testing.T) {
	n := parallelNode(t)
	n.podnet(nil).add(n.pod("a"))
	for command, want := range map[string]string{"repair": "nothing to repair\n", "gc": "nothing is left of dead pods\n", "check": "1 attachment: nothing differs\n"} {
		o := n.operate(command, "--state", n.state)
		expect.That(t, o.status == 0 && o.stdout == want && o.stderr == "", "%s: %+v", command, o)
	}
}
