package cni

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

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
