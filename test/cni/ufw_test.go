package cni

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// ufwWrapper runs the real ufw with a configuration of its own.
const ufwWrapper = `#!/bin/sh
exec unshare --mount sh -ec 'cd "$0"; mount --bind etc /etc/ufw; mount --bind default /etc/default; mount -t tmpfs none /run; exec /usr/sbin/ufw "$@"' DIR "$@"
`

// ufw gives a way to run lines of shell on the node, in which ufw is one that is on.
func (n *node) ufw(t *testing.T) (do func(line string) string) {
	t.Helper()
	nstest.Need(t, "ufw")
	dir := t.TempDir()
	n.run("cp", "-a", "/etc/ufw", filepath.Join(dir, "etc"))
	n.run("cp", "-a", "/etc/default", filepath.Join(dir, "default"))
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "ufw"), []byte(strings.ReplaceAll(ufwWrapper, "DIR", dir)), 0o755))
	do = func(line string) string { return n.run("sh", "-ec", "PATH="+dir+":$PATH; "+line) }
	do("ufw --force enable")
	return do
}

// What ufw's user denies stops pods, and stays. doctor names the rule, and ufw has to forget it.
func TestUfwStopsPodsUntilItsUserDeletesTheRule(t *testing.T) {
	n := parallelNode(t)
	out := n.outside()
	nstest.Serve(t, out, "tcp4", netip.MustParseAddrPort("0.0.0.0:80"))
	nstest.Serve(t, out, "tcp6", netip.MustParseAddrPort("[::]:80"))
	w := n.portnet(nil)
	a := w.addPod("a")
	ufw := n.ufw(t)
	reaches := func(when, at string, want bool) {
		t.Helper()
		within := 300 * time.Millisecond
		if want {
			within = 10 * time.Second
		}
		_, err := nstest.AskWithin(t, a.NS, "tcp", netip.AddrPortFrom(nstest.Addr(at), 80), within)
		expect.That(t, (err == nil) == want, "%s: %s: %v", when, at, err)
	}
	n.operate("repair", "--state", n.state) // ufw's policy is DROP
	for rule, alone := range map[string]string{
		"deny from any": "", "reject in on cbr0 log-all comment mine": "", "deny in on cbr0 from fd00::/8": outside6,
	} {
		ufw("ufw route " + rule)
		for _, at := range []string{outside4, outside6} {
			reaches(rule, at, alone != "" && at != alone)
			o := n.operate("doctor", "--dns", "none", "--to", netip.AddrPortFrom(nstest.Addr(at), 80).String(), "--state", n.state, "a")
			if stopped := alone == "" || at == alone; stopped != (o.status == 4) ||
				stopped && (!strings.Contains(o.stdout, "-user-forward of table ip") || !strings.Contains(o.stdout, "see what it is made from: ufw status numbered, and ufw delete NUMBER")) {
				t.Errorf("%s: doctor about %s: %+v", rule, at, o)
			}
		}
		// There a rule is deleted by its words.
		ufw("ufw route delete " + strings.TrimSuffix(strings.Replace(rule, "log-all", "log-all from any", 1), " comment mine") + "; ufw reload")
		n.operate("repair", "--state", n.state) // tombolod's part
		for _, at := range []string{outside4, outside6} {
			reaches("after "+rule+" is deleted", at, true)
		}
		expect.Success(t, w.status(), "after %s", rule)
	}
}
