package cni

import (
	"os"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// What the docs say about pods beside routes, rules and links of the operator's own.

func TestAnOperatorsOwnSNATRuleCounts(t *testing.T) {
	t.Parallel()
	const own = "192.0.2.99"
	chain := func(priority string) string {
		return "add table ip own; add chain ip own post { type nat hook postrouting priority " + priority + "; }; add rule ip own post ip saddr 10.77.0.0/24 oifname eth0 snat to " + own
	}
	for name, tt := range map[string]struct {
		fields conf
		rules  string
		before bool // the rules are there before Tombolo's
		want   string
	}{
		"none":                        {nil, "add table ip own", false, uplink4},
		"an earlier priority":         {nil, chain("srcnat - 10"), true, own},
		"the same, loaded before":     {nil, chain("srcnat"), true, uplink4},
		"the same, loaded after":      {nil, chain("srcnat"), false, own},
		"without masquerade":          {conf{"ipMasq": false}, chain("srcnat"), true, own},
		"without it for destinations": {conf{"nonMasqueradeCIDRs": []string{outside4 + "/32"}}, chain("srcnat"), true, own},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			out := n.outside()
			n.ip("address add " + own + "/24 dev eth0")
			if tt.before {
				n.nft(tt.rules)
			}
			p := n.pod("a")
			n.podnet(tt.fields).add(p)
			if !tt.before {
				n.nft(tt.rules)
			}
			expect.Equal(t, seenAs(t, p.NS, out, outside4), tt.want, "the outside sees")
		})
	}
}

// A client behind the second uplink asks a host port; the host's default route leads by the first.
func TestPodsFollowRulesForTheirOwnSubnet(t *testing.T) {
	t.Parallel()
	const far = "198.51.100.9"
	n := newNode(t)
	n.outside()
	second := nstest.New(t)
	nstest.Veth(t, n.ns, "eth1", second, "eth0")
	n.ip("address add 203.0.113.2/24 dev eth1")
	nstest.Run(t, second, "sh", "-ec", "ip address add 203.0.113.1/24 dev eth0; ip address add "+far+"/32 dev eth0; ip route add default via 203.0.113.2 src "+far)
	w := n.portnet(nil)
	p := w.addPod("a", publish(t, "8080:80/tcp"))
	p.serve(t, "tcp", 80)
	answers := func() bool {
		o := nstest.Run(t, second, "sh", "-c", "curl -sS --http0.9 -m 3 --interface "+far+" http://203.0.113.2:8080 2>&1; echo status $?")
		return strings.Contains(o, "status 0") || strings.Contains(o, "status 56")
	}
	n.ip("route add default via 203.0.113.1 table 100")
	n.ip("rule add from 203.0.113.2 table 100")
	expect.Equal(t, answers(), false, "a rule from the host's address concerns what a pod answers")
	n.ip("rule add from " + subnet4 + " table 100")
	expect.Equal(t, answers(), true, "a rule from the pods' subnet concerns it")
	expect.Equal(t, seenAs(t, p.NS, second, far), "203.0.113.2", "the pod is masqueraded as")
	n.ip("rule del from " + subnet4 + " table 100")
	n.nft("add table ip own; add chain ip own pre { type filter hook prerouting priority mangle; }; " +
		"add rule ip own pre iifname eth1 ct state new ct mark set 7; add rule ip own pre iifname cbr0 ct mark 7 meta mark set 7")
	n.ip("rule add fwmark 7/0xff table 100")
	expect.Equal(t, answers(), true, "a mark of the connection leads the answer back")
}

// A VM has the pod's MAC and address, behind a bridge in the pod that has the pod's interface as a port.
func TestAVMBehindAPodNeedsAPortWithoutHairpin(t *testing.T) {
	t.Parallel()
	for _, hairpin := range []bool{true, false} {
		n := newNode(t)
		p := n.pod("vm")
		r := n.podnet(conf{"hairpinMode": hairpin, "ipam": hostLocal(subnet4)}).add(p)
		vm := nstest.New(t)
		nstest.Veth(t, p.NS, "tap0", vm, "eth0")
		nstest.Run(t, p.NS, "sh", "-ec", "ip address flush dev eth0; ip link set eth0 address 02:00:00:00:00:01; ip link add k6t type bridge; ip link set k6t up; ip link set eth0 master k6t; ip link set tap0 master k6t")
		nstest.Run(t, vm, "ip", "link", "set", "eth0", "address", r.Interfaces[2].Mac)
		nstest.Run(t, vm, "ip", "address", "add", r.IPs[0].Address.String(), "dev", "eth0")
		o := nstest.Run(t, vm, "sh", "-c", "ping -c 2 -W 2 "+gateway4+" | grep received")
		expect.Equal(t, strings.Contains(o, " 0 received"), hairpin, "hairpinMode %t: %s", hairpin, o)
	}
}

func TestRecordsOfANewerVersion(t *testing.T) {
	t.Parallel()
	const newer = "written by a newer version: version 99"
	for name, tt := range map[string]struct {
		file             string
		add, check, gone uint // error codes of an ADD of another pod, of CHECK and of DEL
		replaced         bool // by the ADD
	}{
		"an attachment's": {"attachments/podnet/*.json", 0, 5, 0, false},
		"a network's":     {"networks/podnet.json", 0, 0, 0, true},
		"the epoch's":     {"epoch", 5, 5, 5, false},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(nil)
			p := w.addPod("a")
			path := strings.Replace(n.state+"/"+tt.file, "*", strings.TrimPrefix(w.port(p), "veth"), 1)
			old := readFile(t, path)
			text := strings.ReplaceAll(old, `"version":1`, `"version":99`)
			must.Succeed(t, os.WriteFile(path, []byte(text), 0o600))
			want := func(err error, status uint, what string) {
				t.Helper()
				if status == 0 {
					expect.Success(t, err, "%s", what)
				} else {
					wantError(t, err, status, newer)
				}
			}
			want(expect.Err(w.tryAdd(n.pod("b"))), tt.add, "ADD")
			expect.Equal(t, readFile(t, path) != text, tt.replaced, "ADD replaced the record")
			want(w.check(p), tt.check, "CHECK")
			want(w.tryDel(p), tt.gone, "DEL")
			_, port := links(t, n.ns)[w.port(p)]
			expect.Equal(t, port, tt.gone != 0, "the port is there")
			if tt.gone != 0 { // the newer version is back, or somebody removes the directory
				must.Succeed(t, os.WriteFile(path, []byte(old), 0o600))
				w.del(p)
			}
		})
	}
}
