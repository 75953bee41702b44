package cni

import (
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// readOnly has the node's programs see /proc/sys read-only, as a container's do that is not privileged.
func (n *node) readOnly() {
	n.within("mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys")
}

// within has the node's programs run in a mount namespace of their own, after a script.
func (n *node) within(script string) {
	n.by = []string{"unshare", "-m", "sh", "-ec", script + ` && exec "$@"`, "sh"}
}

// presets are the parameters of the host that an ADD with all features writes.
func presets() []string {
	return []string{"net/ipv4/ip_forward=1", "net/ipv6/conf/all/forwarding=1", "net/ipv6/conf/default/accept_ra=0", "net/ipv6/conf/default/drop_unicast_in_l2_multicast=1", "net/ipv4/conf/default/route_localnet=1"}
}

func TestReadOnlyParametersWithTheRightValuesAreEnough(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	for _, one := range presets() {
		n.run("sysctl", "-qw", one)
	}
	n.readOnly()
	w := n.portnet(nil)
	p, q := n.pod("a"), n.pod("b")
	r := w.add(p, publish(t, "8080:80/tcp"))
	expect.Success(t, w.check(p))
	wantPing(t, p.NS, outside4, outside6)
	p.serve(t, "tcp", 80)
	expect.Success(t, expect.Err(askPort(t, n.ns, "tcp", "127.0.0.1", 8080)))
	expect.Success(t, w.status())
	o := n.operate("check", "--state", n.state)
	expect.That(t, o.status == 0, "check: %+v", o)
	w.add(q)
	wantPing(t, q.NS, ip4(r).String())
	w.del(p)
	w.del(q)
	n.wantNothing()

	// In the chain by the reference's names, tuning sets what is set.
	n.searchAlso(newSide(t, referenceDir(t), []string{"tuning"}).programs)
	tuned := w.with(conf{"capabilities": nil})
	tuned.after = []conf{{"type": "tuning", "stateDir": n.state, "sysctl": conf{"net.ipv4.conf.all.rp_filter": nstest.Sysctl(t, p.NS, "net/ipv4/conf/all/rp_filter")}}}
	tuned.add(p)
	tuned.after[0]["sysctl"] = conf{"net.ipv4.conf.all.log_martians": "1"}
	wantError(t, expect.Err(tuned.tryAdd(q)), 110, "/proc/sys/net/ipv4/conf/all/log_martians: read-only file system: it is 0")
}

// The first pod came while /proc/sys could be written.
func TestAPodIsAddedAfterProcSysBecameReadOnly(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(nil)
	p, q := n.pod("a"), n.pod("b")
	w.add(p)
	n.readOnly()
	r := w.add(q)
	wantPing(t, p.NS, outside4, ip4(r).String())
	wantPing(t, q.NS, outside4, outside6)
	w.del(p)
	w.del(q)
	n.wantNothing()
}

func TestAReadOnlyParameterIsNamedWithItsRemedy(t *testing.T) {
	t.Parallel()
	written := map[string]string{ // in place of the host's own switches
		"net/ipv4/ip_forward=1":             "net/ipv4/conf/default/forwarding=116",
		"net/ipv6/conf/all/forwarding=1":    "net/ipv6/conf/default/force_forwarding=1",
		"net/ipv6/conf/default/accept_ra=0": "net/ipv6/conf/cbr0/accept_ra=0",
	}
	for _, without := range presets()[:3] {
		nstest.RunParallel(t, without, func(t *testing.T) {
			n := newNode(t)
			for _, one := range presets() {
				if one != without {
					n.run("sysctl", "-qw", one)
				}
			}
			n.readOnly()
			w, p := n.podnet(nil), n.pod("a")
			_, err := w.tryAdd(p)
			path, value, _ := strings.Cut(written[without], "=")
			for _, says := range []string{"write " + value + " to /proc/sys/" + path + ": read-only file system: it is ", "privileged", "ProtectKernelTunables", "conf/default"} {
				wantError(t, err, 110, says)
			}
			n.wantNothing()
			// As the remedy says: the link is made anew.
			n.run("ip", "link", "del", "cbr0")
			n.run("sysctl", "-qw", without)
			w.add(p)
		})
	}
}

// A kernel without IPv6 has no net.ipv6. test/vm/run.sh noipv6 boots one.
func TestARouteOfIPv6NeedsAKernelThatHasIt(t *testing.T) {
	t.Parallel()
	for name, ipam := range map[string]conf{
		"host-local": {"type": "host-local", "subnet": subnet4, "routes": []conf{{"dst": "0.0.0.0/0"}, {"dst": "::/0"}}},
		"static":     {"type": "static", "addresses": []conf{{"address": "10.77.0.9/24", "gateway": gateway4}}, "routes": []conf{{"dst": "fd99::/16", "gw": "fd77::1"}}},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(conf{"ipam": hostLocal(subnet4)})
			w.add(n.pod("built"))
			if nstest.HasIPv6() {
				n.within("mount -t tmpfs none /proc/sys/net/ipv6")
			}
			before := n.traces()
			_, err := w.with(conf{"ipam": ipam}).tryAdd(n.pod("a"))
			wantError(t, err, 7, refusal)
			wantError(t, err, 7, `network "podnet" asks for a route to `)
			n.wantTraces(before)
		})
	}
}
