package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	api "github.com/tombolo-cni/tombolo/network"
)

// lookerName is that of this test program where it looks at links once, as tombolod does.
const lookerName = "look-at-links"

// runLooker prints what is lacking as JSON; networks that are named it repairs before, as tombolod does.
func runLooker() int {
	node, err := api.Open(context.Background(), &api.Config{StateDir: os.Args[1]})
	if err == nil {
		err = node.Upkeep().Repair(context.Background(), os.Args[2:])
	}
	if err == nil {
		var seen *api.Links
		if seen, err = node.Upkeep().Links(context.Background()); err == nil {
			err = json.NewEncoder(os.Stdout).Encode(seen.Lacking)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// lookAtLinks gives what a look at links finds lacking, by network, after the repair of some. before is told the look's calls.
func (n *node) lookAtLinks(before func(call string), repair ...string) map[string][]string {
	n.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = append([]string{lookerName, n.state}, repair...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	run := must.Of(fault.Start(n.ns, cmd, fault.Fault{Before: before})).Get(n)
	o := run.Wait()
	must.That(n, o.Err == nil, "%v: %s", o.Err, &errOut)
	var lacking map[string][]string
	unmarshal(n, out.String(), &lacking)
	return lacking
}

// down says that a link is there, and down.
func (n *node) down(name string) bool {
	l, ok := links(n, n.ns)[name]
	return ok && !l.up()
}

// TestLookFindsNothingWhereAnADDEndsMeanwhile has an ADD, whose port is there and down when the look begins, end before
// each time that the look reads records.
func TestLookFindsNothingWhereAnADDEndsMeanwhile(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	w.add(n.pod("stays"))
	// With limits an ADD has more to do between making the port and setting it up.
	slow := conf{"runtimeConfig": conf{"bandwidth": conf{"ingressRate": 1e9, "ingressBurst": 1e9}}}
	const times = 2 // that a look reads a network's records
	for at := 1; at <= times; at++ {
		p := n.pod(fmt.Sprintf("pod-%d", at))
		port := w.port(p)
		h := n.halt(call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(slow)}, func() bool { return n.down(port) })
		h.arrive("has made its port")
		reads := 0
		lacking := n.lookAtLinks(func(call string) {
			if strings.HasPrefix(call, "openat(") && strings.HasSuffix(call, "/attachments/podnet)") {
				if reads++; reads == at {
					h.goOn()
				}
			}
		})
		expect.That(t, reads == times && len(lacking) == 0,
			"the ADD ended before records were read for time %d of %d; lacking: %q", at, reads, lacking)
	}
}

// TestLookFindsNothingInTheMiddleOfADEL has it look when the port of a guarded pod is shut, and not deleted yet.
func TestLookFindsNothingInTheMiddleOfADEL(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"guard": true})
	w.add(n.pod("stays"))
	p := w.addPod("goes")
	port := w.port(p)
	h := n.halt(call{verb: "DEL", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)}, func() bool { return n.down(port) })
	h.arrive("has shut the port")
	lacking := n.lookAtLinks(nil)
	expect.That(t, len(lacking) == 0, "lacking: %q", lacking)
}

// TestLookFindsNothingWhereANetworkChangesMeanwhile has an ADD, which has given the bridge another MTU, put that on record
// before the look has its lock.
func TestLookFindsNothingWhereANetworkChangesMeanwhile(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	w.add(n.pod("stays"))
	p := n.pod("next")
	changed := w.with(conf{"mtu": 1400})
	h := n.halt(call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: changed.stdin(nil)}, func() bool {
		return links(n, n.ns)["cbr0"].MTU == 1400
	})
	h.arrive("has changed the MTU")
	waits := false
	lacking := n.lookAtLinks(func(call string) {
		if call == "openat("+n.state+"/lock)" {
			waits = true
			h.goOn()
		}
	})
	expect.That(t, waits && len(lacking) == 0, "it took the lock: %t; lacking: %q", waits, lacking)
}

func TestTombolodPutsRightWhatOthersDoToLinks(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, harm string
		cut        bool // a pod of this harm reaches nothing
		later      bool // pods that come and go cause such news too, so it waits
	}{
		{"the bridge is deleted", "ip link delete cbr0", true, false},
		{"the bridge is set down", "ip link set cbr0 down", true, false},
		{"the bridge's addresses are flushed", "ip address flush dev cbr0", true, false},
		{"the gateway is deleted", "ip address delete GATEWAY dev cbr0", true, false},
		{"the subnet's route is deleted", "ip route delete SUBNET dev cbr0", true, false},
		{"a port is taken off the bridge", "ip link set PORT nomaster", true, false},
		{"a port is set down", "ip link set PORT down", true, false},
		{"a port's flag is changed", "bridge link set dev PORT isolated on; bridge link set dev PORT hairpin off", false, true},
		{"IPv4 passes the firewall by", "ip link set cbr0 type bridge nf_call_iptables 0", false, false},
		{"IPv6 passes the firewall by", "ip link set cbr0 type bridge nf_call_ip6tables 0", false, false},
		{"the bridge's MTU is changed", "ip link set cbr0 mtu 1400", false, false},
		{"the host forwards no more", "sysctl -qw net.ipv4.conf.all.forwarding=1 net.ipv4.conf.all.forwarding=0", false, false},
		{"a port believes any source", "sysctl -qw net.ipv4.conf.PORT.rp_filter=0", false, false},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			w := n.podnet(nil)
			p := n.pod("a")
			r := w.add(p)
			wantPing(t, p.NS, outside4)
			m := n.mind(t)
			must.Until(t, "it looks", func() bool { return m.metric("links_looks_total") > 0 })
			gateway := r.IPs[0].Gateway.String()
			subnet := r.IPs[0].Address
			ones, _ := subnet.Mask.Size()
			subnet.IP = subnet.IP.Mask(subnet.Mask)
			harm := strings.NewReplacer("PORT", w.port(p), "GATEWAY", gateway+"/"+strconv.Itoa(ones), "SUBNET", subnet.String()).Replace(tc.harm)
			for range 2 {
				mended := m.metric("drift_mended_total")
				began := time.Now()
				n.run("sh", "-ec", harm)
				must.Until(t, "it is put right: "+harm, func() bool { return m.metric("drift_mended_total") > mended })
				// Every minute it looks though it hears nothing.
				took := time.Since(began)
				within := 2800 * time.Millisecond // it waits for 3 s after news that pods cause too
				if tc.later {
					within = 40 * time.Second
				}
				t.Logf("%s: %s", harm, took)
				expect.That(t, took <= within, "%s is put right after %s", harm, took)
				expect.Success(t, w.check(p), "CHECK after %s", harm)
				wantPing(t, p.NS, outside4)
			}
			// And then it is done: pods that come and go, and its own changes, are none to it.
			mended, looks := m.metric("drift_mended_total"), m.metric("links_looks_total")
			b := w.addPod("b")
			w.del(b)
			must.Until(t, "it looks", func() bool { return m.metric("links_looks_total") > looks })
			got := m.metric("drift_mended_total")
			expect.That(t, got == mended, "it put something right %d times for nothing", got-mended)
		})
	}
}

// TestTombolodTakesNoPodsForAnotherProgram has pods come and go, sixty at once, while tombolod looks at links as often
// as it does at all. TOMBOLO_LONG has them do so forty times.
func TestTombolodTakesNoPodsForAnotherProgram(t *testing.T) {
	t.Parallel()
	rounds := 3
	if os.Getenv("TOMBOLO_LONG") != "" {
		rounds = 40
	}
	n := newNode(t)
	w := n.podnet(conf{"guard": true}) // a DEL shuts such a port before it deletes it
	w.add(n.pod("stays"))
	m := n.mind(t)
	stop := m.keepLooking()
	looks := m.metric("links_looks_total")
	pods := n.pods(60)
	for range rounds {
		atOnce(pods, func(p *pod) { expect.Success(t, expect.Err(w.tryAdd(p)), "ADD of %s", p.id) })
		atOnce(pods, func(p *pod) { expect.Success(t, w.tryDel(p), "DEL of %s", p.id) })
	}
	stop()
	t.Logf("%d looks", m.metric("links_looks_total")-looks)
	expect.That(t, m.metric("links_looks_total") != looks, "tombolod did not look: nothing is tested")
	for line := range strings.Lines(readFile(t, m.log)) {
		expect.That(t, !strings.Contains(line, "level=WARN") && !strings.Contains(line, "level=ERROR"), "%v", line)
	}
	if m.metric("drift_found_total") != 0 || m.metric("links_contested") != 0 {
		t.Errorf("%d differences, contested: %d", m.metric("drift_found_total"), m.metric("links_contested"))
	}
}

// keepLooking has the kernel announce again and again that the bridge has lost an address, which is nobody's.
func (m *minder) keepLooking() (stop func()) {
	const nobodys = "192.0.2.1/32"
	done := make(chan struct{})
	var ended sync.WaitGroup
	ended.Go(func() {
		for looks := -1; ; {
			select {
			case <-done:
				return
			default:
			}
			if now := m.metric("links_looks_total"); now != looks {
				looks = now
				m.ip("address add " + nobodys + " dev cbr0")
				m.ip("address delete " + nobodys + " dev cbr0")
			}
		}
	})
	return func() { close(done); ended.Wait() }
}
