package cni

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// A pod that gets a further network while it runs can put a link of its own in place of the one that was made for
// it, before the next plugin of the list looks. By its indexes that link looks like the other end of another pod's
// port. Neither an ADD nor a DEL changes that pod's limits.
func TestAPodsLinkPassesForNoOtherPodsEnd(t *testing.T) {
	t.Parallel()
	const limit = `{"type":"bandwidth","ingressRate":%d,"ingressBurst":800000,"egressRate":%[1]d,"egressBurst":800000}`
	for name, ours := range map[string][]string{"of the reference's": {"bandwidth"}, "of ours": byName()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSide(t, referenceDir(t), ours)
			s.chain("ADD", "victim", []string{attackedBridge, fmt.Sprintf(limit, 8_000_000)})
			port := regexp.MustCompile(`veth[0-9a-f]+`).FindString(s.results["victim"])
			limits := func() string {
				return nstest.Run(t, s.ns, "tc", "qdisc", "show", "dev", port) + nstest.Run(t, s.ns, "tc", "filter", "show", "dev", port, "ingress")
			}
			before := limits()
			if !strings.Contains(before, "rate 8Mbit") {
				t.Fatalf("the victim has no limit:\n%s", before)
			}

			peers := newSide(t, referenceDir(t), nil)
			peers.node, peers.data = s.node, s.data
			s.programs, peers.programs = peers.programs, s.programs
			prev := s.chain("ADD", "evil", []string{attackedBridge}) // by the reference's
			s.programs = peers.programs
			evil, aside := s.of("evil"), nstest.New(t)
			nstest.Run(t, evil.NS, "ip", "link", "set", "eth0", "netns", nstest.Path(t, aside))
			nstest.Run(t, evil.NS, "ip", "link", "add", "eth0", "index", fmt.Sprint(nstest.Index(t, s.of("victim").NS, "eth0")), "type", "veth",
				"peer", "name", "far0", "index", fmt.Sprint(nstest.Index(t, s.ns, port)), "netns", nstest.Path(t, aside))
			call := func(what string) outcome {
				full := `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + prev + "," + strings.TrimPrefix(fmt.Sprintf(limit, 1_000_000_000), "{")
				return s.call(verb{plugin: "bandwidth", verb: what, id: "evil", conf: full})
			}
			o := call("ADD")
			if e := failure(o.stdout); e == nil || !strings.Contains(e.Msg, "has no other end on the host") {
				t.Errorf("ADD: %s", o.stdout)
			}
			if after := limits(); after != before {
				t.Errorf("the limits of another pod were\n%s\nand after ADD they are\n%s", before, after)
			}
			if o := call("DEL"); o.status != 0 {
				t.Errorf("DEL: %s", o.stdout)
			}
			if after := limits(); after != before {
				t.Errorf("the limits of another pod were\n%s\nand after DEL they are\n%s", before, after)
			}
		})
	}
}

// A link has as many alternative names as fit into 64 KiB, and every request for the link is answered with all of them. A
// pod gives them to each of its links; no verb by any name fails for it.
func TestManyNamesOfAPodsLinksStopNoVerb(t *testing.T) {
	t.Parallel()
	const tune = `{"type":"tuning","dataDir":"DATA/t","mtu":1400}`
	const limit = `{"type":"bandwidth","ingressRate":8000000,"ingressBurst":800000,"egressRate":8000000,"egressBurst":800000}`
	publish := portmapping("", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`)
	for name, plugins := range map[string][]string{
		"our bridge":  {attackedBridge, tune, publish, `{"type":"firewall","backend":"iptables"}`, limit},
		"another ptp": {`{"type":"ptp","ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24"}}`, tune, publish, `{"type":"firewall","backend":"iptables"}`, limit},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSide(t, referenceDir(t), append(byName(), "loopback"))
			s.results["a"] = s.chain("ADD", "a", plugins)
			var commands strings.Builder
			for _, link := range []string{"eth0", "lo"} {
				for i := range 496 { // the kernel takes no more of this length
					fmt.Fprintf(&commands, "link property add dev %s altname %s%0123d\n", link, link, i)
				}
			}
			dir := t.TempDir()
			nstest.PutFile(t, dir, "names", commands.String())
			nstest.Run(t, s.of("a").NS, "ip", "-batch", filepath.Join(dir, "names"))

			for i := range plugins {
				if i > 0 || name == "our bridge" { // the reference's bounds what it reads
					s.chain("CHECK", "a", plugins[i:i+1])
				}
			}
			if o := s.operate("check", "--state", s.state); o.status != 0 {
				t.Errorf("check: %s%s", o.stdout, o.stderr)
			}
			for _, plugin := range plugins[1:] {
				again := `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + s.results["a"] + "," + strings.TrimPrefix(plugin, "{")
				name := regexp.MustCompile(`"type":"([a-z]+)"`).FindStringSubmatch(plugin)[1]
				if o := s.call(verb{plugin: name, verb: "ADD", id: "a", conf: again}); o.status != 0 {
					t.Errorf("ADD of %s again: %s", name, o.stdout)
				}
			}
			lo := verb{plugin: "loopback", id: "a", ifName: "lo", conf: `{"cniVersion":"1.0.0","name":"lo"}`}
			for _, lo.verb = range []string{"ADD", "CHECK", "DEL"} {
				if o := s.call(lo); o.status != 0 {
					t.Errorf("%s of lo: %s", lo.verb, o.stdout)
				}
			}
			if name == "our bridge" {
				s.chain("DEL", "a", plugins)
			} else {
				s.chain("DEL", "a", plugins[1:])
				s.run("ip", "link", "del", regexp.MustCompile(`veth[0-9a-f]+`).FindString(s.results["a"]))
				s.call(verb{plugin: "host-local", verb: "DEL", id: "a", conf: `{"cniVersion":"1.0.0","name":"net",` + strings.TrimPrefix(plugins[0], `{"type":"ptp",`)})
			}
			s.wantUnmapped("after DEL")
			if left := s.run("ip", "-br", "link", "show", "type", "veth") + s.run("ip", "-br", "link", "show", "type", "ifb") + s.files(); left != "" {
				t.Errorf("DEL leaves %s", left)
			}
		})
	}
}

// On the link of another program's pod, limits and the filter that keeps 127.0.0.1 from it when the firewall has been flushed stand side by
// side, in whichever order the list has them, and each goes by its own DEL.
func TestLimitsLeaveTheHostsLoopbackShut(t *testing.T) {
	t.Parallel()
	const ptp = `{"type":"ptp","ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.77.0.0/24"}}`
	const limit = `{"type":"bandwidth","ingressRate":8000000,"ingressBurst":800000,"egressRate":8000000,"egressBurst":800000}`
	publish := portmapping("", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`)
	for name, plugins := range map[string][]string{"limits first": {ptp, limit, publish}, "ports first": {ptp, publish, limit}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSide(t, referenceDir(t), byName())
			secret := nstest.Serve(t, s.ns, "tcp", netip.MustParseAddrPort("127.0.0.1:0"))
			port := regexp.MustCompile(`veth[0-9a-f]+`).FindString(s.chain("ADD", "a", plugins))
			p := s.of("a")
			p.serve(t, "tcp", 80)
			if _, err := askPort(t, s.ns, "tcp", "127.0.0.1", 8080); err != nil {
				t.Errorf("by 127.0.0.1: %v", err)
			}
			s.chain("CHECK", "a", plugins)
			nstest.Sysctl(t, p.NS, "net/ipv4/conf/eth0/route_localnet", "1")
			nstest.Run(t, p.NS, "ip", "address", "flush", "dev", "lo")
			nstest.Run(t, p.NS, "ip", "route", "add", "127.0.0.0/8", "via", "10.77.0.1", "src", "10.77.0.2")
			s.nft("flush ruleset")
			if err := dial(p.NS, secret, 300*time.Millisecond); err == nil {
				t.Error("the pod reaches what the host has bound to 127.0.0.1")
			}
			filters := func() string {
				return s.run("tc", "filter", "show", "dev", port, "ingress")
			}
			s.run("tc", "filter", "del", "dev", port, "ingress", "pref", "29806")
			if err := dial(p.NS, secret, patience); err != nil {
				t.Errorf("the attack does not work without the filter: %v", err)
			}
			again := `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + s.results["a"] + "," + strings.TrimPrefix(publish, "{")
			if o := s.call(verb{plugin: "portmap", verb: "ADD", id: "a", conf: again}); o.status != 0 || !strings.Contains(filters(), "bytecode") {
				t.Errorf("ADD again: %s\n%s", o.stdout, filters())
			}
			s.chain("DEL", "a", plugins[2:])
			if left := filters(); strings.Contains(left, "mirred") == strings.Contains(left, "bytecode") {
				t.Errorf("the DEL of one leaves\n%s", left)
			}
			s.chain("DEL", "a", plugins[1:2])
			if left := filters(); left != "" {
				t.Errorf("the DEL of both leaves\n%s", left)
			}
			s.chain("DEL", "a", plugins)
			s.wantUnmapped("after DEL")
		})
	}
}
