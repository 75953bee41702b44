package cni

import (
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

func TestTheOperatorsStatusSaysWhetherAllIsWell(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	w := n.podnet(nil)
	want := func(when string, status int, lines ...string) {
		t.Helper()
		o := n.operate("status", "--state", n.state, "--leases", n.state+"-leases")
		if o.status != status || strings.HasSuffix(o.stdout, "\nall is well\n") != (status == 0) || strings.Count(o.stdout, "\n") > 10 {
			t.Errorf("%s: exit status %d\n%s%s", when, o.status, o.stdout, o.stderr)
		}
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
	t.Parallel()
	n := newNode(t)
	n.podnet(nil).add(n.pod("a"))
	for command, want := range map[string]string{"repair": "nothing is to be repaired\n", "gc": "no dead pod has anything\n", "check": "1 attachment: nothing differs\n"} {
		o := n.operate(command, "--state", n.state)
		expect.That(t, o.status == 0 && o.stdout == want && o.stderr == "", "%s: %+v", command, o)
	}
}
