package nft

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func dedups() []Dedup {
	return []Dedup{
		{BridgeMAC: mustMAC(bridgeMAC), Gateway: nstest.Addr(bridge4), Subnet: nstest.Prefix("10.22.0.0/16")},
		{BridgeMAC: mustMAC(bridgeMAC), Gateway: nstest.Addr(bridge6), Subnet: nstest.Prefix("fd00:22::/64")},
	}
}

func dedupNet(list ...Dedup) Network {
	n := podnet()
	n.Masquerade = false
	n.Dedup = list
	return n
}

const (
	service4 = "10.96.0.10"
	service6 = "fd96::10"
)

// newServiceSite has a service's addresses lead to the other pod.
func newServiceSite(tb testing.TB) *guardSite {
	tb.Helper()
	s := newGuardSite(tb)
	nstest.Run(tb, s.host, "nft", "table inet service { chain pre { type nat hook prerouting priority dstnat; "+
		"ip daddr "+service4+" dnat ip to "+other4+"; ip6 daddr "+service6+" dnat ip6 to "+other6+"; }; }")
	// So that nothing waits for neighbour discovery.
	for _, to := range []string{bridge4, bridge6, other4, other6} {
		must.Succeed(tb, nstest.Ping(tb, s.pod, nstest.Addr(to)))
	}
	for _, to := range []string{other4, other6, pod4, pod6} {
		must.Succeed(tb, nstest.Ping(tb, s.host, nstest.Addr(to)))
	}
	return s
}

func (s *guardSite) setBridge(tb testing.TB, promiscuous, hairpin, calls bool) {
	tb.Helper()
	on := map[bool]string{true: "on", false: "off"}
	call := map[bool]string{true: "1", false: "0"}[calls]
	nstest.Run(tb, s.host, "sh", "-ec", `
		ip link set cbr0 promisc `+on[promiscuous]+`
		ip link set cbr0 type bridge nf_call_iptables `+call+` nf_call_ip6tables `+call+`
		for port in veth1 veth2; do ip link set $port type bridge_slave hairpin `+on[hairpin]+`; done`)
}

// delivered sends ten datagrams from the pod to an address, and gives how many frames
// of them come to the other pod.
func (s *guardSite) delivered(tb testing.TB, to string) int {
	tb.Helper()
	// Not connected: nobody listens, and the socket is not to hear of it.
	var conn net.PacketConn
	network := map[bool]string{true: "udp4", false: "udp6"}[nstest.Addr(to).Is4()]
	err := s.pod.Do(func() error {
		var err error
		conn, err = net.ListenPacket(network, ":0")
		return err
	})
	must.Succeed(tb, err)
	defer conn.Close()
	s.frames++
	token, last := fmt.Sprintf("token%07d", s.frames), fmt.Sprintf("last%08d", s.frames)
	must.Succeed(tb, nstest.OnOneCPU(func() error {
		for range 10 {
			if _, err := conn.WriteTo([]byte(token), net.UDPAddrFromAddrPort(netip.AddrPortFrom(nstest.Addr(to), 9))); err != nil {
				return err
			}
		}
		// Whatever way they take, they pass as many queues as this does.
		s.pod1.send(ether(broadcastMAC, podMAC, 0x88b5, []byte(last))) // for local experiments
		return nil
	}))
	return s.pod2.seenBefore([]byte(token), []byte(last))
}

// The table for which there are dedup rules: datagrams to a service whose pod is on
// the same bridge.
func TestDedupDeliversOnceWhatAPromiscuousBridgeDeliversTwice(t *testing.T) {
	t.Parallel()
	s := newServiceSite(t)
	for _, tc := range []struct {
		name                 string
		promiscuous, hairpin bool
		dedup                []Dedup
		want                 [2]int // without and with bridge-nf-call-iptables
	}{
		{name: "plain", want: [2]int{10, 10}},
		{name: "promiscuous", promiscuous: true, want: [2]int{10, 20}},
		{name: "promiscuous and dedup", promiscuous: true, dedup: dedups(), want: [2]int{0, 10}},
		{name: "hairpin", hairpin: true, want: [2]int{10, 10}},
	} {
		for i, calls := range []bool{false, true} {
			s.setBridge(t, tc.promiscuous, tc.hairpin, calls)
			mustEnsure(t, s.c, dedupNet(tc.dedup...))
			for _, service := range []string{service4, service6} {
				expect.Equal(t, s.delivered(t, service), tc.want[i], "%s, calls %v: %d datagrams to %s became", tc.name, calls, 10, service)
			}
		}
	}
}

// What the host alone forwards is no copy: there would be nothing left of it.
func TestDedupSparesWhatIsSentOnce(t *testing.T) {
	t.Parallel()
	s := newServiceSite(t)
	s.setBridge(t, true, false, true)
	// A pod of another subnet on the same bridge, as after a change of the pod CIDR.
	third := nstest.New(t)
	nstest.Veth(t, s.host, "veth3", third, "eth0")
	nstest.Run(t, s.host, "sh", "-ec", `
		ip link set veth3 master cbr0
		ip addr add 10.23.0.1/16 dev cbr0
		ip addr add fd00:23::1/64 dev cbr0 nodad
		ip addr add 10.22.0.9/16 dev cbr0
		ip addr add fd00:22::9/64 dev cbr0 nodad`)
	nstest.Run(t, third, "sh", "-ec", `
		ip addr add 10.23.0.5/16 dev eth0
		ip addr add fd00:23::5/64 dev eth0 nodad
		ip route add default via 10.23.0.1
		ip route add default via fd00:23::1`)
	all := dedupNet(append(dedups(),
		Dedup{mustMAC(bridgeMAC), nstest.Addr("10.23.0.1"), nstest.Prefix("10.23.0.0/16")},
		Dedup{mustMAC(bridgeMAC), nstest.Addr("fd00:23::1"), nstest.Prefix("fd00:23::/64")})...)
	mustEnsure(t, s.c, all)
	got := s.delivered(t, service4)
	must.That(t, got == 10, "10 datagrams to the service became %d", got)
	for _, tc := range []struct {
		name string
		from *netns.NS
		src  string
		to   string
	}{
		{"from a pod to one of another subnet", s.pod, pod4, "10.23.0.5"},
		{"from a pod to one of another subnet", s.pod, pod6, "fd00:23::5"},
		{"and the other way round", third, "10.23.0.5", other4},
		{"and the other way round", third, "fd00:23::5", other6},
		{"from pod to pod", s.pod, pod4, other4},
		{"from pod to pod", s.pod, pod6, other6},
		{"from the gateway", s.host, bridge4, other4},
		{"from the gateway", s.host, bridge6, other6},
		{"from the host's address elsewhere", s.host, host4, other4},
		{"from the host's address elsewhere", s.host, host6, other6},
		{"from outside", s.outside, far4, other4},
		{"from outside", s.outside, far6, pod6},
	} {
		expect.Success(t, nstest.PingWith(t, tc.from, nstest.Addr(tc.to), nstest.Echo{From: nstest.Addr(tc.src)}), "%s: from %s to %s", tc.name, tc.src, tc.to)
	}
	// A second gateway has to be named: that of an older pod CIDR which is part of this.
	second := []Dedup{
		{mustMAC(bridgeMAC), nstest.Addr("10.22.0.9"), nstest.Prefix("10.22.0.0/16")},
		{mustMAC(bridgeMAC), nstest.Addr("fd00:22::9"), nstest.Prefix("fd00:22::/64")},
	}
	for _, named := range []bool{false, true} {
		n := dedupNet(dedups()...)
		if named {
			n = dedupNet(append(dedups(), second...)...)
		}
		mustEnsure(t, s.c, n)
		for _, d := range second {
			to := map[bool]string{true: other4, false: other6}[d.Gateway.Is4()]
			err := nstest.PingWith(t, s.host, nstest.Addr(to), nstest.Echo{From: d.Gateway, Wait: 300 * time.Millisecond})
			expect.Equal(t, named, err == nil, "from gateway %s, named: %v: %v", d.Gateway, named, err)
		}
	}
}

func TestDedupNeverGrows(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	mustEnsure(t, c, dedupNet(dedups()...))
	want := nft(t, ns, "list", "table", "bridge", "tombolo")
	got := strings.Count(want, "veth*")
	expect.That(t, got == 4, "%d rules, want 4:\n%s", got, want)
	d := dedups()
	other := func(i int, subnet string) Dedup { return Dedup{d[i].BridgeMAC, d[i].Gateway, nstest.Prefix(subnet)} }
	for _, same := range [][]Dedup{
		d, {d[1], d[0]}, {d[0], d[1], d[0]}, {other(0, "10.22.3.4/16"), other(1, "fd00:22::abcd/64")}, {other(0, "10.22.3.4/16"), d[0], d[1]},
	} {
		wantReady(t, c, dedupNet(same...))
		expect.NoDiff(t, cmp.Diff(want, nft(t, ns, "list", "table", "bridge", "tombolo")), "%v", same)
	}
}

// kubenet's bug was to take the first address of the subnet for the gateway's.
func TestDedupTakesTheGatewayThatItIsGiven(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	n := dedupNet(
		Dedup{mustMAC(bridgeMAC), nstest.Addr("10.22.0.5"), nstest.Prefix("10.22.0.0/16")},
		Dedup{mustMAC(bridgeMAC), nstest.Addr("fd00:22::5"), nstest.Prefix("fd00:22::/64")})
	mustEnsure(t, c, n)
	list := nft(t, ns, "list", "table", "bridge", "tombolo")
	for _, want := range []string{
		`oifname "veth*" ether saddr 02:00:00:00:00:01 ip saddr 10.22.0.5 return`,
		`oifname "veth*" ether saddr 02:00:00:00:00:01 ip6 saddr fd00:22::5 return`,
	} {
		expect.Contains(t, list, want)
	}
	expect.That(t, !strings.Contains(list, "10.22.0.1 ") && !strings.Contains(list, "fd00:22::1 "),
		"a computed gateway in:\n%s", list)
}

func TestDedupFollowsItsSettings(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	d := dedups()[0]
	steps := []struct {
		name string
		n    Network
	}{
		{"none", dedupNet()},
		{"one family", dedupNet(d)},
		{"another gateway", dedupNet(Dedup{d.BridgeMAC, nstest.Addr("10.22.0.5"), d.Subnet})},
		{"another MAC", dedupNet(Dedup{mustMAC(otherMAC), d.Gateway, d.Subnet})},
		{"another subnet", dedupNet(Dedup{d.BridgeMAC, d.Gateway, nstest.Prefix("10.22.0.0/17")})},
		{"both families", dedupNet(dedups()...)},
		{"none again", dedupNet()},
	}
	mustEnsure(t, c, Network{Name: "other", Dedup: dedups()})
	mustEnsure(t, c, steps[0].n)
	for i, step := range steps[1:] {
		expect.Of(c.Ready(ctx, step.n)).Is(t, false, "%s: Ready", step.name)
		diffs, err := c.Check(ctx, step.n)
		expect.That(t, err == nil && len(diffs) > 0, "%s: Check: %v, %v", step.name, diffs, err)
		out := mustEnsure(t, c, step.n)
		expect.That(t, out.Changed && !out.Emptied, "%s: Ensure: %+v", step.name, out)
		wantReady(t, c, step.n)
		expect.Of(c.Ready(ctx, steps[i].n)).Is(t, false, "after %s, Ready for %s", step.name, steps[i].name)
	}
	list := nft(t, ns, "list", "ruleset")
	expect.That(t, !strings.Contains(list, "dedup-podnet") && strings.Contains(list, "dedup-other"), "in the end:\n%s", list)
	// Someone's rules, in a chain that should not be there.
	nft(t, ns, "add chain bridge tombolo dedup-podnet")
	expect.Of(c.Ready(ctx, steps[0].n)).Is(t, false, "with a chain that someone made: Ready")
	mustEnsure(t, c, steps[0].n)
	wantReady(t, c, steps[0].n)
}

func TestDedupRefusesWhatMakesNoSense(t *testing.T) {
	t.Parallel()
	d := dedups()[0]
	for _, tc := range []struct {
		name string
		bad  Dedup
	}{
		{"no MAC", Dedup{nil, d.Gateway, d.Subnet}},
		{"no gateway", Dedup{d.BridgeMAC, netip.Addr{}, d.Subnet}},
		{"no subnet", Dedup{d.BridgeMAC, d.Gateway, netip.Prefix{}}},
		{"all addresses", Dedup{d.BridgeMAC, d.Gateway, nstest.Prefix("0.0.0.0/0")}},
		{"two families", Dedup{d.BridgeMAC, nstest.Addr(bridge6), d.Subnet}},
		{"no gateway of a subnet of IPv6", Dedup{d.BridgeMAC, netip.Addr{}, nstest.Prefix("fd00::/64")}},
		{"a zone", Dedup{d.BridgeMAC, nstest.Addr("fe80::1%cbr0"), nstest.Prefix("fe80::/64")}},
		{"IPv4 in IPv6", Dedup{d.BridgeMAC, nstest.Addr("::ffff:10.22.0.1"), nstest.Prefix("::ffff:10.22.0.0/112")}},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			n := dedupNet(d, tc.bad)
			_, err := On(nil, nil).ruleset(&n)
			expect.That(t, errors.Is(err, tombolo.ErrInvalid) && strings.Contains(err.Error(), "network podnet: "), "got %v", err)
		})
	}
}
