package lan

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// manager is a program that configures the host's NIC. Its texts are of bash, and $NIC is the NIC's name.
type manager struct {
	name   string
	needs  []string // programs
	config string   // before the first start
	start  string   // in the background, with its process id in /run/manager.pid; "begin" does so
	stop   string
	reload string // the operator's ways to have it look again
	lease  string // prints what it keeps of its lease, without times
	mac    string // sets the NIC's MAC to $MAC
	// replug is what somebody does after the NIC was down, was made again or was renamed, if the manager does not see it.
	replug string
	// renamed is replug for a NIC that was renamed, and "no" if the manager knows its NIC by name.
	renamed string
	// resolved is not empty if the manager tells systemd-resolved of name servers, where that is installed.
	resolved string
	// shortest is the shortest lease that it believes, if that is more than ten seconds.
	shortest time.Duration
}

const (
	ownMAC   = "52:54:00:00:00:10" // of the host's NIC
	otherMAC = "52:54:00:00:00:77"

	// promised is within which time tombolod mends what is Tombolo's. It needs one second on a machine that is not busy.
	promised = 5 * time.Second
)

const (
	setMAC = `ip link set $NIC address $MAC`
	stop   = `end manager`

	firewalld = `begin firewalld firewalld --nofork --nopid
		until firewall-cmd --state >/dev/null 2>&1; do sleep 0.1; done`

	// lastLease is of a file of dhclient's.
	lastLease = `awk '/^lease/ {split("", have)}
		/fixed-address|routers|domain-name|server-identifier/ {have[$0]}
		END {for (h in have) print h | "sort"}'`
)

func managers(t *testing.T) []manager {
	networkd := manager{
		needs: []string{"dbus-daemon", "/lib/systemd/systemd-networkd"}, resolved: "yes",
		start:  `begin manager /lib/systemd/systemd-networkd`,
		stop:   stop,
		reload: `networkctl reload; networkctl reconfigure $NIC; sleep 0.5; networkctl renew $NIC`,
		lease:  `cat /run/systemd/netif/leases/* | grep -E '^(ADDRESS|ROUTER|DNS|SERVER_ADDRESS|DOMAINNAME)='`,
		mac:    setMAC,
	}
	everyLink, ethernet := networkd, networkd
	everyLink.name, ethernet.name = "systemd-networkd, Name=*", "systemd-networkd, Type=ether"
	ethernet.needs = append(slices.Clip(networkd.needs), "ufw")
	ethernet.start = `ufw --force enable >/dev/null; ` + networkd.start
	everyLink.config = `printf '[Match]\nName=*\n[Network]\nDHCP=yes\n' >/etc/systemd/network/10-all.network`
	ethernet.config = `printf '[Match]\nType=ether\n[Network]\nDHCP=ipv4\n' >/etc/systemd/network/10-all.network`
	dhclient := `dhclient -d -lf /var/lib/dhcp/$NIC.leases -pf /run/dhclient.pid $NIC`
	return []manager{
		everyLink, ethernet,
		{
			name:  "NetworkManager",
			needs: []string{"dbus-daemon", "NetworkManager", "nmcli", "firewalld"}, resolved: "yes",
			config: `cp /deploy/NetworkManager/10-tombolo.conf /etc/NetworkManager/conf.d/
				printf '[main]\nplugins=keyfile\n' >/etc/NetworkManager/NetworkManager.conf`,
			start: firewalld + `; begin manager NetworkManager -n`,
			stop:  stop + `; end firewalld`,
			reload: `nmcli general reload; nmcli connection reload; nmcli device reapply $NIC
				nmcli connection up "$(nmcli -g GENERAL.CONNECTION device show $NIC)"`,
			lease: `nmcli -f DHCP4 device show $NIC |
				grep -E ' (ip_address|routers|domain_name|domain_name_servers|dhcp_server_identifier) ' | sed 's/.*\]: *//' | sort; firewall-cmd --get-zone-of-interface=$NIC`,
			mac: `c=$(nmcli -g GENERAL.CONNECTION device show $NIC)
				nmcli connection modify "$c" connection.interface-name $NIC 802-3-ethernet.cloned-mac-address "$MAC" 802-3-ethernet.accept-all-mac-addresses no
				nmcli connection up "$c"`,
			renamed: `end firewalld; ` + firewalld + `; firewall-cmd --zone=public --change-interface=$NIC`,
		},
		{
			name:  "dhcpcd",
			needs: []string{"dhcpcd"},
			// Without probes, which take five seconds.
			config: "printf '%s\\n' '" + denyLine(t) + "' noarp >>/etc/dhcpcd.conf",
			start:  `begin manager dhcpcd --nodev --nobackground`,
			stop:   stop,
			reload: `dhcpcd --rebind; dhcpcd --rebind $NIC`,
			lease: `dhcpcd -4 -U - </var/lib/dhcpcd/$NIC.lease |
				grep -E '^(ip_address|routers|domain_name|domain_name_servers|dhcp_server_identifier)='`,
			// Otherwise it goes on announcing its IPv6 address at the old MAC, also without Tombolo.
			mac:      setMAC + `; end manager; begin manager dhcpcd --nodev --nobackground`,
			renamed:  "no",
			shortest: 20 * time.Second,
		},
		{
			name:   "dhclient",
			needs:  []string{"dhclient"},
			start:  `begin manager ` + dhclient,
			stop:   stop,
			lease:  lastLease + ` /var/lib/dhcp/$NIC.leases`,
			mac:    setMAC,
			replug: `end manager; ip address flush dev $NIC scope global; begin manager ` + dhclient,
		},
		{
			name:  "ifupdown",
			needs: []string{"ifup", "dhclient"},
			config: `printf 'auto eth0\niface eth0 inet dhcp\niface eth0 inet6 auto\n' >/etc/network/interfaces
				mkdir -p /run/network`,
			start:   `begin manager ifup --all`,
			stop:    `end manager; ifdown --force eth0`,
			reload:  `ifdown eth0; ifup eth0`,
			lease:   lastLease + ` /var/lib/dhcp/dhclient.eth0.leases`,
			mac:     setMAC,
			replug:  `ifdown --force eth0; ifup eth0`,
			renamed: "no",
		},
	}
}

// denyLine is the line for dhcpcd in docs/operating.md.
func denyLine(t *testing.T) string {
	t.Helper()
	for line := range strings.Lines(nstest.ReadIf(t, "../../docs/operating.md")) {
		if strings.HasPrefix(line, "denyinterfaces ") {
			return strings.TrimSpace(line)
		}
	}
	t.Fatal("docs/operating.md has no denyinterfaces line for dhcpcd")
	return ""
}

// root is the directory of a system whose managers are used instead of this machine's (test/managers.sh).
func root() string {
	if dir := os.Getenv("TOMBOLO_MANAGERS_ROOT"); dir != "" {
		return dir
	}
	return "/"
}

// The host's NIC is shared before its manager has a lease, and the manager notices nothing: what the host has is the
// same as without Tombolo, and host, pods and the LAN reach each other, whatever becomes of lease, manager and NIC.
func TestManagersNoticeNothingOfAShare(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "unshare")
	for _, m := range managers(t) {
		t.Run(m.name, func(t *testing.T) {
			for _, p := range m.needs {
				if _, err := nstest.Try(nil, "chroot", root(), "/bin/sh", "-c", "command -v "+p); err != nil {
					nstest.Need(t, root()+p)
				}
			}
			t.Parallel()
			for part, rows := range map[string][]row{"lease": leaseRows(), "NIC": nicRows()} {
				t.Run(part, func(t *testing.T) {
					t.Parallel()
					s := newSystem(t, m)
					for _, r := range rows {
						if r.unless != nil && r.unless(m) {
							continue
						}
						s.row(r)
					}
				})
			}
		})
	}
}

// row is something that befalls the host.
type row struct {
	name   string
	unless func(m manager) bool
	do     func(s *system)
	// alone says that the host's own state is another for the time being.
	alone bool
	// within is how long pods may need to reach the LAN again; 0 is promised.
	within time.Duration
}

func leaseRows() []row {
	return []row{
		{name: "renewal", do: (*system).renewed},
		{name: "NAK, and another subnet", do: func(s *system) {
			s.subnet = "192.168.60."
			s.stopKea() // it says nothing to whom it does not know
			d := nstest.NewDnsmasq(s, s.router.ns, nic, "--dhcp-range=192.168.60.50,192.168.60.90,2m", "--dhcp-host="+ownMAC+",192.168.60.50",
				"--dhcp-option=58,2", "--dhcp-option=59,4", "--dhcp-option=6,192.168.60.1", "--domain=lan")
			must.Until(s, "a NAK", func() bool { return strings.Contains(d.Logged(), "DHCPNAK("+nic+") 192.168.50.50 "+ownMAC) })
		}},
		{name: "restart of the manager", do: func(s *system) { s.sh(s.m.stop); s.sh(s.m.start) }},
		{name: "reload of the manager", unless: func(m manager) bool { return m.reload == "" }, do: func(s *system) { s.sh(s.m.reload) }},
		{name: "tombolod killed, and another one", do: func(s *system) { s.sh("kill -9 $(cat /run/tombolod.pid); end tombolod; " + startKeeper) }},
		{name: "reboot with pods before the lease", do: func(s *system) {
			s.boot()
			s.cable("down")
			s.sh(startKeeper)
			s.addStatic()
			s.sh(s.m.start)
			s.cable("up")
			s.addLeased()
		}},
	}
}

func nicRows() []row {
	return []row{
		{name: "avahi and samba", unless: func(m manager) bool { return root() == "/" || m.name != "dhclient" }, do: (*system).serversAnswer},
		{name: "firewall-cmd --reload", unless: func(m manager) bool { return m.name != "NetworkManager" }, do: func(s *system) {
			s.sh("firewall-cmd --reload; firewall-cmd --complete-reload")
		}},
		{name: "ufw reload", unless: func(m manager) bool { return !slices.Contains(m.needs, "ufw") }, do: func(s *system) { s.sh("ufw reload") }},
		{name: "nft flush ruleset", do: func(s *system) { s.sh("nft flush ruleset") }},
		{name: "promiscuous mode cleared", do: func(s *system) { s.sh("ip link set $NIC promisc off") }},
		{name: "down and up", do: func(s *system) { s.sh("ip link set $NIC down; sleep 0.2; ip link set $NIC up; " + s.m.replug) }},
		{name: "made again", do: func(s *system) {
			s.sh("ip link delete $NIC")
			s.plugHost()
			s.cable("up")
			s.sh(s.m.replug)
		}},
		// The keeper asks for another lease every now and then.
		{name: "unplugged for longer than the lease", within: time.Minute, do: func(s *system) {
			s.cable("down")
			time.Sleep(s.leaseTime() + time.Second)
			s.cable("up")
		}},
		{name: "renamed", unless: func(m manager) bool { return m.renamed == "no" }, do: func(s *system) {
			s.sh("ip link set $NIC down; ip link set $NIC name lan0; ip link set lan0 up")
			s.nic = "lan0"
			s.sh(cmp.Or(s.m.renamed, s.m.replug))
		}},
		{name: "another MAC", alone: true, do: func(s *system) {
			s.sh("MAC=" + otherMAC + "; " + s.m.mac)
			for _, p := range []place{s.other, s.router, s.lanPods[0].place, s.lanPods[1].place} {
				ip(s, p.ns, "neighbour flush dev "+nic) // they would ask the old one for up to a minute
			}
		}},
	}
}

// serversAnswer has avahi and samba of a Debian's root serve at the NIC alone. They answer pods as they answer another
// machine.
func (s *system) serversAnswer() {
	s.sh(`mkdir -p /run/samba /var/log/samba
printf '[server]\nhost-name=nas\nallow-interfaces=%s\nenable-dbus=no\n[publish]\npublish-a-on-ipv6=yes\n' $NIC >/run/avahi.conf
printf '[global]\nnetbios name = NAS\ninterfaces = %s\nbind interfaces only = yes\n' $NIC >/run/smb.conf
begin avahi avahi-daemon -f /run/avahi.conf --no-drop-root --no-chroot --no-rlimits
begin nmbd nmbd --foreground --no-process-group -s /run/smb.conf
until grep -q 'startup complete' /run/avahi.log; do sleep 0.1; done`)
	s.host.ip4, s.host.ip6 = addresses(s, s.host.ns, s.nic)
	// Questions for the address of nas.local (RFC 6762), and of NAS<20> (RFC 1002).
	mdns := "\x00\x01\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03nas\x05local\x00\x00\x01\x00\x01"
	netbios := "\x00\x01\x01\x10\x00\x01\x00\x00\x00\x00\x00\x00\x20EOEBFD" + strings.Repeat("CA", 13) + "\x00\x00\x20\x00\x01"
	for to, question := range map[string]string{"224.0.0.251:5353": mdns, "[ff02::fb%" + nic + "]:5353": mdns, "192.168.50.255:137": netbios} {
		must.Until(s, "an answer to "+to, func() bool { return s.answers(s.other, to, question) > 0 })
		want := s.answers(s.other, to, question)
		for _, p := range s.lanPods {
			expect.Equal(s, s.answers(p.place, to, question), want, "answers to "+p.name+", which asks "+to)
		}
	}
	s.sh("end avahi; end nmbd")
}

// answers counts the answers to a question that have the host's address.
func (s *system) answers(from place, to, question string) (count int) {
	s.Helper()
	must.Succeed(s, from.ns.Do(func() error {
		conn, err := net.ListenUDP("udp", nil)
		if err != nil {
			return err
		}
		defer conn.Close()
		at, err := net.ResolveUDPAddr("udp", to)
		if err == nil {
			_, err = conn.WriteToUDP([]byte(question), at)
		}
		if err == nil {
			err = conn.SetReadDeadline(time.Now().Add(time.Second))
		}
		answer := make([]byte, 1500)
		for err == nil {
			var n int
			if n, err = conn.Read(answer); bytes.Contains(answer[:n], s.host.ip4.AsSlice()) {
				count++
			}
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = nil
		}
		return err
	}), "%s asks %s", from.name, to)
	return count
}

// row has something befall the host, and compares.
func (s *system) row(r row) {
	s.Helper()
	begin := time.Now()
	r.do(s)
	done := time.Now()
	s.podsTalk(r.name, max(promised, r.within))
	mended := time.Since(done)
	if !r.alone {
		s.wantHost(r.name)
	}
	s.hostTalks(r.name)
	s.Logf("%s: %.1f s, of which pods needed %.1f s", r.name, time.Since(begin).Seconds(), mended.Seconds())
}

// wantHost waits until the host has what it has without Tombolo.
func (s *system) wantHost(when string) {
	s.Helper()
	want := strings.NewReplacer("192.168.50.", s.subnet, nic, s.nic).Replace(s.before)
	var have string
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if have = s.has(); have == want {
			return
		}
	}
	s.Fatalf("%s: the host has\n%s\nwant\n%s", when, have, want)
}

// podsTalk has pods talk to the LAN, whatever the host has.
func (s *system) podsTalk(when string, within time.Duration) {
	s.Helper()
	s.talk(when, within, func() (pairs [][2]place) {
		for _, p := range s.lanPods {
			p.ip4, p.ip6 = addresses(s, p.ns, nic) // a lease may have brought another
			pairs = append(pairs, [2]place{p.place, s.other}, [2]place{p.place, s.router})
		}
		return pairs
	})
}

// hostTalks has the host talk to the LAN and to pods.
func (s *system) hostTalks(when string) {
	s.Helper()
	s.talk(when, time.Minute, func() [][2]place {
		s.host.ip4, s.host.ip6 = addresses(s, s.host.ns, s.nic)
		pairs := [][2]place{{s.host, s.other}, {s.host, s.router}}
		for _, p := range s.lanPods {
			p.ip4, p.ip6 = addresses(s, p.ns, nic)
			pairs = append(pairs, [2]place{s.host, p.place})
		}
		return pairs
	})
}

// talk has pairs reach each other, all of them at one time.
func (s *system) talk(when string, within time.Duration, pairs func() [][2]place) {
	s.Helper()
	end := time.Now().Add(within)
	for {
		err := s.tryTalk(pairs())
		if err == nil {
			return
		}
		if time.Now().After(end) {
			s.Fatalf("%s: after %s: %v", when, within, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (s *system) tryTalk(pairs [][2]place) error {
	s.Helper()
	for _, pair := range pairs {
		for _, family := range both() {
			for _, way := range [][2]place{pair, {pair[1], pair[0]}} {
				to := way[1].at(family)
				if !to.IsValid() {
					return fmt.Errorf("%s has no address of IPv%d", way[1].name, family)
				}
				if err := nstest.PingWith(s, way[0].ns, to, nstest.Echo{Wait: 500 * time.Millisecond}); err != nil {
					return fmt.Errorf("%s to %s: %w", way[0].name, way[1].name, err)
				}
			}
		}
	}
	return nil
}

// addresses are those of a link that are of use on the LAN.
func addresses(t testing.TB, ns *netns.NS, link string) (ip4, ip6 netip.Addr) {
	t.Helper()
	for line := range strings.Lines(nstest.Run(t, ns, "ip", "-o", "address", "show", "dev", link, "scope", "global")) {
		f := strings.Fields(line)
		p, err := netip.ParsePrefix(f[3])
		if err != nil || strings.Contains(line, "tentative") || strings.Contains(line, "deprecated") {
			continue
		}
		if p.Addr().Is4() {
			ip4 = p.Addr()
		} else {
			ip6 = p.Addr()
		}
	}
	return ip4, ip6
}
