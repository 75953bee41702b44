package cni

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// kea6 runs a DHCPv6 server on the router whose leases are renewed after 2 s; other fields than these in its
// subnet are a test's.
type kea6 struct {
	dir string
	cmd *exec.Cmd
}

func (l *lan6) newKea6(t *testing.T) *kea6 {
	t.Helper()
	need(t, "kea-dhcp6")
	k := &kea6{dir: t.TempDir()}
	t.Cleanup(func() {
		k.stop()
		if t.Failed() {
			t.Logf("kea:\n%s", k.log(t))
		}
	})
	return k
}

func (k *kea6) log(t *testing.T) string {
	t.Helper()
	return readFileIf(t, filepath.Join(k.dir, "log"))
}

func (k *kea6) stop() {
	if k.cmd != nil {
		_ = k.cmd.Process.Kill()
		_ = k.cmd.Wait()
	}
}

func (l *lan6) startKea6(t *testing.T, k *kea6, fields conf) {
	t.Helper()
	subnet := conf{
		"id": 1, "subnet": "fd00:50::/64", "interface": "eth0", "pools": []conf{{"pool": "fd00:50::100 - fd00:50::1ff"}},
		"valid-lifetime": 150, "preferred-lifetime": 100, "renew-timer": 2, "rebind-timer": 20, "rapid-commit": true,
	}
	for name, v := range fields {
		subnet[name] = v
	}
	to := []conf{{"output": filepath.Join(k.dir, "log"), "maxsize": 0}}
	text := marshal(t, conf{"Dhcp6": conf{
		"interfaces-config": conf{"interfaces": []string{"eth0"}},
		"lease-database":    conf{"type": "memfile", "name": filepath.Join(k.dir, "leases.csv"), "lfc-interval": 0},
		"server-id":         conf{"type": "LL", "persist": false},
		"subnet6":           []conf{subnet},
		"loggers": []conf{
			{"name": "kea-dhcp6", "severity": "INFO", "output_options": to},
			{"name": "kea-dhcp6.packets", "severity": "DEBUG", "debuglevel": 50, "output_options": to},
		},
	}})
	if err := os.WriteFile(filepath.Join(k.dir, "kea.json"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	before := strings.Count(k.log(t), "DHCP6_STARTED ")
	k.cmd = exec.Command("kea-dhcp6", "-c", filepath.Join(k.dir, "kea.json"))
	k.cmd.Env = append(os.Environ(), "KEA_LOCKFILE_DIR="+k.dir, "KEA_PIDFILE_DIR="+k.dir)
	if err := l.router.Do(k.cmd.Start); err != nil {
		t.Fatal(err)
	}
	l.eventually(t, func() bool { return strings.Count(k.log(t), "DHCP6_STARTED ") > before })
}

// heard is how often the server heard a message.
func (k *kea6) heard(t *testing.T, what string) int {
	t.Helper()
	return countIn(k.log(t), "DHCP6_PACKET_RECEIVED ", what)
}

func TestTheKeeperRenewsByDHCPv6AndFollowsTheServer(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	server := l.newKea6(t)
	l.startKea6(t, server, nil)
	k := l.keep(t)
	w := l.leasing(nil)
	p := l.pod("a")
	before := six(t, w.add(p))
	l.eventually(t, func() bool { return server.heard(t, "RENEW") >= 2 })
	k.kill() // and the next goes on
	k = l.keep(t)
	renewals := server.heard(t, "RENEW")
	l.eventually(t, func() bool { return server.heard(t, "RENEW") > renewals })
	if solicits := server.heard(t, "SOLICIT"); solicits != 1 {
		t.Errorf("%d SOLICITs, want that of the ADD", solicits)
	}
	if err := w.check(p); err != nil {
		t.Error(err)
	}
	// The server moves its pool, and gives the old address no more time.
	k.freeze(t)
	server.stop()
	l.startKea6(t, server, conf{"pools": []conf{{"pool": "fd00:50::200 - fd00:50::2ff"}}})
	k.thaw(t)
	l.eventually(t, func() bool {
		shown := nstest.Run(t, p.NS, "ip", "-6", "-o", "address", "show", "dev", "eth0", "scope", "global")
		return strings.Contains(shown, "fd00:50::2") && !strings.Contains(shown, before.String()+"/") && w.check(p) == nil
	})
	w.del(p)
	l.eventually(t, func() bool { return server.heard(t, "RELEASE") >= 1 })
	l.wantNoLeaseRecords()
}

// A pod that is a router: what is in its prefix is its own to give to others.
func TestAPodIsDelegatedAPrefixByDHCPv6(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	server := l.newKea6(t)
	l.startKea6(t, server, conf{"pd-pools": []conf{{"prefix": "fd00:60::", "prefix-len": 48, "delegated-len": 64}}})
	k := l.keep(t)
	w := l.leasing(conf{"ipv6Prefix": 64, "lanGuard": false})
	p := l.pod("a")
	six(t, w.add(p))
	listed := func() netip.Prefix {
		var list []struct{ PrefixIPv6 netip.Prefix }
		unmarshal(t, l.operate("leases", "--json", "--leases", l.state+"-leases").stdout, &list)
		return list[slices.IndexFunc(list, func(e struct{ PrefixIPv6 netip.Prefix }) bool { return e.PrefixIPv6.IsValid() })].PrefixIPv6
	}
	prefix := listed()
	if prefix.Bits() != 64 || !netip.MustParsePrefix("fd00:60::/48").Overlaps(prefix) {
		t.Fatalf("prefix %s", prefix)
	}
	unreachable := func() string { return nstest.Run(t, p.NS, "ip", "-6", "route", "show", "type", "unreachable") }
	if got := unreachable(); !strings.Contains(got, prefix.String()+" ") {
		t.Errorf("routes %q", got)
	}
	own := prefix.Addr().Next()
	nstest.Run(t, p.NS, "ip", "route", "add", "fd00:50::/64", "dev", "eth0") // no router advertises it here
	nstest.Run(t, p.NS, "ip", "address", "add", own.String()+"/128", "dev", "lo", "nodad")
	nstest.WaitForAddresses(t, p.NS)
	link := nstest.Run(t, p.NS, "ip", "-6", "-o", "address", "show", "dev", "eth0", "scope", "link")
	nstest.Run(t, l.router, "ip", "route", "add", prefix.String(), "via", strings.Split(strings.Fields(link)[3], "/")[0], "dev", "eth0")
	wantPing(t, l.router, own.String())
	if err := w.check(p); err != nil {
		t.Error(err)
	}
	// The next keeper renews both.
	k.kill()
	renewals := server.heard(t, "RENEW")
	l.keep(t)
	l.eventually(t, func() bool { return server.heard(t, "RENEW") > renewals })
	if got := listed(); got != prefix {
		t.Errorf("prefix %s, then %s", prefix, got)
	}
	// The server moves it.
	server.stop()
	l.startKea6(t, server, conf{"pd-pools": []conf{{"prefix": "fd00:61::", "prefix-len": 48, "delegated-len": 64}}})
	l.eventually(t, func() bool {
		got := unreachable()
		return strings.Contains(got, "fd00:61:") && !strings.Contains(got, prefix.String()+" ")
	})
	// Its namespace may live on, without its interface.
	nstest.Run(t, p.NS, "ip", "link", "del", "eth0")
	if unreachable() == "" {
		t.Error("the route has gone with the interface: this tests nothing")
	}
	w.del(p)
	if got := unreachable(); got != "" {
		t.Errorf("after DEL there is the route %s", got)
	}
	l.eventually(t, func() bool { return server.heard(t, "RELEASE") >= 1 })
	l.wantNoLeaseRecords()
}

// Its owner may hide a pod's interface from the keeper; the prefix is another pod's from the lease's end on.
func TestTheRouteOfAPrefixThatEndedUnseenGoes(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"the keeper", "DEL"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			l := newLAN6(t)
			server := l.newKea6(t)
			l.startKea6(t, server, conf{"pd-pools": []conf{{"prefix": "fd00:60::", "prefix-len": 48, "delegated-len": 64}},
				"valid-lifetime": 12, "preferred-lifetime": 12, "renew-timer": 6, "rebind-timer": 9})
			k := l.keep(t)
			w := l.leasing(conf{"ipv6Prefix": 64})
			p := l.pod("a")
			six(t, w.add(p))
			had := prefixOf(t, p)
			if !had.IsValid() {
				t.Fatal("there is no prefix")
			}
			nstest.Run(t, p.NS, "ip", "link", "set", "eth0", "name", "hidden0")
			server.stop()
			l.eventually(t, func() bool {
				return !strings.Contains(l.operate("leases", "--json", "--leases", l.state+"-leases").stdout, "prefixIPv6")
			})
			if left := prefixOf(t, p); left != had {
				t.Fatalf("after the end the pod has %s: this tests nothing", left)
			}
			if by == "DEL" {
				k.kill()
				w.del(p)
			} else {
				nstest.Run(t, p.NS, "ip", "link", "set", "hidden0", "name", "eth0")
				k.kill()
				l.keep(t) // which looks at once
				l.eventually(t, func() bool { return !prefixOf(t, p).IsValid() })
			}
			if left := prefixOf(t, p); left.IsValid() {
				t.Errorf("the pod has the route of %s still", left)
			}
		})
	}
}

// A server that has lost its leases delegates a prefix again that a pod still has.
func TestAPrefixOfAnotherPodIsRefused(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	server := l.newKea6(t)
	// The first pod does not renew its lease before the second comes.
	one := conf{"pd-pools": []conf{{"prefix": "fd00:60::", "prefix-len": 64, "delegated-len": 64}}, "renew-timer": 50, "rebind-timer": 80}
	l.startKea6(t, server, one)
	l.keep(t)
	w := l.leasing(conf{"ipv6Prefix": 64, "lanGuard": false, "ipam": conf{"type": "dhcp", "timeout": "10s"}})
	a, b := l.pod("a"), l.pod("b")
	six(t, w.add(a))
	routes := nstest.Run(t, a.NS, "ip", "-6", "route", "show", "type", "unreachable")
	server.stop()
	if err := os.Remove(filepath.Join(server.dir, "leases.csv")); err != nil {
		t.Fatal(err)
	}
	l.startKea6(t, server, one)
	_, err := w.tryAdd(b)
	wantError(t, err, 11, "prefix fd00:60::/64: a pod of this node has fd00:60::/64: container "+a.id)
	if now := nstest.Run(t, a.NS, "ip", "-6", "route", "show", "type", "unreachable"); now != routes || !strings.Contains(now, "fd00:60::/64 ") {
		t.Errorf("the first pod had the routes %q, and has %q", routes, now)
	}
	if err := w.check(a); err != nil {
		t.Error(err)
	}
}
