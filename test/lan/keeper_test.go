package lan

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"

	// As for the plugin: see TestMain.
	_ "github.com/tombolo-cni/tombolo/internal/keeper"
)

// keeper is tombolod on the host.
type keeper struct {
	*network
	cmd *exec.Cmd
	log string
}

// kept is a network that wants a keeper, as is the default.
func kept(fields object) object {
	all := object{"ipam": object{"type": "dhcp"}}
	maps.Copy(all, fields)
	return all
}

// keeper starts one for the network's directories, and waits until it is at work.
func (n *network) keeper() *keeper { n.Helper(); return n.keeperBy(n.start) }

// start starts a program on the host.
func (n *network) start(cmd *exec.Cmd) {
	n.Helper()
	must.Succeed(n, n.host.ns.Do(cmd.Start))
}

// keeperBy is keeper, with the program started in the caller's way.
func (n *network) keeperBy(start func(*exec.Cmd)) *keeper {
	n.Helper()
	k := &keeper{network: n, log: filepath.Join(n.TempDir(), "keeper")}
	out := must.Of(os.Create(k.log)).Get(n)
	defer out.Close()
	k.cmd = exec.Command(program(n, "tombolod"), "--leases", n.leases, "--state", n.state, "--metrics", "none", "--log-level", "debug")
	k.cmd.Stdout, k.cmd.Stderr = out, out
	start(k.cmd)
	n.Cleanup(func() {
		k.kill()
		if n.Failed() {
			n.Logf("the keeper's log:\n%s", nstest.ReadIf(n, k.log))
		}
	})
	must.Until(n, "a keeper", func() bool { return strings.Contains(nstest.ReadIf(n, k.log), "keeping leases") })
	return k
}

// kill ends it without a word; it may have been killed already.
func (k *keeper) kill() {
	k.cmd.Process.Kill()
	k.cmd.Wait()
}

// leaseEntry is what is read here of `tombolo leases --json`.
type leaseEntry struct {
	Hash, Error   string
	State         lease.State
	Address       netip.Prefix
	Renew, Expire time.Time
	Left          int64 // seconds
}

// lease gives a record as `tombolo leases` shows it.
func (n *network) lease(hash string) (leaseEntry, bool) {
	n.Helper()
	out := must.Of(n.exec("tombolo", nil, nil, "leases", "--json", "--leases", n.leases)).Get(n)
	var list []leaseEntry
	unmarshal(n, out, &list)
	i := slices.IndexFunc(list, func(e leaseEntry) bool { return e.Hash == hash })
	if i < 0 {
		return leaseEntry{}, false
	}
	return list[i], true
}

// leaseOf is the one of a pod.
func (n *network) leaseOf(p *pod) leaseEntry {
	n.Helper()
	e, ok := n.lease(ident.Hash(n.conf["name"].(string), p.id, nic))
	if !ok {
		n.Fatalf("no lease of %s is on record", p.id)
	}
	return e
}

// makeDue has the next keeper renew a lease as soon as it begins: nobody waits here for
// half of the shortest lease that dnsmasq grants, two minutes. No keeper runs meanwhile.
func (n *network) makeDue(hash string) {
	n.Helper()
	n.change(hash, func(r *lease.Record) { r.Lease.Renew = time.Now().UTC() })
}

// change changes a lease's record as other processes do.
func (n *network) change(hash string, by func(*lease.Record)) {
	n.Helper()
	dir := must.Of(lease.Open(n.leases)).Get(n)
	held := must.Of(dir.Lock(n.Context(), hash)).Get(n)
	r, err := held.Load()
	if err == nil {
		by(r)
		err = held.Replace(r)
	}
	must.Succeed(n, errors.Join(err, held.Close()))
}

// dueUntil waits like eventually, with the lease due again every 15 s: an answer that does
// not come within the seconds that a keeper waits for it, as on a machine that is busy, has
// it try again at half of what is left of the lease, and that is long.
func (n *network) dueUntil(hash, what string, is func() bool) {
	n.Helper()
	due := time.Now()
	must.Until(n, what, func() bool {
		if is() {
			return true
		}
		if time.Since(due) > 15*time.Second {
			n.makeDue(hash)
			due = time.Now()
		}
		return false
	})
}

// messages are the DHCP messages of and to a client, as the server logs them.
func (d *dhcp) messages(mac string) []string {
	d.Helper()
	var list []string
	for _, m := range regexp.MustCompile(`(DHCP[A-Z]+)\(`+nic+`\)[^\n]* `+mac).FindAllStringSubmatch(d.Logged(), -1) {
		list = append(list, m[1])
	}
	return list
}

// renewed waits until a client's lease has been renewed, and nothing else happened to it
// since there were so many messages.
func (d *dhcp) renewed(mac string, since int) {
	d.Helper()
	must.Until(d, "the server renews the lease of "+mac, func() bool { return slices.Contains(d.messages(mac)[since:], "DHCPACK") })
	d.wantOnlyRenewals(mac, since)
}

func (d *dhcp) wantOnlyRenewals(mac string, since int) {
	d.Helper()
	for _, m := range d.messages(mac)[since:] {
		if m != "DHCPREQUEST" && m != "DHCPACK" {
			d.Errorf("the server has heard or sent %s, and all of %v", m, d.messages(mac)[since:])
		}
	}
}

// udhcpc is the host's own DHCP client, on its NIC.
type udhcpc struct {
	*lan
	cmd *exec.Cmd
	did string // a file of what its script was called for
}

// udhcpc has the host lease its address, as a host does. The client runs on: what it is
// on a port, it has to find out.
func (l *lan) udhcpc() *udhcpc {
	l.Helper()
	nstest.Need(l, "busybox")
	iproute, err := exec.LookPath("ip") // some shells have one of their own
	must.Succeed(l, err)
	dir := l.TempDir()
	script := filepath.Join(dir, "script")
	c := &udhcpc{lan: l, did: filepath.Join(dir, "did")}
	text := strings.NewReplacer("IP", iproute, "DID", c.did).Replace(`#!/bin/sh
case $1 in
bound | renew)
	IP address replace $ip/$mask broadcast + dev $interface valid_lft $lease preferred_lft $lease
	IP route replace default via $router dev $interface proto dhcp src $ip metric 1024
	;;
esac
echo $1 $ip >>DID
`)
	must.Succeed(l, os.WriteFile(script, []byte(text), 0o700))
	c.cmd = exec.Command("busybox", "udhcpc", "-i", nic, "-f", "-t", "60", "-T", "1", "-s", script)
	c.cmd.Stdout, c.cmd.Stderr = l.Output(), l.Output()
	must.Succeed(l, l.host.ns.Do(c.cmd.Start))
	l.Cleanup(func() {
		c.cmd.Process.Kill()
		c.cmd.Wait()
	})
	must.Until(l, "the host leases its address", func() bool {
		_, err := fmt.Sscanf(last(c.calls()), "bound %s", new(string))
		return err == nil
	})
	l.host.ip4 = netip.MustParseAddr(strings.TrimPrefix(last(c.calls()), "bound "))
	return c
}

// calls are what the script was called for.
func (c *udhcpc) calls() []string {
	c.Helper()
	return strings.Split(strings.TrimSpace(nstest.ReadIf(c, c.did)), "\n")
}

func last(list []string) string { return list[len(list)-1] }

// renew tells the client to renew its lease now, and waits until it has.
func (c *udhcpc) renew() {
	c.Helper()
	before := len(c.calls())
	must.Succeed(c, c.cmd.Process.Signal(syscall.SIGUSR1))
	must.Until(c, "the host's own client renews its lease", func() bool { return len(c.calls()) > before })
	if got := strings.Fields(last(c.calls())); len(got) != 2 || got[1] != c.host.ip4.String() {
		c.Errorf("the client's script was called for %q, want a renewal of %s", got, c.host.ip4)
	}
}

// leasedOn fails the test unless a link has the host's leased address, with an end.
func (l *lan) leasedOn(link string) {
	l.Helper()
	if out := l.hostRun("ip", "-4", "-o", "address", "show", "dev", link); !strings.Contains(out, l.host.ip4.String()+"/24 ") || !strings.Contains(out, " dynamic ") {
		l.Errorf("%s has not the leased %s, with the lease's end:\n%s", link, l.host.ip4, out)
	}
}

// The host's own client goes on at the NIC.
func TestTheHostsOwnClientNoticesNothing(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	d := l.dnsmasq()
	l.plug(l.host.ns)
	l.followsRouter() // which is slower than DHCP, or faster
	client := l.udhcpc()
	for _, p := range []place{l.other, l.internet} {
		l.serve(p, servicePort, 4)
	}
	before, mac := l.moved(nic), macOf(t, l.host, nic)
	n := l.network(kept(nil))
	n.keeper()
	a := n.add(l.newPod("a"))
	wantSame(t, "the host beside a container", before, l.moved(nic))

	heard := len(d.messages(mac))
	client.renew()
	d.wantOnlyRenewals(mac, heard)
	l.leasedOn(nic)
	l.ask(l.host, l.internet.ip4, servicePort, l.host.ip4)
	l.ask(a.place, l.internet.ip4, servicePort, a.ip4)
	n.wantStatus("")
	n.check(a)

	n.del(a)
	n.operate("remove", "home")
	l.wantNoLink(bridge)
	wantSame(t, "the host after the removal", before, l.moved(nic))
	client.renew()
	l.leasedOn(nic)
}

// wantStatus calls STATUS, which is to say something; nothing: that all is well.
func (n *network) wantStatus(says string) {
	n.Helper()
	out, err := n.verb("STATUS", &pod{})
	switch {
	case says == "" && err != nil:
		n.Errorf("%v", err)
	case says != "" && (err == nil || !strings.Contains(err.Error(), `"code":50,`) || !strings.Contains(err.Error(), says)):
		n.Errorf("STATUS: %s %v, want code 50 and %q", out, err, says)
	}
}

func TestKeeperRenewsPodsWhichFollowTheServerToOtherAddresses(t *testing.T) {
	t.Parallel()
	for _, route := range []string{"router", "host"} {
		t.Run("by the "+route, func(t *testing.T) {
			t.Parallel()
			l, d := newLab(t)
			n := l.network(kept(object{"defaultRoute": route}))
			k := n.keeper()
			a := n.add(l.newPod("a", published()...))
			b := n.add(l.newPod("b"))
			for _, p := range []*pod{a, b} {
				l.serve(p.place, servicePort, 4)
			}
			works := func() {
				t.Helper()
				l.everybodyTalks(4, a.place, b.place)
				l.publishedPortIsReached(4, a.place, b.place)
				expect.Success(t, nstest.Ping(t, a.ns, l.internet.ip4), "from the pod to beyond the router")
			}
			works()

			mac, hash := macOf(t, a.place, nic), n.leaseOf(a).Hash
			was, heard := n.leaseOf(a), len(d.messages(mac))
			k.kill()
			n.makeDue(hash)
			k = n.keeper()
			d.renewed(mac, heard)
			must.Until(l, "the keeper knows", func() bool {
				e := n.leaseOf(a)
				return e.State == lease.Bound && e.Renew.After(time.Now()) && e.Address == was.Address
			})
			works()

			// The operator wants the pod elsewhere.
			k.kill()
			d.Stop()
			old, next := a.ip4, nstest.Addr("192.168.50.55")
			d.start("--dhcp-host=" + mac + "," + next.String())
			n.makeDue(hash)
			n.keeper()
			must.Until(l, "the pod's attachment follows", func() bool { return n.attached(a) == next.String() })
			got := d.messages(mac)
			expect.That(t, slices.Contains(got, "DHCPNAK"), "the server was to refuse the old address: %v", got)
			a.ip4 = next
			works()
			n.check(a)
			n.check(b)

			// What it was it may not be any more, and would be if the guard had not followed.
			ip(t, a.ns, "address add "+old.String()+"/32 dev "+nic, "route add "+l.other.ip4.String()+" dev "+nic+" src "+old.String())
			l.wantNoAnswer(a.place, l.other.ip4, servicePort)
			ip(t, a.ns, "route del "+l.other.ip4.String(), "address del "+old.String()+"/32 dev "+nic)
			works()
			n.del(a)
			d.forgets(mac)
		})
	}
}

// attached gives a pod's addresses as `tombolo ls` has them.
func (n *network) attached(p *pod) string {
	n.Helper()
	out := must.Of(n.exec("tombolo", nil, nil, "ls", "--json", "--state", n.state)).Get(n)
	var list []struct {
		ContainerID string
		Addresses   []struct{ Prefix netip.Prefix }
	}
	unmarshal(n, out, &list)
	var texts []string
	for _, a := range list {
		for _, o := range a.Addresses {
			if a.ContainerID == p.id {
				texts = append(texts, o.Prefix.Addr().String())
			}
		}
	}
	return strings.Join(texts, " ")
}
