package cni

import (
	"encoding/hex"
	"net"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
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

// said returns what the server's log has behind a label, once for each message.
func (l *lan) said(t *testing.T, label string) []string {
	t.Helper()
	var all []string
	for _, m := range regexp.MustCompile(`: \d+ `+label+`:? (.*)\n`).FindAllStringSubmatch(nstest.ReadIf(t, l.log), -1) {
		all = append(all, m[1])
	}
	return all
}

// The server's log shows what a pod asked for and told, with and without the field.
func TestDHCPRequestsAndProvidesWhatIsConfigured(t *testing.T) {
	t.Parallel()
	type list = []conf
	fromArg := conf{"provide": list{{"option": "host-name", "fromArg": "COLOUR"}, {"option": "60", "fromArg": "KIND", "value": "plain"}, {"option": 224, "fromArg": "COLOUR"}}}
	args := []option{arg("COLOUR", "blue"), arg("KIND", "printer"), arg("K8S_POD_NAME", "web-0"), arg("IgnoreUnknown", "1")}
	for name, tt := range map[string]struct {
		ipam          conf
		args          []option
		class, client string // what the server is told
		tagged        bool   // it got option 224
		asked, not    string // patterns of the options that are requested
	}{
		"nothing":     {nil, args, "", "web-0", false, `1:netmask.*3:router.*6:dns-server`, "42:ntp"},
		"fromArg":     {fromArg, args, "printer", "blue", true, "3:router", "42:ntp"},
		"value":       {conf{"provide": list{{"option": "60", "value": "plain"}}}, args, "plain", "web-0", false, "3:router", "42:ntp"},
		"request":     {conf{"request": list{{"option": "ntp-servers"}}}, args, "", "web-0", false, "3:router.*42:ntp", "78:"},
		"skipDefault": {conf{"request": list{{"option": "ntp-servers"}, {"skipDefault": true}}}, args, "", "web-0", false, "^42:ntp-server$", "3:router"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			l := newLAN(t, "--dhcp-match=set:blue,224,blue", "--dhcp-option=option:ntp-server,192.168.50.7")
			ipam := conf{"type": "dhcp", "keeper": "optional"}
			for k, v := range tt.ipam {
				ipam[k] = v
			}
			w := l.network(conf{"ipam": ipam})
			p := l.pod("a")
			r := w.add(p, tt.args...)
			expect.Equal(t, strings.Join(l.said(t, "vendor class"), " "), strings.TrimSpace(tt.class+" "+tt.class), "vendor classes in DISCOVER and REQUEST")
			expect.Contains(t, l.leased(), " "+ip4(r).String()+" "+tt.client+" ")
			tags := strings.Join(l.said(t, "tags"), " ")
			expect.Equal(t, strings.Contains(tags, "blue"), tt.tagged, "tags %q", tags)
			asked := l.said(t, "requested options")
			must.That(t, len(asked) > 0, "nothing is requested:\n%s", nstest.ReadIf(t, l.log))
			all := strings.Join(asked, ", ")
			if name == "skipDefault" {
				all = asked[0]
			}
			expect.That(t, regexp.MustCompile(tt.asked).MatchString(all) && !strings.Contains(all, tt.not), "requested %q, want %s and not %s", all, tt.asked, tt.not)
			w.del(p)
		})
	}
	nstest.RunParallel(t, "without the argument", func(t *testing.T) {
		l := newLAN(t)
		fromArg := conf{"type": "dhcp", "keeper": "optional", "provide": list{{"option": "host-name", "fromArg": "COLOUR", "value": "red"}}}
		wantError(t, expect.Err(l.network(conf{"ipam": fromArg}).tryAdd(l.pod("a"))), 7, "CNI_ARGS has no COLOUR")
		expect.Equal(t, strings.Contains(nstest.ReadIf(t, l.log), "DHCPDISCOVER"), false, "the server was asked")
		l.wantNothing()
	})
}

// With both fields a server that knows rapid commit answers the first message with the lease.
func TestRapidCommitTakesTwoMessages(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		field, server bool
		messages      string
	}{
		"both":     {true, true, "DISCOVER ACK"},
		"the pod":  {true, false, "DISCOVER OFFER REQUEST ACK"},
		"no field": {false, true, "DISCOVER OFFER REQUEST ACK"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			var options []string
			if tt.server {
				options = []string{"--dhcp-rapid-commit"}
			}
			l := newLAN(t, options...)
			w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "rapidCommit": tt.field}})
			p := l.pod("a")
			address := ip4(w.add(p)).String()
			var messages []string
			for _, m := range regexp.MustCompile(`DHCP(\w+)\(eth0\)`).FindAllStringSubmatch(nstest.ReadIf(t, l.log), -1) {
				if n := len(messages); n == 0 || messages[n-1] != m[1] { // one may have been sent again
					messages = append(messages, m[1])
				}
			}
			expect.Equal(t, strings.Join(messages, " "), tt.messages, "messages")
			wantPing(t, p.NS, router4)
			expect.Success(t, w.check(p))
			w.del(p)
			l.wantReleased(t, address)
		})
	}
}

// probes reads frames until the first DHCP message after which the pod has its lease was seen, and counts ARP probes.
func (c *tap) probes(address string) (count int) {
	c.t.Helper()
	target := hex.EncodeToString(nstest.Addr(address).AsSlice())
	buf := make([]byte, 1<<16)
	for {
		n, _, err := unix.Recvfrom(c.fd, buf, unix.MSG_DONTWAIT)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return count
		}
		// RFC 826: type, operation 1, sender's IP 0.0.0.0 (a probe, RFC 5227), target's IP.
		text := hex.EncodeToString(buf[:n])
		if n >= 42 && text[24:28] == "0806" && text[40:44] == "0001" && text[56:64] == "00000000" && text[76:84] == target {
			count++
		}
	}
}

func TestDetectConflictsProbesBeforeItTakesAnAddress(t *testing.T) {
	t.Parallel()
	for name, field := range map[string]bool{"with": true, "without": false} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			l := newLAN(t, "--dhcp-sequential-ip", "--dhcp-range=192.168.50.30,192.168.50.40,1h")
			other := nstest.New(t)
			nstest.Veth(t, l.ns, "lan1", other, "eth0")
			l.ip("link set lan1 master br0")
			nstest.Run(t, other, "ip", "address", "add", "192.168.50.30/24", "dev", "eth0")
			c := capture(t, l.router, "eth0")
			w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "detectConflicts": field}})
			p := l.pod("a")
			got := ip4(w.add(p)).String()
			declined := strings.Contains(nstest.ReadIf(t, l.log), "DHCPDECLINE(eth0) 192.168.50.30 ")
			want, probes := "192.168.50.30", 0
			if field {
				want, probes = "192.168.50.31", 3
			}
			expect.Equal(t, got, want, "the pod has")
			expect.Equal(t, declined, field, "the other machine's address is declined")
			expect.Equal(t, c.probes(got), probes, "ARP probes for %s", got)
			w.del(p)
		})
	}
}

// Somebody has all rights in the namespace that an ADD is about to make an interface in,
// and has what is sent there answered by a server of theirs: as soon as there is an
// interface, what it sends goes there and not to the LAN.
func TestADDDoesNotBelieveThePodsOwnServer(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(conf{"guard": true, "ipam": conf{"type": "dhcp", "keeper": "optional"}})
	w.plugin["ipam"].(conf)["timeout"] = "8s" // two DISCOVERs; nobody is to answer
	p := l.pod("evil")
	// The LAN's server is gone, so that there is time.
	nstest.Run(t, l.router, "ip", "link", "set", "eth0", "down")
	added := make(chan error)
	go func() {
		_, err := w.tryAdd(p, publish(t, "8080:80/tcp"))
		added <- err
	}()
	l.eventually(t, func() bool {
		out, err := nstest.Try(p.NS, "ip", "-o", "link", "show", "eth0")
		return err == nil && strings.Contains(out, ",UP")
	})
	mac := nstest.MAC(t, p.NS, "eth0")
	rogue := &lan{node: l.node, router: nstest.Divert(t, p.NS, "eth0", "redirected")}
	nstest.Run(t, rogue.router, "ip", "address", "add", "192.168.50.66/24", "dev", "eth0")
	rogue.serve(t)
	if got, err := leaseInPod(t, p); err != nil || got.Server.String() != "192.168.50.66" {
		t.Fatalf("the attack does not work, so that the test shows nothing: %v, %v", got, err)
	}
	wantError(t, <-added, 11, "no answer to")
	if got := nstest.ReadIf(t, rogue.log); !strings.Contains(got, "DHCPOFFER(eth0) ") || !strings.Contains(got, mac) {
		t.Errorf("the ADD's DISCOVER did not come to the pod's server, so that the test shows nothing:\n%s", got)
	}
	l.wantNothing()
}

// A bridge sends what a pod broadcasts back to the pod where its port is in hairpin mode: so a
// server that the pod runs hears the ADD's DISCOVER, and its answer leaves by the pod's port.
func TestADDDoesNotBelieveWhatComesBackToThePod(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(conf{"hairpinMode": true, "ipam": conf{"type": "dhcp", "keeper": "optional"}})
	w.plugin["ipam"].(conf)["timeout"] = "8s" // two DISCOVERs; nobody is to answer
	p := l.pod("evil")
	nstest.Run(t, l.router, "ip", "link", "set", "eth0", "down")
	added := make(chan error)
	go func() {
		_, err := w.tryAdd(p)
		added <- err
	}()
	l.eventually(t, func() bool {
		out, err := nstest.Try(p.NS, "ip", "-o", "link", "show", "eth0")
		return err == nil && strings.Contains(out, ",UP")
	})
	mac := nstest.MAC(t, p.NS, "eth0")
	nstest.Run(t, p.NS, "ip", "address", "add", "192.168.50.66/24", "dev", "eth0")
	rogue := &lan{node: l.node, router: p.NS}
	rogue.serve(t, "--dhcp-option=option:router")
	err := <-added
	if got := nstest.ReadIf(t, rogue.log); !strings.Contains(got, "DHCPOFFER(eth0) ") || !strings.Contains(got, mac) {
		t.Errorf("the ADD's DISCOVER did not come to the pod's server, so that the test shows nothing:\n%s", got)
	}
	wantError(t, err, 11, "no answer to")
	l.wantNothing()
}

// leaseInPod leases as a client does that takes what it hears in the pod for true.
func leaseInPod(t *testing.T, p *pod) (*dhcpc.Lease, error) {
	t.Helper()
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 0xaa}
	client, err := dhcpc.New(&dhcpc.Config{
		MAC: mac, Broadcast: true, Retransmit: 200 * time.Millisecond, Timeout: patience,
		Dial: transport.Dialer(&transport.Config{NetNS: p.NS, Link: nstest.Index(t, p.NS, "eth0"), MAC: mac}),
	})
	must.Succeed(t, err)
	return client.Acquire(t.Context())
}

func TestThePortWhereDHCPServersAnswerIsNotPublished(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(nil)
	wantError(t, expect.Err(w.tryAdd(l.pod("a"), publish(t, "8068:68/udp"))), 7, "where DHCP servers answer")
	w.add(l.pod("b"), publish(t, "8068:68/tcp", "68:8068/udp"))
}

// The server's range has the host's own address in it, and it forgets what it has given.
func TestADDDeclinesWhatTheHostOrAnotherPodHas(t *testing.T) {
	t.Parallel()
	l := newLAN(t, "--dhcp-sequential-ip", "--dhcp-range=set:few,192.168.50.2,192.168.50.4,1h")
	l.ip("address add 192.168.50.2/24 dev br0")
	w := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional", "timeout": "2m"}})
	w.plugin["ipam"].(conf)["timeout"] = "2m"
	a := w.add(l.pod("a"))
	if got := nstest.ReadIf(t, l.log); ip4(a).String() != "192.168.50.3" || !strings.Contains(got, "DHCPDECLINE(eth0) 192.168.50.2 ") {
		t.Errorf("the pod has %s, want the one behind the host's; the server says:\n%s", ip4(a), got)
	}
	again := &lan{node: l.node, router: l.router}
	l.server.Stop()
	again.serve(t, "--dhcp-sequential-ip", "--dhcp-range=set:few,192.168.50.3,192.168.50.4,1h")
	b := w.add(l.pod("b"))
	if got := nstest.ReadIf(t, again.log); ip4(b).String() != "192.168.50.4" || !strings.Contains(got, "DHCPDECLINE(eth0) 192.168.50.3 ") {
		t.Errorf("the pod has %s, want the one behind the other pod's; the server says:\n%s", ip4(b), got)
	}
}

// A server that says what may do harm: the pod gets what can be had of it, and the host
// nothing. A bridge whose MTU nobody has set follows the lowest of its ports.
func TestAServersWordsChangeNothingOfTheHosts(t *testing.T) {
	t.Parallel()
	before := func(l *lan) string {
		return nstest.Run(t, l.ns, "sh", "-c", "ip -o link show br0 | grep -o 'mtu [0-9]*'; ip -4 route; ip -4 address; cat /etc/resolv.conf")
	}
	for name, options := range map[string][]string{
		"MTU of 68":    {"--dhcp-option-force=option:mtu,68"},
		"MTU of 576":   {"--dhcp-option-force=option:mtu,576"},
		"MTU of 65535": {"--dhcp-option-force=option:mtu,65535"},
		"half of the world each": {"--dhcp-option-force=option:classless-static-route,0.0.0.0/1,192.168.50.66,128.0.0.0/1,192.168.50.66",
			"--dhcp-option-force=option:router,8.8.8.8"},
		"names with line breaks": {"--dhcp-option-force=15,61:0a:6e:20:62",
			"--dhcp-option-force=119,03:61:0a:62:00", "--dhcp-option-force=6,0.0.0.0,127.0.0.1,255.255.255.255"},
		"time servers, a host name and other options": {"--dhcp-option-force=42,127.0.0.1", "--dhcp-option-force=12,root", "--dhcp-option-force=66,evil",
			"--dhcp-option-force=252,http://192.0.2.66/"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			l := newLAN(t, options...)
			was := before(l)
			w, p := l.network(nil), l.pod("a")
			r := w.add(p)
			expect.Equal(t, before(l), was, "the host was\n%s\nand is", was)
			expect.Success(t, w.check(p))
			mtu := r.Interfaces[2].Mtu
			expect.That(t, mtu >= 576 && mtu <= 1500, "the pod's MTU is %d", mtu)
			for _, text := range append(append([]string{r.DNS.Domain}, r.DNS.Search...), r.DNS.Nameservers...) {
				expect.That(t, !strings.ContainsAny(text, " \n") && text != "127.0.0.1" && text != "0.0.0.0",
					"the result says %q", text)
			}
			w.del(p)
			l.wantNothing()
		})
	}
}

// Servers name the lease's own subnet among the routes (OpenStack's do), or a destination twice. The
// kernel has the one already, and takes the other once.
func TestRoutesThatAServerNamesTwiceDoNotStopAnADD(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]string{
		"its subnet, on link":        "192.168.50.0/24,0.0.0.0",
		"its subnet, by a router":    "192.168.50.0/24,192.168.50.66",
		"a destination, two routers": "10.9.0.0/16,192.168.50.9,10.9.0.0/16,192.168.50.8",
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			l := newLAN(t, "--dhcp-option=option:classless-static-route,"+first+",10.9.0.0/16,192.168.50.7,0.0.0.0/0,"+router4)
			w, p := l.network(conf{"ipam": conf{"type": "dhcp", "keeper": "optional"}}), l.pod("a")
			w.add(p)
			routes := nstest.Run(t, p.NS, "ip", "-4", "route")
			expect.That(t, strings.Count(routes, "10.9.0.0/16") == 1 && strings.Count(routes, "192.168.50.0/24") == 1 && !strings.Contains(routes, "192.168.50.66"),
				"routes:\n%s", routes)
			wantPing(t, p.NS, router4)
			expect.Success(t, w.check(p))
			w.del(p)
			l.wantNothing()
		})
	}
}

// A server that says that half of all addresses are on the pod's link would have the network's
// pods sent there without masquerade, and the pod itself send past the host.
func TestAServersMaskTakesNothingFromOtherPods(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	l.ip("address add 192.168.50.10/24 dev br0")
	w := l.network(conf{"ipMasq": true})
	w.add(l.pod("good"))
	rules := func() string { return nstest.Run(t, l.ns, "nft", "list", "chain", "inet", "tombolo", "masq-lan") }
	before := rules()
	l.server.Stop()
	evil := &lan{node: l.node, router: l.router}
	evil.serve(t, "--dhcp-option-force=1,128.0.0.0")
	p := w.addPod("b")
	expect.Contains(t, nstest.ReadIf(t, evil.log), "netmask  128.0.0.0", "the server named no such mask, so that the test shows nothing")
	expect.Equal(t, rules(), before, "masquerade was\n%s\nand is", before)
	got := nstest.Run(t, p.NS, "ip", "-4", "route", "show", "scope", "link")
	expect.That(t, strings.HasPrefix(got, "192.168.50.0/24 ") && strings.Count(got, "\n") == 1, "on the pod's link are:\n%s", got)
}
