package cni

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// kea6 runs a DHCPv6 server on the router whose leases are renewed after 2 s; other fields than these in its
// subnet are a test's.
type kea6 struct {
	dir string
	cmd *exec.Cmd
}

func (l *lan6) newKea6(t *testing.T) *kea6 {
	t.Helper()
	nstest.Need(t, "kea-dhcp6")
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
	return nstest.ReadIf(t, filepath.Join(k.dir, "log"))
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
	must.Succeed(t, os.WriteFile(filepath.Join(k.dir, "kea.json"), text, 0o600))
	before := strings.Count(k.log(t), "DHCP6_STARTED ")
	k.cmd = exec.Command("kea-dhcp6", "-c", filepath.Join(k.dir, "kea.json"))
	k.cmd.Env = append(os.Environ(), "KEA_LOCKFILE_DIR="+k.dir, "KEA_PIDFILE_DIR="+k.dir)
	must.Succeed(t, l.router.Do(k.cmd.Start))
	l.eventually(t, func() bool { return strings.Count(k.log(t), "DHCP6_STARTED ") > before })
}

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
	solicits := server.heard(t, "SOLICIT")
	expect.That(t, solicits == 1, "%d SOLICITs, want that of the ADD", solicits)
	expect.Success(t, w.check(p))
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
