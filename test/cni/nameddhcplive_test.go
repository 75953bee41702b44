package cni

import (
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// leasingSide is a LAN of kea's on which the reference's plugins make interfaces, and dhcp by name leases
// for them.
type leasingSide struct {
	*keaLAN
	*side
}

func newLeasingSide(t *testing.T, fields conf) *leasingSide {
	t.Helper()
	peers := os.Getenv(peersVar)
	if peers == "" {
		t.Fatal("TOMBOLO_PEERS is not set: make peers builds what this compares with")
	}
	l := newKeaLAN(t, fields)
	return &leasingSide{l, l.node.side(peers, []string{"dhcp", "portmap"})}
}

// interfaces are how plugins of the reference's make them on the LAN.
func interfaces() map[string]string {
	const rest = `"cniVersion":"1.0.0","name":"lan","stateDir":"STATE","leaseDir":"STATE-leases","ipam":{"type":"dhcp","timeout":"60s"}`
	return map[string]string{
		"macvlan": `{"type":"macvlan","master":"br0",` + rest + "}",
		"bridge":  `{"type":"bridge","bridge":"br0",` + rest + "}",
	}
}

// by has a plugin carry a verb out, which has to succeed, and gives the result.
func (s *leasingSide) by(t *testing.T, plugin, what, id string) *current.Result {
	t.Helper()
	conf := interfaces()[plugin]
	if what == "CHECK" {
		conf = strings.TrimSuffix(conf, "}") + `,"prevResult":` + s.results[id] + "}"
	}
	o := s.side.call(verb{plugin: plugin, verb: what, id: id, conf: conf})
	if o.status != 0 {
		t.Fatalf("%s of %s by %s: %s", what, id, plugin, o.stdout)
	}
	r := &current.Result{}
	if what == "ADD" {
		s.results[id] = o.stdout
		if err := json.Unmarshal([]byte(o.stdout), r); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// publish has portmap carry a verb out for a pod's host port.
func (s *leasingSide) publish(what, id string) outcome {
	s.side.Helper()
	return s.side.call(verb{plugin: "portmap", verb: what, id: id, conf: `{"cniVersion":"1.0.0","name":"lan","stateDir":"STATE","leaseDir":"STATE-leases","type":"portmap",
		"runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]},"prevResult":` + s.results[id] + "}"})
}

// What another plugin's interface leases is renewed by any tombolod, and its pod follows it to another
// address; DEL gives that back. Host ports do not follow, as CHECK and check say.
func TestDHCPByNameIsRenewedByTombolod(t *testing.T) {
	t.Parallel()
	const low, high = "192.168.50.10 - 192.168.50.10", "192.168.50.200 - 192.168.50.209"
	for plugin := range interfaces() {
		t.Run(plugin, func(t *testing.T) {
			t.Parallel()
			s := newLeasingSide(t, conf{"pools": []conf{{"pool": low}}})
			k := s.kept(t)
			r := s.by(t, plugin, "ADD", "a")
			p, address := s.of("a"), ip4(r).String()
			s.wantPut(t, p, prefix(r))
			s.eventually(t, func() bool { return lifetime(t, p) > 0 }) // the kernel's, for want of a keeper
			s.eventually(t, func() bool { return s.times(address) > 2 })
			s.side.ip("addr add 192.168.50.253/24 dev br0") // by which the host reaches the pod
			if o := s.publish("ADD", "a"); o.status != 0 {
				t.Fatalf("ADD by portmap: %s", o.stdout)
			}
			k.kill()
			if o := s.side.call(verb{plugin: plugin, verb: "CHECK", id: "a", conf: strings.TrimSuffix(interfaces()[plugin], "}") + `,"prevResult":` + s.results["a"] + "}"}); o.status == 0 || !strings.Contains(o.stdout, "no keeper runs") {
				t.Errorf("CHECK without a keeper: %s", o.stdout)
			}
			before, discovers := s.times(address), s.discovers()
			k = s.kept(t)
			s.eventually(t, func() bool { return s.times(address) > before })
			s.by(t, plugin, "CHECK", "a")
			if o := s.publish("CHECK", "a"); o.status != 0 {
				t.Errorf("CHECK by portmap: %s", o.stdout)
			}
			check := func() outcome {
				return s.side.operate("check", "--state", s.side.state, "--leases", s.side.state+"-leases")
			}
			if o := check(); strings.Contains(o.stdout, "its lease is of") {
				t.Errorf("check: %s", o.stdout)
			}
			if got := s.discovers(); got != discovers {
				t.Errorf("%d DISCOVERs after the restart, %d before", got, discovers)
			}
			if s.went(t, prefix(r)) != 0 {
				t.Errorf("the address did not stay:\n%s", readFileIf(t, s.watched))
			}
			// The server refuses, and gives another.
			k.freeze(t)
			s.kea.stop()
			s.kea.start(conf{
				"pools":        []conf{{"pool": low}, {"pool": high}},
				"reservations": []conf{{"hw-address": "02:00:00:00:00:01", "ip-address": "192.168.50.10"}},
			})
			k.thaw(t)
			s.eventually(t, func() bool {
				e := s.recordOf(t, p)
				return e.State == "bound" && strings.HasPrefix(e.Address, "192.168.50.20")
			})
			now := s.recordOf(t, p).Address
			s.wantPut(t, p, now)
			wantPing(t, p.NS, router4)
			moved := "its lease is of " + netip.MustParsePrefix(now).Addr().String() + " since, and its host ports and firewall rules are of " + address + ": make the pod anew"
			if o := s.publish("CHECK", "a"); o.status == 0 || !strings.Contains(o.stdout, moved) {
				t.Errorf("CHECK by portmap: %s; want %s", o.stdout, moved)
			}
			if o := check(); o.status == 0 || !strings.Contains(o.stdout, moved) {
				t.Errorf("check: %s; want %s", o.stdout, moved)
			}
			if o := s.publish("DEL", "a"); o.status != 0 {
				t.Errorf("DEL by portmap: %s", o.stdout)
			}
			s.by(t, plugin, "DEL", "a")
			s.eventually(t, func() bool { _, held := s.held()[netip.MustParsePrefix(now).Addr().String()]; return !held })
			s.wantNoLeaseRecords()
		})
	}
}

// Leases go back of pods whose namespace is gone, and of those that GC does not name.
func TestDHCPByNameReleasesForPodsThatAreGone(t *testing.T) {
	t.Parallel()
	for plugin := range interfaces() {
		t.Run(plugin, func(t *testing.T) {
			t.Parallel()
			s := newLeasingSide(t, nil)
			s.kept(t)
			ns, err := netns.New()
			if err != nil {
				t.Fatal(err)
			}
			s.pods["gone"] = &pod{NS: ns, path: nstest.Path(t, ns), id: "gone"}
			stays, gone, collected := ip4(s.by(t, plugin, "ADD", "stays")).String(), ip4(s.by(t, plugin, "ADD", "gone")).String(), ip4(s.by(t, plugin, "ADD", "collected")).String()
			s.wantHeld(t, stays, gone, collected)
			nstest.Run(t, s.side.ns, "umount", "-l", s.pods["gone"].path)
			if err := errors.Join(ns.Close(), os.Remove(s.pods["gone"].path)); err != nil {
				t.Fatal(err)
			}
			s.by(t, plugin, "DEL", "gone")
			s.wantHeld(t, stays, collected)
			gc := strings.TrimSuffix(strings.Replace(interfaces()[plugin], "1.0.0", "1.1.0", 1), "}") + `,"cni.dev/valid-attachments":[{"containerID":"stays","ifname":"eth0"}]}`
			if o := s.side.call(verb{plugin: "dhcp", verb: "GC", id: "stays", conf: gc}); o.status != 0 {
				t.Fatal(o.stdout)
			}
			s.wantHeld(t, stays)
			s.by(t, plugin, "DEL", "stays")
			s.wantHeld(t)
			s.wantNoLeaseRecords()
		})
	}
}

// An ADD that was killed while it waited for a server is in nobody's way, and nor is a lease whose pod's
// path leads to another namespace by now.
func TestDHCPByNameAfterAKillAndAPathThatIsAnothers(t *testing.T) {
	t.Parallel()
	s := newLeasingSide(t, nil)
	s.kept(t)
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	p := &pod{NS: ns, path: nstest.Path(t, ns), id: "a"}
	s.pods["a"] = p
	s.side.ip("link add va type veth peer name eth0 netns " + p.path)
	s.side.ip("link set va master br0 up")
	s.kea.stop()
	conf := strings.NewReplacer("STATE", s.side.state).Replace(interfaces()["macvlan"])
	add := exec.Command(filepath.Join(s.programs, "dhcp"))
	add.Env, add.Stdin = (&call{verb: "ADD", id: "a", netns: p.path, ifName: "eth0"}).environ(), strings.NewReader(conf)
	if err := s.side.ns.Do(add.Start); err != nil {
		t.Fatal(err)
	}
	s.eventually(t, func() bool { return s.recordOf(t, p).State == "adding" })
	if err := add.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := add.Wait(); err == nil {
		t.Fatal("the ADD was not killed")
	}
	s.kea.start(nil)
	v := verb{plugin: "dhcp", verb: "ADD", id: "a", conf: interfaces()["macvlan"]}
	o := s.side.call(v)
	var r current.Result
	if err := json.Unmarshal([]byte(o.stdout), &r); err != nil || o.status != 0 {
		t.Fatal(o.stdout)
	}
	s.wantHeld(t, ip4(&r).String())
	// Nobody has set the address: it is not for the keeper to do.
	s.eventually(t, func() bool { return s.times(ip4(&r).String()) > 1 })
	if got := globals(t, p.NS, "eth0"); len(got) > 0 {
		t.Errorf("the pod has %s, which no plugin gave it", got)
	}
	other := nstest.New(t)
	nstest.Run(t, s.side.ns, "umount", "-l", p.path)
	nstest.Run(t, s.side.ns, "mount", "--bind", nstest.Path(t, other), p.path)
	if err := ns.Close(); err != nil {
		t.Fatal(err)
	}
	s.wantHeld(t)
	s.eventually(t, func() bool { return s.recordOf(t, p).State == "" })
	nstest.Run(t, s.side.ns, "umount", "-l", p.path)
}
