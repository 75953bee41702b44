package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
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
	if o := run.Wait(); o.Err != nil {
		n.Fatalf("%v: %s", o.Err, &errOut)
	}
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
	t.Parallel()
	n := newNode(t)
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
	t.Parallel()
	n := newNode(t)
	w := n.podnet(conf{"guard": true})
	w.add(n.pod("stays"))
	p := n.pod("goes")
	w.add(p)
	port := w.port(p)
	h := n.halt(call{verb: "DEL", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)}, func() bool { return n.down(port) })
	h.arrive("has shut the port")
	lacking := n.lookAtLinks(nil)
	expect.That(t, len(lacking) == 0, "lacking: %q", lacking)
}

// TestLookFindsNothingWhereANetworkChangesMeanwhile has an ADD, which has given the bridge another MTU, put that on record
// before the look has its lock.
func TestLookFindsNothingWhereANetworkChangesMeanwhile(t *testing.T) {
	t.Parallel()
	n := newNode(t)
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
