package cni

import (
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// dueSoon has dnsmasq grant leases of two minutes that are renewed after some seconds.
func dueSoon(t1 string) []string {
	return []string{"--dhcp-range=192.168.50.100,192.168.50.200,2m", "--dhcp-option=option:T1," + t1, "--dhcp-option=option:T2,90"}
}

// leaseView is what an operator sees of a lease.
type leaseView struct {
	ContainerID, State, Error, Server string
	Renew                             time.Time
	Notes                             []string
}

func (l *lan) leaseOf(t *testing.T, p *pod) leaseView {
	t.Helper()
	var list []leaseView
	unmarshal(t, l.operate("leases", "--json", "--leases", l.state+"-leases").stdout, &list)
	for _, one := range list {
		if one.ContainerID == p.id {
			return one
		}
	}
	return leaseView{}
}

// A plain client (udhcpc, dhcpcd, networkd) gets its lease of each of these renewed.
func TestLeasesAreRenewedWhateverTheServersAnswersLookLike(t *testing.T) {
	t.Parallel()
	for name, rule := range map[string]string{
		"from another port":                           "output udp sport 67 udp sport set 6767",
		"renewals from another address":               "output udp sport 67 ip daddr != 255.255.255.255 ip saddr set 192.168.51.1",
		"renewals from another address and port":      "output udp sport 67 ip daddr != 255.255.255.255 ip saddr set 192.168.51.1 udp sport set 6767",
		"from another address of the subnet":          "output udp sport 67 ip saddr set 192.168.50.254",
		"only to what is broadcast":                   "input udp dport 67 ip daddr != 255.255.255.255 drop",
		"only by broadcast, once there is an address": "output udp sport 67 ip daddr != 255.255.255.255 ct state established drop",
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			l := newLAN(t, dueSoon("3")...)
			nstest.Run(t, l.router, "ip", "address", "add", "192.168.51.1/24", "dev", "eth0")
			nstest.Run(t, l.router, "ip", "address", "add", "192.168.50.254/24", "dev", "eth0")
			nstest.Run(t, l.router, "nft", "add table ip x; add chain ip x output { type filter hook output priority 0; }; add chain ip x input { type filter hook input priority 0; }")
			nstest.Run(t, l.router, "nft", "add rule ip x "+rule)
			l.keep(t)
			w, p := l.network(conf{"ipam": conf{"type": "dhcp"}}), l.pod("a")
			w.add(p)
			first := l.leaseOf(t, p)
			l.eventually(t, func() bool { return l.leaseOf(t, p).Renew.Sub(first.Renew) > time.Second }, "the lease is renewed")
			expect.Equal(t, l.leaseOf(t, p).State, "bound", "state")
			w.del(p)
			l.wantNothing()
		})
	}
}

// The router reboots when a renewal is due, and an hour of lease is left.
func TestARenewalThatNobodyAnswersIsANote(t *testing.T) {
	t.Parallel()
	l := newLAN(t, "--dhcp-range=192.168.50.100,192.168.50.200,1h", "--dhcp-option=option:T1,3")
	l.keep(t)
	w, p := l.network(conf{"ipam": conf{"type": "dhcp"}}), l.pod("a")
	w.add(p)
	nstest.Run(t, l.router, "nft", "add table ip x; add chain ip x input { type filter hook input priority 0; }; add rule ip x input udp dport 67 drop")
	const note = "not renewed yet: no answer to 1 REQUEST in "
	l.eventually(t, func() bool { return strings.Contains(strings.Join(l.leaseOf(t, p).Notes, "\n"), note) }, "the lease has a note")
	got := l.leaseOf(t, p)
	expect.That(t, got.State == "bound" && got.Error == "", "lease %+v", got)
	expect.Success(t, w.status())
	o := l.operate("status", "--state", l.state, "--leases", l.state+"-leases")
	expect.Contains(t, o.stdout, "\nleases     1\n", "status")
	expect.Contains(t, l.operate("leases", "--leases", l.state+"-leases").stdout, " eth0: note: "+note, "leases")

	nstest.Run(t, l.router, "nft", "flush ruleset")
	l.eventually(t, func() bool { got := l.leaseOf(t, p); return got.Renew.After(time.Now()) && len(got.Notes) == 0 }, "the lease is renewed, and the note gone")
}

// Two machines of a LAN serve leases.
func TestTwoServersOfALANAreNamed(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	nas := nstest.New(t)
	nstest.Veth(t, l.ns, "lan1", nas, "eth0")
	l.ip("link set lan1 master br0")
	nstest.Run(t, nas, "ip", "address", "add", "192.168.50.66/24", "dev", "eth0")
	other := &lan{node: l.node, router: nas}
	other.serve(t)
	// Which one offers first is up to chance, and so is whether the other one's OFFER comes in time.
	plain := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional"}})
	named := 0
	for _, id := range []string{"a", "b", "c", "d", "e", "f"} {
		p := l.pod(id)
		plain.add(p)
		notes := strings.Join(l.leaseOf(t, p).Notes, "\n")
		if taken := l.leaseOf(t, p).Server; notes != "" {
			rest := map[string]string{router4: "192.168.50.66", "192.168.50.66": router4}[taken]
			expect.Contains(t, notes, taken+" has leased ", "notes")
			expect.Contains(t, notes, "other DHCP servers answer too: ["+rest+"]: ipam.servers says", "notes")
			named++
		}
	}
	expect.That(t, named > 0, "no lease has a note that names both servers")

	for _, server := range []string{"192.168.50.1", "192.168.50.66"} {
		w, p := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "servers": []string{server}}}), l.pod("to-"+server)
		w.add(p)
		expect.Equal(t, l.leaseOf(t, p).Server, server, "server")
		w.del(p)
	}
	w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "servers": []string{"192.168.50.7"}, "timeout": "2s"}})
	wantError(t, expect.Err(w.tryAdd(l.pod("x"))), 11, "not a server to accept, which are [192.168.50.7]")
}

func TestADHCPv6RenewalThatNobodyAnswersIsANote(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	l.serve6(t, "eth0")
	k := l.keep(t)
	w, p := l.leasing(nil), l.pod("a")
	w.add(p)
	k.kill()
	nstest.Run(t, l.router, "nft", "add table ip6 x; add chain ip6 x i { type filter hook input priority 0; }; add rule ip6 x i udp dport 547 drop")
	l.makeDue(t, w, p)
	l.keep(t)
	l.eventually(t, func() bool {
		return strings.Contains(strings.Join(l.leaseOf(t, p).Notes, "\n"), "DHCPv6: lease an address: no answer to ")
	}, "the lease has a note")
	o := l.operate("status", "--state", l.state, "--leases", l.state+"-leases")
	expect.Contains(t, o.stdout, "\nleases     1\n", "status")
}
