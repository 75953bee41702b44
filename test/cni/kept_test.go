package cni

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// keptNames are those that call the programs that had them before, for pods of other programs.
func keptNames() []string { return []string{"bandwidth", "firewall", "portmap", "tuning"} }

// othersChains are lists whose interface the reference's own plugins make.
func othersChains() map[string][]string {
	const ipam = `"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24","routes":[{"dst":"0.0.0.0/0"}]}}`
	const tune = `{"type":"tuning","dataDir":"DATA/t","mtu":1400,"sysctl":{"net.core.somaxconn":"99"}}`
	publish := portmapping("", `{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`)
	const limit = `{"type":"bandwidth","ingressRate":80000000,"ingressBurst":800000,"egressRate":40000000,"egressBurst":400000}`
	return map[string][]string{
		"ptp":     {`{"type":"ptp","ipMasq":true,` + ipam, tune, `{"type":"firewall"}`, limit, publish},
		"macvlan": {`{"type":"macvlan","master":"up0",` + ipam, tune, `{"type":"firewall"}`},
		"bridge":  {`{"type":"bridge","isGateway":true,"ipMasq":true,` + ipam, publish, `{"type":"firewall","ingressPolicy":"same-bridge"}`, tune, limit},
	}
}

// ofPods is what a node has of pods, up to names and MACs by chance.
func (s *side) ofPods(ids ...string) string {
	s.Helper()
	text := s.holds() + "\n" + s.shapers() + "\n"
	for _, id := range ids {
		text += said(s, s.results[id]) + "\n" + tunable(s, s.of(id)) + "\n"
	}
	text = regexp.MustCompile(`([0-9a-f]{2}:){5}[0-9a-f]{2}`).ReplaceAllString(text, "MAC")
	return regexp.MustCompile(`veth[0-9a-f]+`).ReplaceAllString(text, "VETH")
}

// A pod that the reference's plugins made gets by each name what the program gives it that had the name before, and
// nothing else: the node is as without Tombolo after each verb, a second DEL and one after a reboot.
func TestANameCallsTheProgramThatHadItForOthersPods(t *testing.T) {
	t.Parallel()
	for name, plugins := range othersChains() {
		nstest.RunParallel(t, name, func(t *testing.T) {
			theirs, ours := newSide(t, referenceDir(t), nil), newSide(t, referenceDir(t), nil)
			must.Succeed(t, ours.operate("install", "--names", strings.Join(keptNames(), ","), ours.programs).err(), "install")
			steps := map[string]string{}
			for _, s := range []*side{theirs, ours} {
				nstest.Sysctl(t, s.ns, "net/ipv4/ip_forward", "1")
				nstest.Veth(t, s.ns, "up0", s.ns, "up1")
				is := func(step string, ids ...string) {
					t.Helper()
					got := s.ofPods(ids...)
					want, compared := steps[step]
					expect.That(t, !compared || want == got, "%s: with the reference\n%s\nand by our names\n%s", step, want, got)
					steps[step] = got
				}
				s.chain("ADD", "a", plugins)
				is("ADD", "a")
				s.chain("CHECK", "a", plugins)
				s.chain("DEL", "a", plugins)
				is("DEL")
				s.chain("DEL", "a", plugins)
				is("a second DEL")
				s.chain("ADD", "b", plugins)
				is("the next ADD", "b")
				s.reboot("b")
				s.chain("DEL", "b", plugins)
				left := s.files()
				expect.That(t, name == "macvlan" || left == "" || strings.HasPrefix(left, "/t/"), "DEL after a reboot leaves %s", left)
				is("DEL after a reboot")
				expect.Failure(t, expect.Err(os.Stat(s.state+"/attachments")), "there are records")
			}
			expect.That(t, steps["ADD"] != steps["DEL"], "a pod makes no difference to the node, so nothing is shown")
		})
	}
}

// reboot takes away what does not outlive one: rules, links, namespaces of pods and the state.
func (s *side) reboot(pods ...string) {
	s.Helper()
	for _, id := range pods {
		nstest.Run(s, s.of(id).NS, "sh", "-c", "ip link delete eth0 2>/dev/null; true") // the test holds the namespace open
		vanish(s, s.of(id).path)
	}
	s.run("nft", "flush", "ruleset")
	must.Succeed(s, os.RemoveAll(s.state))
}

// keepsScript has a script be what a name keeps: it notes its environment and stdin, and ends as told.
func (s *side) keepsScript(name, says string, status int) (noted func() string) {
	s.Helper()
	dir := s.TempDir()
	script := fmt.Sprintf("#!/bin/sh\nenv >>%[1]s/noted\ncat >>%[1]s/noted\nprintf '%%s' '%[2]s'\nexit %[3]d\n", dir, says, status)
	kept := filepath.Join(s.programs, name+".reference")
	must.Succeed(s, os.Remove(kept))
	must.Succeed(s, os.WriteFile(kept, []byte(script), 0o755))
	return func() string {
		data, err := os.ReadFile(dir + "/noted")
		must.That(s, err == nil || os.IsNotExist(err), "%v", err)
		must.Succeed(s, os.RemoveAll(dir+"/noted"))
		return string(data)
	}
}

// othersPod is a configuration of a chained plugin for a pod that no bridge of ours made.
const othersPod = `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","unknown":{"x":[1,2]},"runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]},` +
	`"prevResult":{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"POD"}],"ips":[{"address":"10.5.0.2/24","interface":0}]}}`

// The program gets the environment and the configuration as they came, and what it says is what the name says.
func TestAKeptProgramIsCalledAsTheNameWas(t *testing.T) {
	t.Parallel()
	for _, name := range keptNames() {
		nstest.RunParallel(t, name, func(t *testing.T) {
			s := newSide(t, referenceDir(t), byName())
			for _, what := range []string{"ADD", "CHECK", "DEL"} {
				const says = `{"cniVersion":"1.0.0","interfaces":[],"own":"field"}`
				noted := s.keepsScript(name, says, 0)
				v := verb{plugin: name, verb: what, id: "a", conf: othersPod, args: "IgnoreUnknown=1;K8S_POD_NAME=web"}
				o := s.call(v)
				expect.That(t, o.status == 0 && o.stdout == says, "%s: %+v", what, o)
				got := noted()
				for _, want := range []string{"CNI_COMMAND=" + what, "CNI_CONTAINERID=a", "CNI_NETNS=" + s.of("a").path, "CNI_IFNAME=eth0", "CNI_PATH=" + s.programs, "CNI_ARGS=" + v.args,
					strings.NewReplacer("POD", s.of("a").path, "STATE", s.state).Replace(othersPod)} {
					expect.Contains(t, got, want, "%s: the program got", what)
				}
				s.keepsScript(name, `{"cniVersion":"1.0.0","code":177,"msg":"no luck","details":"none at all"}`, 1)
				o = s.call(v)
				if e := failure(o.stdout); o.status != 1 || e == nil || e.Code != 177 || !strings.Contains(e.Msg, "no luck") || !strings.Contains(e.Msg, "none at all") {
					t.Errorf("%s: its error is handed on as %+v", what, o)
				}
			}
		})
	}
}

// Where there is no such program, verbs that need it say so and what to do, and DEL and GC have nothing to do.
func TestWithoutAKeptProgramOthersPodsGetAClearError(t *testing.T) {
	t.Parallel()
	for _, name := range keptNames() {
		nstest.RunParallel(t, name, func(t *testing.T) {
			s := newSide(t, referenceDir(t), []string{name})
			kept := filepath.Join(s.programs, name+".reference")
			must.Succeed(t, os.Remove(kept))
			later := strings.Replace(othersPod, `"1.0.0"`, `"1.1.0"`, 1)
			for _, v := range []verb{{verb: "ADD", conf: othersPod}, {verb: "CHECK", conf: othersPod}, {verb: "STATUS", conf: later}} {
				v.plugin, v.id = name, "a"
				o, code := s.call(v), map[string]uint{"STATUS": 50}[v.verb]
				e := failure(o.stdout)
				expect.That(t, e != nil && e.Code == cmp.Or(code, 104) && strings.Contains(e.Msg, kept) && strings.Contains(e.Msg, "tombolo install --names "+name+" "+s.programs),
					"%s: %+v", v.verb, o)
			}
			for _, v := range []verb{{verb: "DEL", conf: othersPod}, {verb: "DEL", conf: othersPod, netns: "-"}, {verb: "GC", conf: strings.Replace(later, `"unknown"`, `"cni.dev/valid-attachments":[],"unknown"`, 1)}} {
				v.plugin, v.id = name, "a"
				o := s.call(v)
				expect.That(t, o.status == 0 && o.stdout == "", "%s: %+v", v.verb, o)
			}
			// The advice helps.
			own := filepath.Join(s.programs, name)
			must.Succeed(t, os.Remove(own)) // a link, through which the copy would be written
			must.Succeed(t, copyProgram(filepath.Join(referenceDir(t), name), own))
			must.Succeed(t, s.operate("install", "--names", name, s.programs).err(), "install")
			expect.Success(t, s.call(verb{plugin: name, verb: "STATUS", id: "a", conf: later}).err(), "STATUS after it")
		})
	}
}

// Lists whose pods are ours need no kept program: neither their STATUS nor any other verb asks for one.
func TestListsOfOurBridgeNeedNoKeptProgram(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), byName())
	for _, name := range byName() {
		must.Succeed(t, os.Remove(filepath.Join(s.programs, name+".reference")))
	}
	plugins := othersChains()["bridge"]
	for _, plugin := range plugins {
		name := regexp.MustCompile(`"type":"([a-z]+)"`).FindStringSubmatch(plugin)[1]
		conf := `{"cniVersion":"1.1.0","name":"net","stateDir":"STATE",` + plugin[1:]
		expect.Success(t, s.call(verb{plugin: name, verb: "STATUS", id: "a", conf: conf}).err(), "STATUS of %s", name)
	}
	for _, what := range []string{"ADD", "CHECK", "DEL", "DEL"} {
		s.chain(what, "a", plugins)
	}
	expect.Equal(t, s.files(), "", "left")
}

// A kept file that leads back here is not run, however it does.
func TestAKeptFileThatIsANameOfOursIsRefused(t *testing.T) {
	t.Parallel()
	for how, keep := range map[string]func(path string) error{
		"a link":                          func(path string) error { return os.Symlink(plugin(), path) },
		"a name":                          func(path string) error { return os.WriteFile(path, []byte("#!"+plugin()+" as\n"), 0o755) },
		"a name of another version's":     func(path string) error { return os.WriteFile(path, []byte("#!/nowhere/tombolo as\n"), 0o755) },
		"a name that leads to itself, by": func(path string) error { return os.Link(strings.TrimSuffix(path, ".reference"), path) },
	} {
		nstest.RunParallel(t, how, func(t *testing.T) {
			s := newSide(t, referenceDir(t), nil)
			must.Succeed(t, s.operate("install", "--names", "portmap", s.programs).err(), "install")
			kept := filepath.Join(s.programs, "portmap.reference")
			must.Succeed(t, os.Remove(kept))
			must.Succeed(t, keep(kept))
			o := s.call(verb{plugin: "portmap", verb: "ADD", id: "a", conf: othersPod})
			e := failure(o.stdout)
			expect.That(t, e != nil && e.Code == 7 && strings.Contains(e.Msg, kept+" is Tombolo itself"), "ADD: %+v", o)
			expect.Success(t, s.call(verb{plugin: "portmap", verb: "DEL", id: "a", conf: othersPod}).err(), "DEL")
		})
	}
}

// A pod that is on record is ours, whatever is in its record. With none, the result tells of a pod of ours, as after
// a reboot. The kept programs hear of none of them.
func TestPodsOfOursAreNotHandedOver(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), byName())
	plugins := othersChains()["bridge"]
	s.chain("ADD", "a", plugins)
	s.chain("ADD", "b", plugins[:1])
	heard := map[string]func() string{}
	for _, name := range append(keptNames(), "bridge") {
		heard[name] = s.keepsScript(name, `{"code":177,"msg":"called"}`, 1)
	}
	quiet := func(when string) {
		t.Helper()
		for _, name := range slices.Sorted(maps.Keys(heard)) {
			expect.Equal(t, heard[name](), "", "%s: the kept %s was called", when, name)
		}
	}
	s.chain("CHECK", "a", plugins)
	records, err := filepath.Glob(s.state + "/attachments/net/*.json")
	must.That(t, err == nil && len(records) == 2, "records: %q, %v", records, err)
	for _, path := range records {
		must.Succeed(t, os.WriteFile(path, []byte("{"), 0o600))
	}
	for _, plugin := range plugins[1:] {
		name := regexp.MustCompile(`"type":"([a-z]+)"`).FindStringSubmatch(plugin)[1]
		s.call(verb{plugin: name, verb: "CHECK", id: "a", conf: `{"cniVersion":"1.0.0","name":"net","stateDir":"STATE","prevResult":` + s.results["a"] + "," + plugin[1:]})
	}
	quiet("with a damaged record")
	s.reboot("a", "b")
	s.chain("DEL", "a", plugins)
	s.chain("DEL", "b", plugins[:1])
	quiet("after a reboot")
	expect.Equal(t, s.files(), "", "left")
	s.results["a"] = ""
	s.chain("DEL", "a", plugins[:1]) // nothing tells whose it was, and there is no link of another program's
	quiet("a second DEL")
}

// Our bridge asks the program that had its name for the DEL and the CHECK of pods that this one made.
func TestBridgeByNameHandsOverPodsOfBefore(t *testing.T) {
	t.Parallel()
	s := newSide(t, referenceDir(t), nil)
	plugins := othersChains()["bridge"]
	s.chain("ADD", "first", plugins)
	s.chain("DEL", "first", plugins) // what pods share stays
	before := s.ofPods()
	s.chain("ADD", "a", plugins)
	must.Succeed(t, s.operate("install", "--names", "all", s.programs).err(), "install")
	s.chain("CHECK", "a", plugins)
	s.chain("DEL", "a", plugins)
	expect.Equal(t, s.ofPods(), before, "there was\n%s\nand after DEL there is", before)
	expect.Failure(t, expect.Err(os.Stat(s.state+"/attachments")), "there are records")
}

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
	p := w.addPod("a")
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
	p, db := l.pod("a"), named("db-0")
	w.add(p, db...)
	w.del(p, db...)
	k := l.keep(t)
	k.kill()
	must.That(t, len(l.leaseRecords(t)) > 0, "nothing is remembered")
	for _, field := range []string{"obtained", "renew", "rebind", "expire", "booted"} {
		l.rewrite(t, field, "2001-02-03T04:05:06Z")
	}
	l.keep(t)
	l.eventually(t, func() bool { return len(l.leaseRecords(t)) == 0 })
}

// To the server both are the same client.
func TestADeadPodsLeaseStaysWithItsSuccessor(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "clientID": "mac"}})
	db := named("db-0")
	was := ip4(l.dies(t, w, db...))
	p := l.pod("next")
	is := ip4(w.add(p, db...))
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
	expect.Equal(t, ip4(w.add(l.pod("again"), named("db-0")...)), was, "the pod had %s, and its next container has", was)
}

// The pod, and all that was on record below /run, went with the boot; the server has forgotten whose the address was.
func TestARebootKeepsTheAddressOfAPod(t *testing.T) {
	t.Parallel()
	const inTurn = "--dhcp-sequential-ip"
	l := newLAN(t, inTurn)
	w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "clientID": "pod"}})
	db := named("db-0")
	first := w.addPod("first", named("first")...)
	was := ip4(l.dies(t, w, db...))
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
	expect.Equal(t, ip4(w.add(l.pod("again"), db...)), was, "the pod had %s before the boot, and has", was)
}

// After a power cut the router is up later than the node. The pod of before comes at once, before the keeper has seen its
// lease, and has the same address until the router has another one for it.
func TestPodsStartWhileTheRouterIsSilent(t *testing.T) {
	t.Parallel()
	for by, next := range map[string]string{"pod": "again", "container": "gone"} {
		nstest.RunParallel(t, by, func(t *testing.T) {
			l := newLAN(t)
			w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "clientID": by}})
			db := named("db-0")
			was := ip4(l.dies(t, w, db...))
			l.rewrite(t, "boot", "00000000-0000-4000-8000-000000000000")
			must.Succeed(t, os.RemoveAll(l.state))
			l.server.Stop()

			p, began := l.pod(next), time.Now()
			is := ip4(w.add(p, db...))
			expect.That(t, is == was, "the pod had %s before the power cut, and has %s", was, is)
			expect.That(t, time.Since(began) < 10*time.Second, "the ADD took %s", time.Since(began))
			wantPing(t, p.NS, router4)
			const note = "the pod has its last lease, which no server has confirmed yet"
			expect.Contains(t, strings.Join(l.leaseOf(t, p).Notes, "\n"), note, "notes")
			expect.Success(t, w.check(p))

			l.keep(t)
			expect.Success(t, w.status())
			l.serve(t)
			l.eventually(t, func() bool { return len(l.leaseOf(t, p).Notes) == 0 }, "the lease is confirmed")
			expect.Contains(t, l.leased(), " "+was.String()+" ", "the server's leases")
			w.del(p)

			// A router that gives other addresses moves it.
			l.server.Stop()
			p = l.pod("b")
			if by == "container" {
				wantError(t, expect.Err(w.with(conf{"ipam": conf{"type": "dhcp", "timeout": "1s"}}).tryAdd(p)), 11, "DISCOVER")
				return
			}
			is = ip4(w.add(p, db...))
			expect.Equal(t, is, was, "address without a server")
			l.serve(t, "--dhcp-range=192.168.50.20,192.168.50.30,1h")
			l.eventually(t, func() bool {
				got := globals(t, p.NS, "eth0")
				return len(got) == 1 && strings.HasPrefix(got[0], "192.168.50.2")
			}, "the pod has another address")
			l.eventually(t, func() bool { return w.check(p) == nil }, "all follows the lease")
		})
	}
}
