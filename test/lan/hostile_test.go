package lan

import (
	"bytes"
	"encoding/json"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// Below 1280 bytes the kernel takes IPv6 from a link, with all addresses and routes.
func TestAServersMTULeavesThePodItsIPv6(t *testing.T) {
	l, d := newLab(t)
	d.Stop()
	d.start("--dhcp-option-force=option:mtu,600")
	n := l.network(dualStack(nil))
	a := n.add(l.newPod("a"))
	expect.Contains(t, d.Logged(), "mtu  600", "the server named no such MTU, so that the test shows nothing")
	expect.Contains(t, string(a.result), `"mtu":1280,"sandbox"`,
		"the result has another MTU for the pod than IPv6's smallest: %s", a.result)
	n.check(a)
	l.meet(both(), [2]place{l.other, a.place}, [2]place{a.place, l.internet})

	// So it is the MTU that would have done it.
	ip(t, a.ns, "link set "+nic+" mtu 600")
	if out, err := n.verb("CHECK", a); err == nil || !strings.Contains(out, "interface eth0: route default via fe80:") {
		t.Errorf("with an MTU of 600 CHECK says %q, %v", out, err)
	}
}

// deed is what a pod that has all rights in its namespace does to it.
type deed struct {
	name string
	do   string // a shell's words, in the pod; $aside is another namespace of its own
	off  bool   // nobody hears the pod afterwards, whatever guards it: it has no interface, or a MAC that is no pod's
}

func deeds() []deed {
	return []deed{
		{"renames its interface", "ip link set eth0 down; ip link set eth0 name lost0; ip link set lost0 up", false},
		{"has another of the name", "ip link set eth0 down; ip link set eth0 name lost0; ip link set lost0 up; ip link add eth0 type veth peer name far0; ip link set eth0 up; ip link set far0 up", false},
		{"deletes its interface", "ip link del eth0", true},
		{"deletes it, and has another of the name", "ip link del eth0; ip link add eth0 type veth peer name far0; ip link set eth0 up; ip link set far0 up", true},
		{"moves it into another namespace", "ip link set eth0 netns $aside", false},
		{"moves it there and back", "ip link set eth0 netns $aside; nsenter --net=$aside ip link set eth0 netns $$; ip link set eth0 up", false},
		{"changes its MAC", "ip link set eth0 down; ip link set eth0 address 02:66:66:66:66:66; ip link set eth0 up", true},
		{"takes the router's MAC", "ip link set eth0 down; ip link set eth0 address $router; ip link set eth0 up", true},
		{"has a macvlan", "ip link add link eth0 name mac0 address 02:66:66:66:66:67 type macvlan mode bridge; ip link set mac0 up; ip addr add " + routerIP4 + "/24 dev mac0", false},
		{"has a bridge", "ip link add inner type bridge stp_state 1 forward_delay 0; ip link set eth0 master inner; ip link set inner up; ip link add in0 type veth peer name in1; ip link set in0 master inner up; ip link set in1 up", false},
		{"listens to everything", "ip link set eth0 promisc on", false},
		{"takes the smallest MTU", "ip link set eth0 mtu 68", false},
		{"takes the largest MTU", "ip link set eth0 mtu 65535", false},
		{"takes it down", "ip link set eth0 down", false},
		{"takes the router's addresses", "ip addr flush dev eth0; ip addr add " + routerIP4 + "/24 dev eth0; arping -c 1 -U -I eth0 " + routerIP4 + " || true", false},
		{"has names of the host's", "for name in " + bridge + " veth0 ifb0; do ip link add $name type bridge; done", false},
		{"redirects what comes", "tc qdisc add dev eth0 clsact; tc filter add dev eth0 ingress u32 match u32 0 0 action mirred egress redirect dev eth0", false},
		{"forbids itself to hear", "nft 'table inet deaf { chain in { type filter hook input priority -400; policy drop; }; }'", false},
	}
}

// does has the pod do it.
func (d deed) does(t *testing.T, l *lan, p *pod) (aside *netns.NS) {
	t.Helper()
	aside = nstest.New(t)
	nstest.Run(t, p.ns, "env", "aside="+nstest.Path(t, aside), "router="+macOf(t, l.router, nic), "sh", "-ec", d.do)
	return aside
}

// Whatever a pod does to its namespace, it passes for nobody, nobody else is harmed, no
// verb waits for it, and nothing of it is left in the end.
func TestHostileNamespaceHarmsNobodyElse(t *testing.T) {
	t.Parallel()
	l, _ := newLab(t)
	n := l.network(object{"deadline": "1m"})
	good := n.add(l.newPod("good"))
	l.serve(good.place, servicePort, 4)
	e := l.listen(l.other.ns, nic)
	for i, deed := range deeds() {
		t.Run(deed.name, func(t *testing.T) {
			evil := n.add(l.newPod("evil", published()...))
			port := n.portOf(evil)
			aside := deed.does(t, l, evil)

			n.cannotPass(t, e, evil.ns, aside)
			// What it says of the pod is for the pod's owner; it says it.
			_, _ = n.verb("CHECK", evil)
			n.repair()
			n.check(good)
			next := n.add(l.newPod("next"))
			l.ask(next.place, good.ip4, servicePort, next.ip4)
			n.del(next)
			n.cannotPass(t, e, evil.ns, aside)

			if i%2 == 0 {
				n.del(evil)
			} else {
				n.collectAllBut(good)
			}
			n.wantGone(t, evil, port)
		})
	}
	l.ask(l.other, good.ip4, servicePort, l.other.ip4)
	n.check(good)
}

// Without the guard, most of these do pass: so it is the guard that stops them.
func TestHostileNamespacePassesWithoutAGuard(t *testing.T) {
	t.Parallel()
	l, _ := newLab(t)
	n := l.network(object{"lanGuard": false})
	e := l.listen(l.other.ns, nic)
	for _, deed := range deeds() {
		evil := n.add(l.newPod("evil"))
		aside := deed.does(t, l, evil)
		claim(t, evil.ns, aside)
		if deed.off {
			if got := e.spoofs(); got > 0 {
				t.Errorf("a pod that %s: a machine of the LAN hears %d frames by which it is the router", deed.name, got)
			}
		} else {
			// A link that comes up has its carrier a little later.
			must.Until(l, "a pod that "+deed.name+" passes for the router", func() bool { claim(t, evil.ns, aside); return e.spoofs() > 0 })
		}
		n.del(evil)
	}
}

// The same while verbs are under way: each ends, and a DEL leaves nothing.
func TestNamespaceThatChangesAllTheTimeIsDeleted(t *testing.T) {
	l, _ := newLab(t)
	n := l.network(object{"deadline": "30s"})
	n.conf["ipam"].(object)["timeout"] = "5s"
	good := n.add(l.newPod("good"))
	e := l.listen(l.other.ns, nic)
	for _, deed := range []deed{
		{name: "renames its interface", do: "ip link set eth0 name lost0; ip link set lost0 up; ip link set lost0 name eth0"},
		{name: "takes it down and up", do: "ip link set eth0 down; ip link set eth0 up"},
		{name: "deletes it", do: "sleep 0.01; ip link del eth0"},
		{name: "makes one of the name", do: "ip link add eth0 type veth peer name far0; ip link set eth0 up; ip link set far0 up; sleep 0.01; ip link del far0"},
		{name: "flushes its addresses", do: "ip addr flush dev eth0"},
		{name: "changes its MAC", do: "ip link set eth0 address 02:66:66:66:66:66; ip link set eth0 up"},
	} {
		t.Run(deed.name, func(t *testing.T) {
			for range runs(t) {
				evil := l.newPod("evil", published()...)
				port := n.portOf(evil)
				stop := always(t, evil.ns, deed.do)
				s := l.spoof(evil)
				if out, err := n.verb("ADD", evil); err == nil {
					evil.learn(t, out)
					_, _ = n.verb("CHECK", evil)
					n.repairBut(evil) // which undoes it meanwhile
				}
				n.del(evil)
				s.end()
				stop()
				n.wantGone(t, evil, port)
			}
			got := e.spoofs()
			expect.That(t, got <= 0, "a machine of the LAN hears %d frames by which the pod is the router", got)
			n.check(good)
		})
	}
}

// always runs a shell's words in a namespace again and again, whatever becomes of them.
func always(t *testing.T, ns *netns.NS, words string) (stop func()) {
	t.Helper()
	cmd := exec.Command("sh", "-c", "while :; do { "+words+"; } 2>/dev/null; done")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	must.Succeed(t, ns.Do(cmd.Start))
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
		_ = cmd.Wait()
	}
	t.Cleanup(stop)
	return stop
}

// claim has namespaces say by all of their interfaces that they are the router.
func claim(t *testing.T, spaces ...*netns.NS) {
	t.Helper()
	for _, ns := range spaces {
		must.Succeed(t, ns.Do(claimByAll))
	}
}

func claimByAll() error {
	links, err := net.Interfaces()
	if err != nil {
		return err
	}
	raw, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(raw)
	control, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(control)
	for _, link := range links {
		bringUp(control, &link)
		for _, source := range []net.HardwareAddr{link.HardwareAddr, {2, 0x66, 0x66, 0x66, 0x66, 0x66}} {
			frame := claimOf(source, netip.MustParseAddr(routerIP4))
			for _, frame := range [][]byte{frame, frame[:15], append(frame, make([]byte, 1<<15)...)} {
				// It need not be up, nor take as much.
				_ = unix.Sendto(raw, frame, 0, &unix.SockaddrLinklayer{Ifindex: link.Index})
			}
		}
	}
	return nil
}

// cannotPass has namespaces of a pod's say that they are the router, and nobody hears it.
func (n *network) cannotPass(t *testing.T, e *ear, spaces ...*netns.NS) {
	t.Helper()
	claim(t, spaces...)
	n.meet([]int{4}, [2]place{n.host, n.router}, [2]place{n.other, n.router})
	got := e.spoofs()
	expect.That(t, got <= 0, "a machine of the LAN hears %d frames by which the pod is the router", got)
	at := nstest.Run(t, n.host.ns, "ip", "neigh", "show", routerIP4, "dev", nic)
	expect.That(t, strings.Contains(at, macOf(t, n.router, nic)), "the host has the router at %s", at)
}

// portOf is the name of a pod's port.
func (n *network) portOf(p *pod) string {
	return "veth" + ident.Hash(n.conf["name"].(string), p.id, nic)
}

// wantGone has nothing left of a pod.
func (n *network) wantGone(t *testing.T, p *pod, port string) {
	t.Helper()
	hash := strings.TrimPrefix(port, "veth")
	links := nstest.Run(t, n.host.ns, "ip", "-o", "link", "show")
	expect.That(t, !strings.Contains(links, port), "its port is left: %s", links)
	if rules := nstest.Run(t, n.host.ns, "nft", "list", "ruleset"); strings.Contains(rules, hash) || strings.Contains(rules, port) {
		t.Errorf("elements of it are left: %s", rules)
	}
	for _, dir := range []string{filepath.Join(n.state, "attachments", "home"), n.leases} {
		entries := must.Of(os.ReadDir(dir)).Get(t)
		for _, entry := range entries {
			if entry.Name() == hash+".json" {
				t.Errorf("its record is left: %s in %s", entry.Name(), dir)
			}
		}
	}
	p.result = nil
}

// collectAllBut has a runtime collect garbage that knows of some pods alone.
func (n *network) collectAllBut(pods ...*pod) {
	n.Helper()
	list := []object{}
	for _, p := range pods {
		list = append(list, object{"containerID": p.id, "ifname": nic})
	}
	conf := object{"cni.dev/valid-attachments": list}
	maps.Copy(conf, n.conf)
	stdin := must.Of(json.Marshal(conf)).Get(n)
	out, err := n.exec("tombolo-cni", []string{"CNI_COMMAND=GC", "CNI_PATH=/"}, bytes.TrimSpace(stdin))
	expect.That(n, err == nil, "GC: %v %s", err, out)
}
