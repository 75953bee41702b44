package cni

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// publish is the capability portMappings, of mappings such as 8080:80/tcp, 8000-8002:80/tcp and
// 192.0.2.1:53:5353/udp.
func publish(t testing.TB, mappings ...string) option {
	t.Helper()
	var list []map[string]any
	for _, m := range mappings {
		ports, protocol, _ := strings.Cut(m, "/")
		parts := strings.Split(ports, ":")
		from, to, isRange := strings.Cut(parts[len(parts)-2], "-")
		if !isRange {
			to = from
		}
		var host, last, pod int
		must.Succeed(t, expect.Err(fmt.Sscan(from+" "+to+" "+parts[len(parts)-1], &host, &last, &pod)))
		list = append(list, map[string]any{
			"hostIP": strings.Join(parts[:len(parts)-2], ":"), "hostPort": host, "containerPort": pod, "protocol": protocol,
			"range": last - host + 1,
		})
	}
	return func(rt *libcni.RuntimeConf) {
		if rt.CapabilityArgs == nil {
			rt.CapabilityArgs = map[string]any{}
		}
		rt.CapabilityArgs["portMappings"] = list
	}
}

// portnet is podnet with the capability.
func (n *node) portnet(fields conf) *network {
	all := conf{"capabilities": conf{"portMappings": true, "bandwidth": true}}
	for k, v := range fields {
		all[k] = v
	}
	return n.podnet(all)
}

// serve answers on a port of a pod, on all of its addresses.
func (p *pod) serve(t testing.TB, network string, port int) {
	t.Helper()
	// Not one socket for both: whether there is IPv6 at all, Go finds out once for the
	// process, in whichever namespace it is then.
	nstest.Serve(t, p.NS, network+"4", netip.AddrPortFrom(netip.IPv4Unspecified(), uint16(port)))
	if nstest.HasIPv6() {
		nstest.Serve(t, p.NS, network+"6", netip.AddrPortFrom(netip.IPv6Unspecified(), uint16(port)))
	}
}

func askPort(t testing.TB, from *netns.NS, network, at string, port int) (netip.Addr, error) {
	t.Helper()
	seen, err := nstest.AskWithin(t, from, network, netip.AddrPortFrom(nstest.Addr(at), uint16(port)), min(left(t), time.Minute))
	return seen.Addr().Unmap(), err
}

func TestHostPortIsReachedFromEverywhere(t *testing.T) {
	t.Parallel()
	wantHostPorts(t, nil)
}

// wantHostPorts has a pod of a network with these fields publish ports.
func wantHostPorts(t *testing.T, fields conf) {
	t.Helper()
	for _, call := range []bool{true, false} {
		t.Run(fmt.Sprintf("bridgeNFCall %t", call), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			nstest.Sysctl(t, n.ns, "net/bridge/bridge-nf-call-iptables", "0")
			nstest.Sysctl(t, n.ns, "net/bridge/bridge-nf-call-ip6tables", "0")
			out := n.outside()
			w := n.portnet(fields).with(conf{"bridgeNFCall": call})
			p, other := n.pod("a"), n.pod("b")
			r := w.add(p, publish(t, "8080:80/tcp", "5300:53/udp"))
			ro := w.add(other)
			stranger := n.pod("c")
			rs := n.network("othernet", conf{"bridge": "cbr1", "ipam": hostLocal("10.78.0.0/24", "fd78::/64")}).add(stranger)
			p.serve(t, "tcp", 80)
			p.serve(t, "udp", 53)
			podSeenAs := func(own, hidden string) string {
				if call {
					return own
				}
				return hidden
			}
			for _, tt := range []struct {
				name string
				from *netns.NS
				at   string
				want string // the source that the pod sees
			}{
				{"another machine, IPv4", out, uplink4, outside4},
				{"another machine, IPv6", out, uplink6, outside6},
				{"the host by its uplink's address, IPv4", n.ns, uplink4, uplink4},
				{"the host by its uplink's address, IPv6", n.ns, uplink6, uplink6},
				{"the host by the gateway's address", n.ns, gateway4, gateway4},
				{"the host by 127.0.0.1", n.ns, "127.0.0.1", gateway4},
				{"another pod, IPv4", other.NS, uplink4, podSeenAs(ip4(ro).String(), gateway4)},
				{"another pod, IPv6", other.NS, uplink6, podSeenAs(ip6(ro).String(), gateway6)},
				{"another pod by the gateway's address", other.NS, gateway4, podSeenAs(ip4(ro).String(), gateway4)},
				{"a pod of another network, IPv4", stranger.NS, uplink4, ip4(rs).String()},
				{"a pod of another network, IPv6", stranger.NS, uplink6, ip6(rs).String()},
				{"the pod itself, IPv4", p.NS, uplink4, gateway4},
				{"the pod itself, IPv6", p.NS, uplink6, gateway6},
			} {
				for network, port := range map[string]int{"tcp": 8080, "udp": 5300} {
					got, err := askPort(t, tt.from, network, tt.at, port)
					expect.That(t, err == nil && got.String() == tt.want,
						"%s over %s: the pod sees %s, %v; want %s", tt.name, network, got, err, tt.want)
				}
			}
			// IPv6 has no way from ::1: refused, so that clients try 127.0.0.1.
			if _, err := askPort(t, n.ns, "tcp", "::1", 8080); err == nil || !strings.Contains(err.Error(), "refused") {
				t.Errorf("::1: %v, want a refusal", err)
			}
			for _, at := range []struct {
				ns  *netns.NS
				own string
			}{{out, "fe80::20"}, {n.ns, "fe80::10"}} {
				nstest.Run(t, at.ns, "ip", "address", "add", at.own+"/64", "dev", "eth0", "nodad")
			}
			if _, err := nstest.AskWithin(t, out, "tcp", addrPort("fe80::10%eth0", 8080), 5*time.Second); err == nil || !strings.Contains(err.Error(), "refused") {
				t.Errorf("a link-local address of the host's: %v, want a refusal", err)
			}
			expect.Success(t, w.check(p))
			_ = r
			w.del(p)
			for _, at := range []string{uplink4, uplink6} {
				expect.Failure(t, expect.Err(askPort(t, out, "tcp", at, 8080)), "%s leads somewhere after the DEL", at)
			}
			w.del(other)
			n.network("othernet", nil).del(stranger)
			n.wantNothing()
		})
	}
}

func TestHostPortThatIsTakenNamesWhoHasIt(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.outside()
	w := n.portnet(nil)
	w.add(n.pod("3f2a00112233445566"), publish(t, "8080:80/tcp", uplink4+":9090:90/tcp"),
		arg("K8S_POD_NAMESPACE", "default"), arg("K8S_POD_NAME", "web"), arg("IgnoreUnknown", "1"))
	before := n.traces()
	for mapping, says := range map[string]string{
		"8080:81/tcp":                   "port 8080/tcp is already published by pod default/web (container 3f2a00112233…)",
		uplink4 + ":8080:81/tcp":        "8080/tcp is already published by pod default/web (container 3f2a00112233…)",
		"[" + uplink6 + "]:8080:81/tcp": "8080/tcp is already published by pod default/web",
		"9090:81/tcp":                   "9090/tcp is already published by pod default/web",
	} {
		_, err := w.tryAdd(n.pod("b"), publish(t, strings.NewReplacer("[", "", "]", "").Replace(mapping)))
		wantError(t, err, 112, says)
	}
	n.wantTraces(before)
	// Another protocol, another address: not taken.
	w.add(n.pod("c"), publish(t, "8080:80/udp", gateway4+":9090:90/tcp"))
}

// Podman hands the ports of a container to each of its networks. The first has them, and when it
// is deleted the others do, in turn; the pods' default routes come in the same order.
func TestAContainerOnSeveralNetworksKeepsItsHostPorts(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	w := n.portnet(nil)
	p, ports := n.pod("web"), publish(t, "8080:80/tcp", "5300:53/udp")
	w.add(p, ports)
	p.serve(t, "tcp", 80)
	p.serve(t, "udp", 53)
	type second struct {
		*network
		ifName option
		name   string
	}
	var others []second
	for i, guarded := range []bool{false, true} {
		name := fmt.Sprintf("eth%d", i+1)
		o := second{n.network("other"+name, conf{"bridge": fmt.Sprintf("cbr%d", i+1), "guard": guarded, "capabilities": conf{"portMappings": true},
			"ipam": hostLocal(fmt.Sprintf("10.%d.0.0/24", 78+i), fmt.Sprintf("fd%d::/64", 78+i))}),
			func(rt *libcni.RuntimeConf) { rt.IfName = name }, name}
		must.Succeed(t, expect.Err(o.tryAdd(p, ports, o.ifName)))
		others = append(others, o)
	}
	metrics := func(family string) string {
		var list []string
		for line := range strings.Lines(nstest.Run(t, p.NS, "ip", family, "route", "show", "default")) {
			f := strings.Fields(line)
			metric := "0"
			if i := slices.Index(f, "metric"); i > 0 {
				metric = f[i+1]
			}
			list = append(list, f[slices.Index(f, "dev")+1]+" "+metric)
		}
		slices.Sort(list)
		return strings.Join(list, ", ")
	}
	expect.Equal(t, metrics("-4"), "eth0 0, eth1 100, eth2 200", "default routes of IPv4")
	expect.Equal(t, metrics("-6"), "eth0 1024, eth1 1124, eth2 1224", "default routes of IPv6")
	reached := func(when string) {
		t.Helper()
		for _, at := range []string{uplink4, uplink6} {
			for proto, port := range map[string]int{"tcp": 8080, "udp": 5300} {
				expect.Success(t, expect.Err(askPort(t, out, proto, at, port)), "%s, %s over %s", when, at, proto)
			}
		}
	}
	reached("at first")
	for _, o := range others {
		expect.Success(t, o.check(p, ports, o.ifName))
	}
	// Somebody else is refused, whoever of the container has the port.
	_, err := w.tryAdd(n.pod("foreign"), publish(t, "8080:80/tcp"))
	wantError(t, err, 112, "8080/tcp is already published by container web")
	w.del(p, ports)
	reached("after the first network's DEL")
	// A flush of the firewall changes nothing of who has them.
	n.nft("delete table inet tombolo")
	must.Succeed(t, n.operate("repair", "--state", n.state).err(), "repair")
	reached("after a repair")
	for _, o := range others {
		expect.Success(t, o.check(p, ports, o.ifName))
	}
	others[0].del(p, ports, others[0].ifName)
	reached("after the second's")
	others[1].del(p, ports, others[1].ifName)
	expect.Failure(t, expect.Err(askPort(t, out, "tcp", uplink4, 8080)), "the port leads somewhere after the last DEL")
	for _, o := range others {
		expect.Success(t, n.remove(o.network.name).err())
	}
	n.wantNothing()
}

func TestHostPortOfAProgramOfTheHostIsRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.outside()
	nstest.Serve(t, n.ns, "tcp", netip.MustParseAddrPort("127.0.0.1:8080"))
	w := n.portnet(nil)
	_, err := w.tryAdd(n.pod("a"), publish(t, "8080:80/tcp"))
	wantError(t, err, 112, "127.0.0.1:8080/tcp is in use by ")
	wantError(t, err, 112, "or a hostIP that is another address of the host")
	n.wantNothing()
	// One that listens elsewhere is in nobody's way.
	p := n.pod("b")
	w.add(p, publish(t, uplink4+":8080:80/tcp", "8090:80/tcp"))
	p.serve(t, "tcp", 80)
	expect.Success(t, expect.Err(askPort(t, n.ns, "tcp", uplink4, 8080)))
	expect.Contains(t, n.operate("status", "--state", n.state).stdout, "all is well", "status")

	// One that comes later is told of, and gets nothing.
	nstest.Serve(t, n.ns, "tcp", netip.MustParseAddrPort("0.0.0.0:8090"))
	const text = "host port 8090 leads to container b, and [::]:8090/tcp is in use by "
	for _, command := range []string{"status", "check"} {
		expect.Contains(t, n.operate(command, "--state", n.state).stdout, text, command)
	}
	expect.Success(t, w.check(p))
}

// systemd-resolved listens on 127.0.0.53 and 127.0.0.54 of its own: a DNS server in a pod has
// the other addresses of the host, and both are asked.
func TestHostPortBesideAProgramOnALoopbackAddressOfItsOwn(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	resolved := netip.MustParseAddrPort("127.0.0.53:53")
	nstest.Serve(t, n.ns, "udp", resolved)
	nstest.Serve(t, n.ns, "tcp", resolved)
	w := n.portnet(nil)
	p := n.pod("dns")
	w.add(p, publish(t, "53:5353/udp", "53:5353/tcp"))
	for _, network := range []string{"tcp", "udp"} {
		p.serve(t, network, 5353)
		for _, tt := range []struct {
			from     *netns.NS
			at, want string // the source that the server sees
		}{
			{n.ns, "127.0.0.53", "127.0.0.1"},
			{n.ns, "127.0.0.1", gateway4},
			{n.ns, uplink4, uplink4},
			{out, uplink4, outside4},
			{out, uplink6, outside6},
		} {
			if got, err := askPort(t, tt.from, network, tt.at, 53); err != nil || got.String() != tt.want {
				t.Errorf("%s over %s: seen as %s, %v; want %s", tt.at, network, got, err, tt.want)
			}
		}
	}
	expect.Success(t, w.check(p))
	// That very address collides, and so does a program on all of them.
	_, err := w.tryAdd(n.pod("own"), publish(t, "127.0.0.53:53:5353/tcp"))
	wantError(t, err, 112, "127.0.0.53:53/tcp is in use by ")
	nstest.Serve(t, n.ns, "tcp", netip.MustParseAddrPort("0.0.0.0:54"))
	_, err = w.tryAdd(n.pod("any"), publish(t, "54:54/tcp"))
	wantError(t, err, 112, ":54/tcp is in use by ")
	expect.That(t, !strings.Contains(err.Error(), "hostIP"), "another hostIP does not help: %v", err)
}

// libvirt's dnsmasq is bound to its bridge, and hears nothing of other links; no port leads from a link-local address.
func TestHostPortBesideAProgramOnAnotherLink(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	nstest.Run(t, n.ns, "sh", "-ec", "ip link add virbr0 type bridge; ip link set virbr0 up; ip address add 192.168.122.1/24 dev virbr0; ip address add fe80::10/64 dev eth0 nodad")
	listen := func(network, at, link string) {
		t.Helper()
		l := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
			return errors.Join(c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), link) }), err)
		}}
		must.Succeed(t, n.ns.Do(func() error {
			var conn io.Closer
			var err error
			if network == "udp" {
				conn, err = l.ListenPacket(t.Context(), network, at)
			} else {
				conn, err = l.Listen(t.Context(), network, at)
			}
			if err == nil {
				t.Cleanup(func() { conn.Close() })
			}
			return err
		}))
	}
	listen("tcp4", "0.0.0.0:22", "virbr0")
	// Package net remembers for all namespaces which index a name has.
	listen("udp", fmt.Sprintf("[fe80::10%%%d]:546", nstest.Index(t, n.ns, "eth0")), "eth0")
	cmd := exec.Command("dnsmasq", "--no-daemon", "--conf-file=/dev/null", "--port=0", "--interface=virbr0", "--except-interface=lo", "--bind-interfaces",
		"--dhcp-range=192.168.122.10,192.168.122.20", "--dhcp-leasefile=/dev/null")
	must.Succeed(t, n.ns.Do(cmd.Start))
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	must.Until(t, "dnsmasq listens", func() bool { return strings.Contains(nstest.Run(t, n.ns, "ss", "-Hlnu"), "virbr0:67") })
	w := n.portnet(nil)
	p := n.pod("all")
	for mapping, has := range map[string]string{"67:67/udp": "0.0.0.0:67/udp on virbr0 is in use by dnsmasq (pid ", "22:22/tcp": "0.0.0.0:22/tcp on virbr0 is in use by cni.test (pid "} {
		_, err := w.tryAdd(p, publish(t, mapping))
		wantError(t, err, 112, has)
		wantError(t, err, 112, "a hostIP that is an address of another link than virbr0")
		wantError(t, expect.Err(w.tryAdd(p, publish(t, "192.168.122.1:"+mapping))), 112, has)
	}
	// What that advises.
	w.add(p, publish(t, uplink4+":67:67/udp", uplink4+":22:22/tcp", "546:546/udp"))
	for network, port := range map[string]int{"udp": 67, "tcp": 22} {
		p.serve(t, network, port)
		expect.Success(t, expect.Err(askPort(t, out, network, uplink4, port)), "%s", network)
	}
	expect.Success(t, w.check(p))
}

func TestHostPortThatAClientHasByChance(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	nstest.Sysctl(t, n.ns, "net/ipv4/ip_local_port_range", "40000 40003")
	w := n.portnet(nil)
	client := func() (conn *net.UDPConn) {
		must.Succeed(t, n.ns.Do(func() (err error) { conn, err = net.ListenUDP("udp4", nil); return err }))
		return conn
	}
	conn := client()
	port := conn.LocalAddr().(*net.UDPAddr).Port
	_, err := w.tryAdd(n.pod("a"), publish(t, fmt.Sprintf("%d:53/udp", port)))
	conn.Close()
	wantError(t, err, 112, fmt.Sprintf("net.ipv4.ip_local_port_range (40000-40003): try again, and add %d to net.ipv4.ip_local_reserved_ports", port))
	// What that advises.
	nstest.Sysctl(t, n.ns, "net/ipv4/ip_local_reserved_ports", fmt.Sprint(port))
	w.add(n.pod("a"), publish(t, fmt.Sprintf("%d:53/udp", port)))
	for range 3 {
		conn := client()
		defer conn.Close()
		expect.That(t, conn.LocalAddr().(*net.UDPAddr).Port != port, "a client has %d once more", port)
	}
}

// kube-proxy in IPVS mode has the addresses of all services on kube-ipvs0, such as that of the API server, port 443. BGP
// announces addresses on other links of that kind.
func TestHostPortLeavesServicesToKubeProxy(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	nstest.Run(t, n.ns, "sh", "-ec", "ip link add kube-ipvs0 type bridge; ip addr add 10.96.0.1/32 dev kube-ipvs0; ip addr add fd96::1/128 dev kube-ipvs0 nodad;"+
		"ip link add anycast type bridge; ip addr add 198.51.100.7/32 dev anycast; ip addr add fd99::7/128 dev anycast nodad; ip link set anycast up; ip link set kube-ipvs0 up")
	nstest.Run(t, out, "sh", "-ec", "ip route add default via "+uplink4+"; ip -6 route add default via "+uplink6)
	w := n.portnet(nil)
	p := n.pod("ingress")
	w.add(p, publish(t, "443:443/tcp", "10.96.0.1:444:443/tcp"))
	p.serve(t, "tcp", 443)
	leads := func(at string, port int) bool {
		_, err := nstest.AskWithin(t, out, "tcp", addrPort(at, uint16(port)), 5*time.Second)
		_, local := nstest.AskWithin(t, n.ns, "tcp", addrPort(at, uint16(port)), 5*time.Second)
		expect.That(t, (err == nil) == (local == nil), "%s: %v from outside, %v from the host", at, err, local)
		return err == nil
	}
	for _, at := range []string{uplink4, uplink6, "198.51.100.7", "fd99::7"} {
		expect.That(t, leads(at, 443), "%s leads nowhere", at)
	}
	expect.That(t, !leads("10.96.0.1", 443) && !leads("fd96::1", 443), "a service's address leads to the pod")
	expect.That(t, leads("10.96.0.1", 444), "the hostIP leads nowhere")
	expect.Success(t, w.check(p))

	n.ip("addr add 10.96.0.2/32 dev kube-ipvs0")
	expect.Contains(t, n.operate("check", "--state", n.state).stdout, "host ports without a hostIP spare other addresses than those of kube-ipvs0 [repair]")
	w.add(n.pod("another"), publish(t, "80:80/tcp"))
	expect.That(t, !leads("10.96.0.2", 443), "the next ADD leaves the address to the pod")
	m := n.mind(t)
	n.ip("addr del 10.96.0.1/32 dev kube-ipvs0")
	n.ip("addr add 10.96.0.1/32 dev anycast")
	n.ip("addr add 10.96.0.3/32 dev kube-ipvs0")
	must.Until(t, "tombolod follows", func() bool {
		_, added := nstest.AskWithin(t, n.ns, "tcp", addrPort("10.96.0.1", 443), 5*time.Second)
		_, removed := nstest.AskWithin(t, n.ns, "tcp", addrPort("10.96.0.3", 443), 5*time.Second)
		return added == nil && removed != nil
	})
	expect.That(t, leads("10.96.0.1", 443) && !leads("10.96.0.3", 443), "tombolod follows by halves")
	m.end(t)
	n.nft("delete table inet tombolo")
	must.Succeed(t, n.operate("repair", "--state", n.state).err(), "repair")
	expect.That(t, !leads("10.96.0.2", 443) && leads(uplink4, 443), "not as before the flush")
}

// A program that listens for one family only is in nobody's way who has but the other one.
func TestHostPortOfAPodWithoutTheFamilyOfAProgramIsPublished(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		ipam             conf
		program, listens string // of one family, which the pod lacks
		collides, at     string // a socket that takes the pod's family, too or alone
		pods, programs   string // where the outside reaches the pod, and where the program
	}{
		"IPv4": {hostLocal(subnet4), "tcp6", "[::]:8080", "tcp", "[::]:8081", uplink4, uplink6},
		"IPv6": {hostLocal(subnet6), "tcp4", "0.0.0.0:8080", "tcp6", "[::]:8081", uplink6, uplink4},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			out := n.outside()
			nstest.Serve(t, n.ns, tc.program, netip.MustParseAddrPort(tc.listens))
			nstest.Serve(t, n.ns, tc.collides, netip.MustParseAddrPort(tc.at))
			w := n.portnet(conf{"ipam": tc.ipam})
			p := n.pod("a")
			w.add(p, publish(t, "8080:80/tcp"))
			// The pod has no server: what is sent to it is refused, and the program answers the rest.
			expect.Failure(t, expect.Err(askPort(t, out, "tcp", tc.pods, 8080)), "the port leads to the program by %s", tc.pods)
			p.serve(t, "tcp", 80)
			for _, at := range []string{tc.pods, tc.programs} {
				expect.Success(t, expect.Err(askPort(t, out, "tcp", at, 8080)), "%s", at)
			}
			_, err := w.tryAdd(n.pod("b"), publish(t, "8081:80/tcp"))
			wantError(t, err, 112, "8081/tcp is in use by ")
			// A pod of both families has the program's, too.
			nstest.Serve(t, n.ns, tc.program, netip.MustParseAddrPort(strings.Replace(tc.listens, "8080", "8082", 1)))
			_, err = n.portnet(nil).tryAdd(n.pod("c"), publish(t, "8082:80/tcp"))
			wantError(t, err, 112, "8082/tcp is in use by ")
		})
	}
}

func TestHostPortsAreGivenBackWithoutBeingPassedAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	w := n.portnet(nil)
	p := n.pod("a")
	w.add(p, publish(t, "8080:80/tcp", "8080:80/udp", "8080:80/sctp"))
	// As a runtime that forgot: no portMappings, no prevResult, no namespace.
	n.callOK(call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(nil)})
	n.wantNothing()
	w.add(n.pod("b"), publish(t, "8080:80/tcp", "8080:80/udp", "8080:80/sctp"))
}

func TestHostPortsOfADeadPodAreTakenOver(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.outside()
	w := n.portnet(nil)
	dead := n.pod("dead")
	w.add(dead, publish(t, "8080:80/tcp", uplink4+":9090:90/tcp"))
	// Nothing is left of it but its elements.
	n.ip("link del " + w.port(dead))
	must.Succeed(t, os.RemoveAll(n.state+"/attachments/podnet/"+strings.TrimPrefix(w.port(dead), "veth")+".json"))
	p := n.pod("b")
	w.add(p, publish(t, "8080:81/tcp", "9090:91/tcp"))
	p.serve(t, "tcp", 81)
	expect.Success(t, expect.Err(askPort(t, n.ns, "tcp", uplink4, 8080)))
	expect.Success(t, w.check(p))
}

func TestHostsLoopbackStaysTheHosts(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	secret := nstest.Serve(t, n.ns, "tcp", netip.MustParseAddrPort("127.0.0.1:0"))
	w := n.portnet(nil)
	p := n.pod("a")
	w.add(p, publish(t, "8080:80/tcp"))
	got := nstest.Sysctl(t, n.ns, "net/ipv4/conf/cbr0/route_localnet")
	must.That(t, got == "1", "route_localnet is %s: there is nothing to guard against", got)
	// The pod's own routes must not keep it from trying.
	nstest.Sysctl(t, p.NS, "net/ipv4/conf/eth0/route_localnet", "1")
	nstest.Run(t, p.NS, "ip", "address", "flush", "dev", "lo")
	nstest.Run(t, p.NS, "ip", "route", "add", "127.0.0.0/8", "via", gateway4, "src", strings.Split(globals(t, p.NS, "eth0")[0], "/")[0])
	expect.Failure(t, dial(p.NS, secret, 500*time.Millisecond), "the pod reaches what the host has bound to 127.0.0.1")
	// It would, without the rule, and the filter that stands in for it.
	n.nft("flush chain inet tombolo loopback")
	n.run("tc", "qdisc", "del", "dev", "cbr0", "clsact")
	expect.Success(t, dial(p.NS, secret, patience), "the attack does not work without the guard")
}

// dial connects, and waits so long for it.
func dial(ns *netns.NS, to netip.AddrPort, wait time.Duration) error {
	return ns.Do(func() error {
		c, err := net.DialTimeout("tcp", to.String(), wait)
		if err != nil {
			return err
		}
		return c.Close()
	})
}

func TestFlowsOfUDPFollowThePod(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	w := n.portnet(nil)
	w.add(n.pod("first")) // from here on the kernel tracks connections
	client := newSender(t, out, netip.MustParseAddrPort(uplink4+":5300"))
	// The client began before there was a pod: its flow leads to the host.
	client.send(t)
	before := n.run("conntrack", "-L", "-p", "udp")
	must.That(t, strings.Contains(before, "dport=5300"), "no flow to begin with:\n%s", before)
	for _, id := range []string{"a", "b"} {
		p := n.pod(id)
		r := w.add(p, publish(t, "5300:53/udp"))
		p.serve(t, "udp", 53)
		expect.Equal(t, client.ask(t), nstest.Addr(outside4), "pod %s (%s) was not reached: answer from", id, ip4(r))
		w.del(p)
		flows := n.run("conntrack", "-L", "-p", "udp")
		expect.That(t, !strings.Contains(flows, "src="+ip4(r).String()), "flows to the pod outlive it:\n%s", flows)
	}
}

// What pods send to that port of other machines is not the host's.
func TestAPublishedPortCutsNoFlowToAnotherMachine(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	w := n.portnet(nil)
	a := n.pod("a")
	r := w.add(a)
	nstest.Serve(t, out, "udp", addrPort(outside4, 5300))
	newSender(t, a.NS, addrPort(outside4, 5300)).ask(t)
	flows := func() string { return n.run("conntrack", "-L", "-p", "udp", "--src", ip4(r).String()) }
	expect.Contains(t, flows(), "dport=5300", "no flow to begin with")
	w.add(n.pod("b"), publish(t, "5300:53/udp"))
	expect.Contains(t, flows(), "dport=5300", "a pod publishes port 5300, and another's flow to that port of another machine is forgotten")
}

// sender is one UDP socket, so that what it sends is one flow.
type sender struct{ conn *net.UDPConn }

func newSender(t *testing.T, ns *netns.NS, to netip.AddrPort) *sender {
	t.Helper()
	var s sender
	must.Succeed(t, ns.Do(func() error {
		var err error
		s.conn, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
		return err
	}))
	t.Cleanup(func() { s.conn.Close() })
	return &s
}

// send ignores that nobody listened before.
func (s *sender) send(t *testing.T) {
	t.Helper()
	_, err := s.conn.Write([]byte("x"))
	must.That(t, err == nil || strings.Contains(err.Error(), "refused"), "%v", err)
}

func (s *sender) ask(t *testing.T) netip.Addr {
	t.Helper()
	buf := make([]byte, 100)
	for end := time.Now().Add(min(left(t), time.Minute)); time.Now().Before(end); {
		s.send(t)
		must.Succeed(t, s.conn.SetReadDeadline(time.Now().Add(200*time.Millisecond)))
		count, err := s.conn.Read(buf)
		if err != nil {
			continue
		}
		if seen, err := netip.ParseAddrPort(strings.TrimSpace(string(buf[:count]))); err == nil {
			return seen.Addr().Unmap()
		}
	}
	return netip.Addr{}
}

func addrPort(a string, port uint16) netip.AddrPort { return netip.AddrPortFrom(nstest.Addr(a), port) }

// A bridge without a gateway of ours does not make the host a router; a host port does.
func TestHostPortOfAPodBehindAnothersGateway(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	n.ip("link add br0 type bridge")
	n.ip("link set br0 up")
	n.ip("address add 10.77.0.1/24 dev br0")
	nstest.Sysctl(t, n.ns, "net/ipv4/ip_forward", "0")
	w := n.portnet(conf{"mode": "l2", "ipam": conf{"type": "host-local", "ranges": []any{[]any{conf{"subnet": subnet4}}},
		"routes": []conf{{"dst": "0.0.0.0/0"}}}})
	p := n.pod("a")
	w.add(p, publish(t, "8080:80/tcp"))
	p.serve(t, "tcp", 80)
	expect.Success(t, expect.Err(askPort(t, out, "tcp", uplink4, 8080)))
}

// nerdctl and podman publish a range of ports as one mapping each.
func TestAPodMayHaveThousandHostPorts(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	w := n.portnet(nil)
	p := n.pod("range")
	var ports []string
	for port := 20000; port < 21000; port++ {
		ports = append(ports, fmt.Sprintf("0.0.0.0:%d:%d/tcp", port, port))
	}
	opt := publish(t, ports...)
	w.add(p, opt)
	for _, port := range []int{20000, 20999} {
		p.serve(t, "tcp", port)
		expect.Success(t, expect.Err(askPort(t, out, "tcp", uplink4, port)))
	}
	expect.Success(t, w.check(p, opt))
	w.del(p, opt)
	expect.Success(t, n.remove(w.name).err())
	n.wantNothing()
}

func TestAHostPortTakesNothingThatIsForAnotherMachine(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	w := n.portnet(nil)
	caller := n.pod("caller")
	w.add(n.pod("a"), publish(t, "8080:80/tcp", "8080:80/udp")) // where nothing listens
	w.add(caller)
	for _, network := range []string{"tcp", "udp"} {
		for _, at := range []string{outside4, outside6} {
			nstest.Serve(t, out, network, netip.AddrPortFrom(nstest.Addr(at), 8080))
			expect.Success(t, expect.Err(askPort(t, caller.NS, network, at, 8080)),
				"a pod calls port 8080/%s of %s, and does not come there", network, at)
		}
	}
}

// TestManyHostPorts has a telephone server publish its ports, as runtimes list them: one by one.
func TestManyHostPorts(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.outside()
	w := n.portnet(nil)
	const first, count = 10000, 20000
	many := func(step int) option {
		var list []string
		for i := range count {
			list = append(list, fmt.Sprintf("%d:%d/udp", first+step*i, 20000+i))
		}
		return publish(t, list...)
	}
	p, ports := n.pod("a"), many(1)
	begun := time.Now()
	w.add(p, ports)
	t.Logf("ADD of %d ports: %v", count, time.Since(begun))
	p.serve(t, "udp", 20000+count-1)
	expect.Success(t, expect.Err(askPort(t, out, "udp", uplink4, first+count-1)))
	expect.Contains(t, n.operate("ls", "--state", n.state).stdout, "10000-29999->20000-39999/udp")
	begun = time.Now()
	expect.Success(t, w.check(p, ports))
	t.Logf("CHECK: %v", time.Since(begun))
	_, err := w.tryAdd(n.pod("b"), publish(t, "29999:53/udp"))
	wantError(t, err, 112, "port 29999/udp is already published by container a")
	n.nft("delete table inet tombolo")
	begun = time.Now()
	must.Succeed(t, n.operate("repair", "--state", n.state).err(), "repair")
	t.Logf("repair: %v", time.Since(begun))
	expect.Success(t, expect.Err(askPort(t, out, "udp", uplink4, first+count-1)))
	begun = time.Now()
	w.del(p, ports)
	t.Logf("DEL: %v", time.Since(begun))
	_, err = w.tryAdd(p, many(2))
	wantError(t, err, 7, "publish 20000 ranges of ports of the host: a pod has up to 4096")
	n.wantNothing()
}
