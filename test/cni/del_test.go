package cni

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// TestTracesShowWhatAnAttachmentHas is for all the tests that say that nothing is
// left.
func TestTracesShowWhatAnAttachmentHas(t *testing.T) {
	n := parallelNode(t)
	n.podnet(nil).add(n.pod("a"))
	count := map[string]int{}
	for _, trace := range n.traces() {
		kind, _, _ := strings.Cut(trace, " ")
		if strings.HasPrefix(trace, "file ") {
			kind = strings.Split(trace, "/")[0]
		}
		count[kind]++
	}
	expect.NoDiff(t, cmp.Diff(map[string]int{"link": 1, "element": 4, "file attachments": 1, "file ipam": 2}, count), "traces")
}

func TestDELLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		// del does whatever kind of DEL it is.
		del func(t *testing.T, w *network, p *pod)
		// spoils says that the test itself takes something from the pod that stays.
		spoils bool
	}{
		{"as the runtime does it", func(t *testing.T, w *network, p *pod) { w.del(p) }, false},
		{"without CNI_NETNS", func(t *testing.T, w *network, p *pod) { w.del(p, withoutNetNS()) }, false},
		{"without prevResult", func(t *testing.T, w *network, p *pod) {
			w.callOK(call{verb: "DEL", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)})
		}, false},
		{"with neither", func(t *testing.T, w *network, p *pod) {
			w.callOK(call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(nil)})
		}, false},
		{"when the namespace's name is gone", func(t *testing.T, w *network, p *pod) {
			vanish(t, p.path)
			w.del(p)
		}, false},
		{"when the namespace is gone", func(t *testing.T, w *network, p *pod) {
			// The port goes with its peer, some time after the last handle does.
			gone := watchLinks(t, w.ns)
			vanish(t, p.path)
			p.NS.Close()
			gone.wait(w.port(p))
			w.del(p)
		}, false},
		{"when the path is another file by now", func(t *testing.T, w *network, p *pod) {
			vanish(t, p.path)
			must.Succeed(t, os.WriteFile(p.path, nil, 0o600))
			w.del(p)
			// It is the test's to take away.
			must.Succeed(t, os.Remove(p.path))
		}, false},
		{"twice", func(t *testing.T, w *network, p *pod) {
			for range 2 {
				w.callOK(call{verb: "DEL", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)})
			}
		}, false},
		{"when somebody deleted the port", func(t *testing.T, w *network, p *pod) {
			w.ip("link del " + w.port(p))
			w.del(p)
		}, false},
		{"when somebody deleted the bridge", func(t *testing.T, w *network, p *pod) {
			w.ip("link del cbr0")
			w.del(p)
		}, true},
		{"when somebody flushed our table", func(t *testing.T, w *network, p *pod) {
			w.nft("flush table inet tombolo")
			w.del(p)
		}, true},
		{"when somebody deleted our table", func(t *testing.T, w *network, p *pod) {
			w.nft("delete table inet tombolo")
			w.del(p)
		}, true},
		{"when the record is gone", func(t *testing.T, w *network, p *pod) {
			must.Succeed(t, os.RemoveAll(w.state+"/attachments"))
			w.del(p)
		}, true},
		{"when the record is gone, without prevResult", func(t *testing.T, w *network, p *pod) {
			must.Succeed(t, os.RemoveAll(w.state+"/attachments"))
			w.callOK(call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(nil)})
		}, true},
		{"when the record is rubbish", func(t *testing.T, w *network, p *pod) {
			for _, path := range w.files(w.state + "/attachments") {
				must.Succeed(t, os.WriteFile(filepath.Join(w.state, "attachments", path), []byte("rubbish"), 0o600))
			}
			w.callOK(call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(nil)})
		}, true},
		{"when the state directory is gone", func(t *testing.T, w *network, p *pod) {
			must.Succeed(t, os.RemoveAll(w.state))
			w.del(p)
		}, true},
		{"when the state directory is gone, with neither", func(t *testing.T, w *network, p *pod) {
			must.Succeed(t, os.RemoveAll(w.state))
			w.callOK(call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(nil)})
		}, true},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(nil)
			stays, goes := n.pod("stays"), n.pod("goes")
			w.add(stays)
			before := n.traces()
			r := w.add(goes)
			tt.del(t, w, goes)
			n.wantNoTraceOf(w, goes, r)
			if !tt.spoils {
				n.wantTraces(before)
				wantPing(t, stays.NS, gateway4, gateway6)
			}
		})
	}
}

// wantNoTraceOf fails the test if a pod of a network left anything.
func (n *node) wantNoTraceOf(w *network, p *pod, r *current.Result) {
	n.Helper()
	names := []string{strings.TrimPrefix(w.port(p), "veth")}
	for _, a := range ips(r) {
		names = append(names, "/"+a.String())
	}
	for _, trace := range n.traces() {
		expect.That(n, !slices.ContainsFunc(names, func(name string) bool { return strings.Contains(trace, name) }),
			"left: %s", trace)
	}
}

// A runtime may lose a pod without a DEL, and give the next one the same ID, as ctr does
// that takes a name again.
func TestADDAfterAPodThatDiedWithoutADEL(t *testing.T) {
	n := parallelNode(t)
	w := n.portnet(nil)
	limits := capability("bandwidth", map[string]any{"egressRate": 8_000_000, "egressBurst": 80_000})
	dead := w.addPod("web", publish(t, "8080:80/tcp"), limits)
	next := n.pod("web")
	// One whose port is there is in the way, whatever namespace is asked for.
	wantError(t, expect.Err(w.tryAdd(next, publish(t, "8080:80/tcp"))), 111, "DEL it first")

	gone := watchLinks(t, n.ns)
	vanish(t, dead.path)
	dead.NS.Close()
	gone.wait(w.port(dead))
	w.add(next, publish(t, "8080:81/tcp"))
	next.serve(t, "tcp", 81)
	expect.Success(t, expect.Err(askPort(t, n.ns, "tcp", "127.0.0.1", 8080)))
	expect.Success(t, w.check(next))
	w.del(next)
	n.wantNothing()
}

// vanish takes a namespace's name away, as a runtime does with a pod's.
func vanish(t testing.TB, path string) {
	t.Helper()
	must.Succeed(t, unix.Unmount(path, unix.MNT_DETACH))
	must.Succeed(t, os.Remove(path))
}

func TestDELOfAPodThatNeverWas(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		before func(n *node)
	}{
		{"on an empty node", func(*node) {}},
		{"beside a pod", func(n *node) { n.podnet(nil).add(n.pod("other")) }},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			tt.before(n)
			before := n.traces()
			w := n.podnet(nil)
			for _, ifName := range []string{"eth0", "net1"} {
				w.callOK(call{verb: "DEL", id: "never", netns: "/run/netns/none", ifName: ifName, stdin: w.stdin(nil)})
			}
			n.wantTraces(before)
		})
	}
}

func TestDELTakesAnyConfigurationWithANameAndAType(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	for i, tt := range []struct {
		name  string
		spoil conf
	}{
		{"unknown fields", conf{"nosuch": conf{"deep": []int{1}}, "ipam": conf{"type": "host-local", "nosuch": true}}},
		{"wrong types", conf{"bridge": 7, "mtu": "large", "isGateway": "yes", "ipMasq": []int{}, "deadline": "soon", "forwardMark": "x", "dns": "no", "capabilities": 1}},
		{"values out of range", conf{"mtu": -1, "mode": "lan", "ipMasqBackend": "iptables", "forwardMark": 3, "logLevel": "loud", "logFile": "relative"}},
		{"fields that do not go together", conf{"promiscMode": true, "vlan": 5, "vlanTrunk": []conf{{"id": 1}}, "macspoofchk": true}},
		{"no ipam", conf{"ipam": conf{}}},
		{"ipam of a wrong type", conf{"ipam": "host-local"}},
		{"ipam without a type", conf{"ipam": conf{"ranges": []int{}}}},
		{"another ipam", conf{"ipam": conf{"type": "static"}}},
		{"another ipam, misspelt", conf{"ipam": conf{"type": "static", "adresses": []conf{}, "routes": []conf{{}}}}},
		{"an ipam that is not there", conf{"ipam": conf{"type": "nosuch"}}},
		{"spoilt ranges", conf{"ipam": conf{"type": "host-local", "ranges": "10.77.0.0/24"}}},
		{"overlapping ranges", conf{"ipam": hostLocal(subnet4, subnet4)}},
		{"another dataDir", conf{"ipam": conf{"type": "host-local", "dataDir": "/nonexistent"}}},
		{"prevResult of a wrong type", conf{"prevResult": "rubbish"}},
		{"prevResult with nulls", conf{"prevResult": conf{"cniVersion": "1.1.0", "ips": []any{nil}, "interfaces": []any{nil}}}},
		{"prevResult of an unknown version", conf{"prevResult": conf{"cniVersion": "9.9.9"}}},
		{"prevResult with an index out of range", conf{"prevResult": conf{"cniVersion": "1.1.0", "ips": []conf{{"address": "10.77.0.2/24", "interface": 7}}}}},
		{"runtimeConfig and args of a wrong type", conf{"runtimeConfig": []int{1}, "args": 5}},
		{"runtimeConfig that ADD refuses", conf{"runtimeConfig": conf{"portMappings": []conf{{"hostPort": 80}}, "mac": "none"}}},
		{"another bridge", conf{"bridge": "other0"}},
		{"layer 2", conf{"mode": "l2"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := n.pod(fmt.Sprintf("pod-%d", i))
			w.add(p)
			w.callOK(call{verb: "DEL", id: p.id, ifName: "eth0", args: "a=b;IP=x", stdin: w.stdin(tt.spoil)})
			n.wantNothing()
		})
	}
}

func TestDELOfOneLeavesTheOthers(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w, other := n.podnet(nil), n.network("othernet", conf{"bridge": "cbr1", "isDefaultGateway": false, "ipam": hostLocal("10.78.0.0/24")})
	a, b := n.pod("a"), n.pod("b")
	w.add(a)
	w.add(b)
	other.add(b, as("net1"))
	before := n.traces()
	// More interfaces of the same container, on either network.
	other.add(a, as("eth1"))
	w.with(conf{"isDefaultGateway": false}).add(a, as("net1"))
	other.del(a, as("eth1"))
	w.del(a, as("net1"))
	n.wantTraces(before)
	wantPing(t, a.NS, outside4, outside6)
}

// TestManyAtOnce is the first ADDs of a node, all at the same time.
func TestManyAtOnce(t *testing.T) {
	t.Parallel()
	const count = 64
	n := newNode(t)
	w := n.podnet(nil)
	pods := n.pods(count)
	given := make(chan netip.Addr, 2*count)
	atOnce(pods, func(p *pod) {
		r, err := w.tryAdd(p)
		if err != nil {
			t.Errorf("ADD of %s: %v", p.id, err)
			return
		}
		for _, a := range ips(r) {
			given <- a
		}
	})
	close(given)
	distinct := map[netip.Addr]bool{}
	for a := range given {
		expect.That(t, !distinct[a], "%s was given twice", a)
		distinct[a] = true
	}
	must.That(t, len(distinct) == 2*count, "%d addresses, want %d", len(distinct), 2*count)
	wantPing(t, pods[0].NS, gateway4, gateway6)
	for _, p := range pods {
		expect.Success(t, w.check(p))
	}
	// Some without the namespace, as after a crash of the runtime.
	atOnce(pods, func(p *pod) { expect.Success(t, w.tryDel(p), "DEL of %s", p.id) })
	n.wantNothing()
}

// atOnce runs a function for each pod, all at the same time.
func atOnce(pods []*pod, do func(*pod)) {
	var all sync.WaitGroup
	start := make(chan struct{})
	for _, p := range pods {
		all.Go(func() {
			<-start
			do(p)
		})
	}
	close(start)
	all.Wait()
}

// linkWatch hears of links that go.
type linkWatch struct {
	t  testing.TB
	fd int
}

func watchLinks(t testing.TB, ns interface{ Do(func() error) error }) *linkWatch {
	t.Helper()
	w := &linkWatch{t: t}
	must.Succeed(t, ns.Do(func() error {
		var err error
		w.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		return unix.Bind(w.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: unix.RTMGRP_LINK})
	}))
	t.Cleanup(func() { unix.Close(w.fd) })
	limit := unix.NsecToTimeval(patience.Nanoseconds())
	must.Succeed(t, unix.SetsockoptTimeval(w.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit))
	return w
}

func (w *linkWatch) wait(name string) {
	w.t.Helper()
	buf := make([]byte, 1<<16)
	for {
		n, _, err := unix.Recvfrom(w.fd, buf, 0)
		if err == unix.EINTR {
			continue
		}
		must.Succeed(w.t, err, "wait for link %s to go", name)
		messages := must.Of(syscall.ParseNetlinkMessage(buf[:n])).Get(w.t)
		for _, m := range messages {
			if m.Header.Type == unix.RTM_DELLINK && strings.Contains(string(m.Data), name+"\x00") {
				return
			}
		}
	}
}

// The first DEL cannot give the address back in time. Then the configuration names another directory.
func TestADELThatFailsHalfWayLeavesTheRecordToTheNext(t *testing.T) {
	n := parallelNode(t)
	dir := t.TempDir()
	of := func(dataDir string) conf {
		ipam := dualStack()
		ipam["dataDir"] = dataDir
		return conf{"ipam": ipam}
	}
	w := n.podnet(of(dir))
	p := w.addPod("a")
	lock := must.Of(os.Open(dir + "/podnet/lock")).Get(t)
	must.Succeed(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	must.That(t, n.call(w.with(conf{"deadline": "2s"}).asks("DEL", p, nil)).status != 0, "the DEL was to fail")
	lock.Close()
	expect.That(t, w.recordOf(p) != "",
		"a DEL failed, and the attachment has no record any more: the next one does not know what is left")
	w.with(of(t.TempDir())).del(p)
	left := n.reservations(dir + "/podnet")
	expect.That(t, len(left) == 0, "the next DEL has not given back what is reserved in the directory of the ADD: %q", left)
	n.wantNothing()
}
