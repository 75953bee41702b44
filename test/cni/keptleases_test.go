package cni

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// leaseRecords are the files of records.
func (l *lan) leaseRecords(t *testing.T) []string {
	t.Helper()
	return must.Of(filepath.Glob(l.state + "-leases/*.json")).Get(t)
}

// rewrite changes a field of the lease records, while no keeper runs.
func (l *lan) rewrite(t *testing.T, field, value string) {
	t.Helper()
	for _, path := range l.leaseRecords(t) {
		text := regexp.MustCompile(`"`+field+`":"[^"]*"`).ReplaceAllString(readFile(t, path), `"`+field+`":"`+value+`"`)
		must.Succeed(t, os.WriteFile(path, []byte(text), 0o600))
	}
}

func TestALeaseOfAnEarlierBootIsReleased(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional"}})
	p := l.pod("a")
	w.add(p)
	l.rewrite(t, "boot", "00000000-0000-4000-8000-000000000000")
	l.keep(t)
	l.eventually(t, func() bool { return l.leased() == "" && len(l.leaseRecords(t)) == 0 })
	w.del(p)
}

// What an ADD that was killed has left goes with its pod.
func TestTheRecordOfADeadADDGoesWithItsPod(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	l.dies(t, l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional"}}))
	l.rewrite(t, "state", "adding")
	must.Succeed(t, os.RemoveAll(l.state+"/attachments"))
	l.keep(t)
	l.eventually(t, func() bool { return len(l.leaseRecords(t)) == 0 })
}

// A path names another pod's namespace by now; nothing leaves by an interface that is down.
func TestAReleaseLeavesByNoOtherPod(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(nil)
	a, b := l.pod("a"), l.pod("b")
	now := filepath.Join(t.TempDir(), "netns")
	lead := func(p *pod) {
		t.Helper()
		_ = os.Remove(now)
		must.Succeed(t, os.Symlink(p.path, now))
	}
	lead(a)
	own := a.path
	a.path = now
	gone := ip4(w.add(a)).String()
	w.add(b)
	lead(b)
	nstest.Run(t, b.NS, "ip", "link", "set", "eth0", "down")
	w.del(a)
	l.wantReleased(t, gone)
	a.path = own
}

func TestARememberedLeaseIsForgottenWhenItEnds(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "clientID": "pod"}})
	p, named := l.pod("a"), []option{arg("K8S_POD_NAMESPACE", "default"), arg("K8S_POD_NAME", "db-0"), arg("IgnoreUnknown", "1")}
	w.add(p, named...)
	w.del(p, named...)
	k := l.keep(t)
	k.kill()
	must.That(t, len(l.leaseRecords(t)) > 0, "nothing is remembered")
	for _, field := range []string{"obtained", "renew", "rebind", "expire", "booted"} {
		l.rewrite(t, field, "2001-02-03T04:05:06Z")
	}
	l.keep(t)
	l.eventually(t, func() bool { return len(l.leaseRecords(t)) == 0 })
}

func TestAnAddressThatAPodLosesIsPutBack(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional"}})
	p := l.pod("a")
	own := w.add(p).IPs[0].Address.String()
	before := l.acks(t)
	l.makeDue(t, w, p)
	l.keep(t)
	l.eventually(t, func() bool { return l.acks(t) > before })
	// It looks some seconds after each renewal, else every five minutes.
	nstest.Run(t, p.NS, "ip", "-4", "address", "flush", "dev", "eth0")
	l.eventually(t, func() bool { return strings.Join(globals(t, p.NS, "eth0"), " ") == own })
	l.eventually(t, func() bool { return w.check(p) == nil })
}

// To the server both are the same client.
func TestADeadPodsLeaseStaysWithItsSuccessor(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "clientID": "mac"}})
	named := []option{arg("K8S_POD_NAMESPACE", "default"), arg("K8S_POD_NAME", "db-0"), arg("IgnoreUnknown", "1")}
	was := ip4(l.dies(t, w, named...))
	p := l.pod("next")
	is := ip4(w.add(p, named...))
	must.That(t, is == was, "the successor has %s, want %s", is, was)
	l.keep(t)
	l.eventually(t, func() bool { return len(l.leaseRecords(t)) == 1 })
	if got := l.leased(); !strings.Contains(got, was.String()) || strings.Contains(nstest.ReadIf(t, l.log), "DHCPRELEASE(") {
		t.Errorf("the server has taken %s back:\n%s", was, got)
	}
}

// The server has forgotten whose the address was: it gives the next one that is free, unless one is asked for. A GC, which
// names no pod, takes nothing of it.
func TestARememberedAddressIsAskedForAgain(t *testing.T) {
	t.Parallel()
	const inTurn = "--dhcp-sequential-ip"
	l := newLAN(t, inTurn)
	w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "clientID": "pod"}})
	named := func(name string) []option {
		return []option{arg("K8S_POD_NAMESPACE", "default"), arg("K8S_POD_NAME", name), arg("IgnoreUnknown", "1")}
	}
	first, p := l.pod("first"), l.pod("a")
	w.add(first, named("first")...)
	was := ip4(w.add(p, named("db-0")...))
	w.del(first)
	w.del(p)
	w.gc()
	expect.That(t, !strings.Contains(nstest.ReadIf(t, l.log), "DHCPRELEASE("),
		"the address of a pod that may come back was released")
	l.server.Stop()
	must.Succeed(t, os.RemoveAll(l.leases))
	must.Succeed(t, os.RemoveAll(l.log))
	l.serve(t, inTurn)
	is := ip4(w.add(l.pod("again"), named("db-0")...))
	expect.That(t, is == was, "the pod had %s, and its next container has %s: it did not ask", was, is)
}

// The pod, and all that was on record below /run, went with the boot; the server has forgotten whose the address was.
func TestARebootKeepsTheAddressOfAPod(t *testing.T) {
	t.Parallel()
	const inTurn = "--dhcp-sequential-ip"
	l := newLAN(t, inTurn)
	w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "clientID": "pod"}})
	named := []option{arg("K8S_POD_NAMESPACE", "default"), arg("K8S_POD_NAME", "db-0"), arg("IgnoreUnknown", "1")}
	first := l.pod("first")
	w.add(first, append(named[:2:2], arg("K8S_POD_NAME", "first"), arg("IgnoreUnknown", "1"))...)
	was := ip4(l.dies(t, w, named...))
	w.del(first)
	l.rewrite(t, "boot", "00000000-0000-4000-8000-000000000000")
	must.Succeed(t, os.RemoveAll(l.state))
	k := l.keep(t)
	l.eventually(t, func() bool {
		return !slices.ContainsFunc(l.leaseRecords(t), func(path string) bool { return !strings.Contains(readFile(t, path), `"state":"sticky"`) })
	})
	k.kill()
	l.server.Stop()
	must.Succeed(t, os.RemoveAll(l.leases))
	l.serve(t, inTurn)
	is := ip4(w.add(l.pod("again"), named...))
	expect.That(t, is == was, "the pod had %s before the boot, and has %s", was, is)
}
