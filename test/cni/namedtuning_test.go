package cni

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// tunable is what tuning sets: attributes of the link, and some kernel parameters.
func tunable(t testing.TB, p *pod) string {
	t.Helper()
	const script = `
ip -d -o link show dev eth0 | grep -o -E 'mtu [0-9]+|qlen [0-9]+|PROMISC|ALLMULTI|link/ether 02:00:00:[0-9a-f:]+' | sort
cd /proc/sys/net && grep . ipv4/conf/eth0/arp_filter ipv4/conf/all/log_martians core/somaxconn`
	return nstest.Run(t, p.NS, "sh", "-c", script)
}

// On an interface of our bridge's, tuning by name ends as the reference's does on one of its bridge's. DEL leaves
// nothing behind, and the pod as it is: the reference gives the interface back what it had, which goes next.
func TestTuningByNameIsAsTheReferences(t *testing.T) {
	t.Parallel()
	const prev = `"prevResult":{"cniVersion":"1.0.0","interfaces":[{"name":"br0","mac":"02:00:00:00:00:01"},{"name":"eth0","mac":"02:00:00:00:00:02","sandbox":"POD"}],"ips":[{"address":"10.5.0.2/24","interface":1}],"dns":{"nameservers":["10.5.0.1"]}}`
	fields := func(list ...string) string {
		return `{"cniVersion":"1.0.0","name":"net","type":"tuning","stateDir":"STATE","dataDir":"DATA/tuning","unknown":1,` + strings.Join(list, ",") + `}`
	}
	const all = `"mac":"02:00:00:00:00:77","mtu":1400,"promisc":true,"allmulti":true,"txQLen":77,"sysctl":{"net.ipv4.conf.IFNAME.arp_filter":"1","net/core/somaxconn":"99"}`
	for name, tt := range map[string]struct {
		conf, args string
		change     string // made in the pod before CHECK
		gone       bool   // the interface, before DEL
	}{
		"everything":                    {conf: fields(all, prev)},
		"nothing":                       {conf: fields(prev)},
		"kernel parameters":             {conf: fields(`"sysctl":{"net.ipv4.conf.all.log_martians":"1"}`, prev)},
		"switched off":                  {conf: fields(`"promisc":false,"allmulti":false,"mtu":0,"mac":""`, prev)},
		"by arguments":                  {conf: fields(`"sysctl":{"net.core.somaxconn":"1"},"args":{"cni":{"sysctl":{"net.core.somaxconn":"98"},"mac":"02:00:00:00:00:78","mtu":1300,"promisc":true,"allmulti":true,"txQLen":7}}`, prev)},
		"a MAC by the environment":      {conf: fields(`"mac":"02:00:00:00:00:77"`, prev), args: "MAC=02:00:00:00:00:79"},
		"a MAC by the capability":       {conf: fields(`"runtimeConfig":{"mac":"02:00:00:00:00:80"}`, prev), args: "MAC=02:00:00:00:00:79"},
		"unknown arguments":             {conf: fields(all, prev), args: "FOO=1"},
		"no result before it":           {conf: fields(all)},
		"an interface that is not":      {conf: fields(all, strings.ReplaceAll(prev, `"eth0"`, `"eth9"`)), gone: true},
		"a MAC that is none":            {conf: fields(`"mac":"02:00"`, prev)},
		"an MTU that cannot be":         {conf: fields(`"mtu":10000000`, prev)},
		"a parameter that is not there": {conf: fields(`"sysctl":{"net.core.nothing":"1"}`, prev)},
		"a parameter of the machine's":  {conf: fields(`"sysctl":{"kernel.panic":"1"}`, prev)},
		"a way out of the network's":    {conf: fields(`"sysctl":{"net/../kernel/panic":"1"}`, prev)},
		"a parameter twice":             {conf: fields(`"sysctl":{"net.core.somaxconn":"1","net.core.somaxconn":"2"}`, prev)},
		"MAC changed since":             {conf: fields(all, prev), change: "ip link set eth0 address 02:00:00:00:00:99"},
		"MTU changed since":             {conf: fields(all, prev), change: "ip link set eth0 mtu 1399"},
		"promisc changed since":         {conf: fields(all, prev), change: "ip link set eth0 promisc off"},
		"allmulti changed since":        {conf: fields(all, prev), change: "ip link set eth0 allmulticast off"},
		"queue changed since":           {conf: fields(all, prev), change: "ip link set eth0 txqueuelen 5"},
		"parameter changed since":       {conf: fields(all, prev), change: "echo 1 >/proc/sys/net/core/somaxconn"},
		"the interface is gone":         {conf: fields(all, prev), gone: true},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			theirs, ours := sides(t)
			both := []*side{theirs, ours}
			each := func(do func(s *side)) {
				for _, s := range both {
					do(s)
				}
			}
			failed := false
			step := func(v verb) {
				t.Helper()
				v.plugin, v.id, v.args = "tuning", "a", tt.args
				what, their := v.verb, theirs.call(v)
				agree(t, what, their, ours.call(v))
				if v.verb == "ADD" && their.status != 0 {
					failed = true
				}
				// The reference keeps the file of an ADD that failed, and of an interface that is gone.
				kept := failed || tt.gone && v.verb == "DEL"
				want, got := theirs.files(), ours.files()
				expect.That(t, want == got || kept || v.verb != "DEL", "%s: the reference leaves\n%s\nand this\n%s", what, want, got)
				if v.verb == "DEL" || tt.gone && v.verb != "ADD" {
					return
				}
				want, got = tunable(t, theirs.of("a")), tunable(t, ours.of("a"))
				expect.That(t, want == got, "%s: the reference makes\n%s\nand this\n%s", what, want, got)
			}
			each(func(s *side) {
				s.chain("ADD", "a", []string{attackedBridge})
				nstest.Run(t, s.of("a").NS, "ip", "link", "set", "eth0", "address", "02:00:00:00:00:02", "txqueuelen", "1000")
			})
			if strings.Contains(tt.conf, "eth9") {
				each(func(s *side) { nstest.Run(t, s.of("a").NS, "ip", "link", "set", "eth0", "name", "eth1") })
				agree(t, "ADD", theirs.call(verb{plugin: "tuning", verb: "ADD", id: "a", conf: tt.conf}), ours.call(verb{plugin: "tuning", verb: "ADD", id: "a", conf: tt.conf}))
				return
			}
			step(verb{verb: "ADD", conf: tt.conf})
			if tt.change != "" {
				each(func(s *side) { nstest.Run(t, s.of("a").NS, "sh", "-c", tt.change) })
			}
			step(verb{verb: "CHECK", conf: tt.conf})
			if tt.gone {
				each(func(s *side) { nstest.Run(t, s.of("a").NS, "ip", "link", "del", "eth0") })
			}
			if name == "unknown arguments" {
				return // the reference's DEL fails for them
			}
			step(verb{verb: "DEL", conf: tt.conf})
			step(verb{verb: "DEL", conf: tt.conf})
			if name == "nothing" {
				agree(t, "VERSION", theirs.call(verb{plugin: "tuning", verb: "VERSION"}), ours.call(verb{plugin: "tuning", verb: "VERSION"}))
			}
		})
	}
}

// An ADD that fails takes back what it has set itself. DEL changes nothing in the pod, which goes next.
func TestTuningByNameRevertsWhatAFailedADDHasSet(t *testing.T) {
	t.Parallel()
	const prev = `"prevResult":{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","mac":"02:00:00:00:00:02","sandbox":"POD"}],"ips":[],"dns":{}}`
	s := newSide(t, referenceDir(t), byName())
	s.chain("ADD", "a", []string{attackedBridge})
	nstest.Run(t, s.of("a").NS, "ip", "link", "set", "eth0", "address", "02:00:00:00:00:02", "txqueuelen", "50")
	call := func(what, fields string, fails bool) string {
		t.Helper()
		o := s.call(verb{plugin: "tuning", verb: what, id: "a", conf: `{"cniVersion":"1.0.0","name":"net","type":"tuning","stateDir":"STATE","dataDir":"DATA/tuning",` + fields + prev + `}`})
		expect.Equal(t, o.status != 0, fails, "%s with %s: %s", what, fields, o.stdout)
		return tunable(t, s.of("a"))
	}
	second := call("ADD", `"mac":"02:00:00:00:00:78","mtu":1300,"allmulti":true,"txQLen":7,`, false)
	expect.Equal(t, call("ADD", `"mac":"02:00:00:00:00:79","mtu":10000000,`, true), second, "an ADD that failed leaves")
	expect.Equal(t, call("DEL", "", false), second, "after DEL")
	s.chain("DEL", "a", []string{attackedBridge})
	expect.Equal(t, s.files(), "", "is left")
}

// A guard that did not follow would drop all that the pod sends.
func TestGuardFollowsTheMACThatTuningSets(t *testing.T) {
	n := parallelNode(t)
	n.searchAlso(newSide(t, referenceDir(t), []string{"tuning"}).programs)
	w := n.podnet(conf{"macspoofchk": true, "ipam": hostLocal(subnet4)})
	w.after = []conf{{"type": "tuning", "mac": "02:00:00:00:00:77", "mtu": 9000, "stateDir": n.state, "dataDir": t.TempDir()}}
	p := w.addPod("a")
	expect.Success(t, nstest.Ping(t, p.NS, netip.MustParseAddr(gateway4)), "with the MAC that tuning set")
	expect.Success(t, w.check(p))
	o := n.operate("check", "--state", n.state)
	expect.That(t, o.status == 0, "check: %s%s", o.stdout, o.stderr)
	nstest.Run(t, p.NS, "ip", "link", "set", "eth0", "address", "02:00:00:00:00:78")
	nstest.Run(t, p.NS, "ip", "neigh", "flush", "all")
	expect.Failure(t, nstest.PingWith(t, p.NS, netip.MustParseAddr(gateway4), nstest.Echo{Wait: 300e6}), "with a MAC that nobody set the pod is heard")
	w.del(p)
}

// limits are what shapes a pod's traffic at the host's end of its link, up to names and to how long a packet waits:
// rates and bursts of qdiscs.
func (s *side) shapers() string {
	s.Helper()
	var list []string
	for line := range strings.Lines(s.run("tc", "qdisc", "show")) {
		if m := regexp.MustCompile(`^qdisc (tbf) .* dev (veth|ifb|bwp)\S+ .*rate (\S+) burst (\S+)`).FindStringSubmatch(line); m != nil {
			list = append(list, fmt.Sprintf("%s at %s: %s, %s", m[1], strings.Replace(m[2], "bwp", "ifb", 1), m[3], m[4]))
		}
	}
	return strings.Join(list, "\n")
}

// Limits by that name are the reference's, on whichever plugin's interface: in the kernel, and in the result.
func TestBandwidthByNameLimitsAsTheReferencesDoes(t *testing.T) {
	t.Parallel()
	const ipam = `"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24"}`
	const rates = `"ingressRate":80000000,"ingressBurst":800000,"egressRate":40000000,"egressBurst":400000`
	randomIFB := regexp.MustCompile(`"(ifb|bwp)[0-9a-f]+"`)
	for name, plugins := range map[string][]string{
		"bridge":                     {`{"type":"bridge","isGateway":true,` + ipam + `}`, `{"type":"bandwidth",` + rates + `}`},
		"ptp":                        {`{"type":"ptp",` + ipam + `}`, `{"type":"bandwidth",` + rates + `}`},
		"the runtime's":              {`{"type":"bridge","isGateway":true,` + ipam + `}`, `{"type":"bandwidth","runtimeConfig":{"bandwidth":{` + rates + `}}}`},
		"the configuration's before": {`{"type":"bridge","isGateway":true,` + ipam + `}`, `{"type":"bandwidth","ingressRate":80000000,"ingressBurst":800000,"runtimeConfig":{"bandwidth":{` + rates + `}}}`},
		"a few bits a second":        {`{"type":"bridge","isGateway":true,` + ipam + `}`, `{"type":"bandwidth","ingressRate":800,"ingressBurst":24288}`},
		"none":                       {`{"type":"bridge","isGateway":true,` + ipam + `}`, `{"type":"bandwidth"}`},
		"before portmap":             {`{"type":"bridge","isGateway":true,` + ipam + `}`, `{"type":"bandwidth",` + rates + `}`, portmapping("", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`)},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			want := ""
			for _, ours := range [][]string{nil, byName(), {"bandwidth"}, {"bandwidth", "portmap"}, {"bridge"}} {
				s := newSide(t, referenceDir(t), ours)
				s.chain("ADD", "a", plugins)
				got := s.shapers() + "\n" + randomIFB.ReplaceAllString(said(t, s.results["a"]), "IFB")
				if want == "" {
					want = got
				}
				expect.That(t, strings.Contains(got, "tbf") != (name == "none"),
					"with %q, the limits are\n%s", ours, got)
				expect.Equal(t, cmp.Diff(want, got), "", "with %q, the reference's (-) and this one's (+)", ours)
				s.chain("CHECK", "a", plugins)
				s.chain("DEL", "a", plugins)
				s.chain("DEL", "a", plugins)
				links := s.run("ip", "-br", "link")
				expect.That(t, !strings.Contains(links, "ifb") && !strings.Contains(links, "bwp"), "with %q, left:\n%s", ours, links)
				left, _ := filepath.Glob(s.state + "/*/net/*.json")
				expect.That(t, len(left) == 0, "with %q, records are left: %q", ours, left)
			}
		})
	}
}

// What a pod puts in its interface's place may be a link that nobody can delete, or one that the kernel says more of than
// fits into an answer. The DEL of the list does not fail for it.
func TestALinkInTheInterfacesPlaceStopsNoDEL(t *testing.T) {
	t.Parallel()
	const tune = `{"type":"tuning","dataDir":"DATA/t","mtu":1400}`
	much := "link add link aside name eth0 type macvlan mode source\n"
	for i := range 1600 {
		much += fmt.Sprintf("link set eth0 type macvlan macaddr add 02:00:00:00:%02x:%02x\n", i>>8, i&0xff)
	}
	for i := range 496 { // the kernel takes no more of this length
		much += fmt.Sprintf("link property add dev eth0 altname n%0126d\n", i)
	}
	for name, commands := range map[string]string{
		"lo renamed":                 "link set lo down\nlink set lo name eth0",
		"lo by an alternative name":  "link property add dev lo altname eth0",
		"a link with many MACs":      much,
		"one that takes no such MTU": "link set aside mtu 1300\nlink add link aside name eth0 type macvlan",
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			s := newSide(t, referenceDir(t), byName())
			plugins := []string{attackedBridge, tune}
			s.chain("ADD", "a", plugins)
			dir := t.TempDir()
			nstest.PutFile(t, dir, "commands", "link set eth0 down\nlink set eth0 name aside\n"+commands)
			nstest.Run(t, s.of("a").NS, "ip", "-batch", filepath.Join(dir, "commands"))
			s.chain("DEL", "a", plugins)
			expect.Equal(t, s.run("ip", "-br", "link", "show", "type", "veth"), "", "DEL leaves")
			expect.Equal(t, s.files(), "", "DEL leaves")
		})
	}
}
