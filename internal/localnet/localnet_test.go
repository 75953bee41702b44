package localnet_test

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/localnet"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// node is a namespace with a bridge and a pod at a port of it.
type node struct {
	ns, pod *netns.NS
	conn    *localnet.Conn
}

const port = "veth0123456789a"

func newNode(tb testing.TB) *node {
	tb.Helper()
	n := &node{ns: nstest.New(tb), pod: nstest.New(tb)}
	nstest.Run(tb, n.ns, "ip", "link", "add", "br0", "type", "bridge")
	nstest.Run(tb, n.ns, "ip", "link", "set", "br0", "up")
	nstest.Veth(tb, n.ns, port, n.pod, "eth0")
	nstest.Run(tb, n.ns, "ip", "link", "set", port, "master", "br0")
	conn, err := nl.Dial(unix.NETLINK_ROUTE, n.ns)
	must.Succeed(tb, err)
	tb.Cleanup(func() { conn.Close() })
	n.conn = localnet.On(conn)
	return n
}

func (n *node) ensure(t *testing.T, k localnet.Filter, routed bool) (bool, error) {
	t.Helper()
	have, err := n.conn.Get(t.Context(), k)
	if err != nil {
		return false, err
	}
	return n.conn.Ensure(t.Context(), k, have, routed)
}

func (n *node) remove(t *testing.T, k localnet.Filter) error {
	t.Helper()
	have, err := n.conn.Get(t.Context(), k)
	if err != nil {
		return err
	}
	return n.conn.Remove(t.Context(), k, have)
}

// A loopbackNode is a node whose bridge has route_localnet on and an address, with a
// program of the host's that listens on all addresses, 127.0.0.0/8 included.
type loopbackNode struct {
	*node
	keep    localnet.Filter
	heard   *net.UDPConn
	raw     int // a packet socket on the pod's eth0
	to      *unix.SockaddrLinklayer
	mac     net.HardwareAddr // of the bridge
	counter int
}

const listenPort = 4711

func newLoopbackNode(t *testing.T) *loopbackNode {
	t.Helper()
	n := &loopbackNode{node: newNode(t), raw: -1}
	nstest.Run(t, n.ns, "ip", "link", "set", "lo", "up")
	nstest.Run(t, n.ns, "ip", "address", "add", "10.9.0.1/24", "dev", "br0")
	nstest.Run(t, n.ns, "ip", "link", "set", port, "up")
	nstest.Run(t, n.pod, "ip", "link", "set", "eth0", "up")
	for _, param := range []string{"all/rp_filter", "br0/rp_filter"} {
		nstest.Sysctl(t, n.ns, "net/ipv4/conf/"+param, "0")
	}
	nstest.Sysctl(t, n.ns, "net/ipv4/conf/br0/route_localnet", "1")
	err := n.ns.Do(func() error {
		link, err := net.InterfaceByName("br0")
		if err != nil {
			return err
		}
		n.mac = link.HardwareAddr
		n.keep = localnet.Filter{Bridge: "br0", Index: link.Index, Mark: 0x1000}
		n.heard, err = net.ListenUDP("udp4", &net.UDPAddr{Port: listenPort})
		return err
	})
	if err == nil {
		err = n.pod.Do(func() error {
			link, err := net.InterfaceByName("eth0")
			if err != nil {
				return err
			}
			n.to = &unix.SockaddrLinklayer{Ifindex: link.Index}
			n.raw, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
			return err
		})
	}
	must.Succeed(t, err)
	t.Cleanup(func() { n.heard.Close(); unix.Close(n.raw) })
	// Until the port forwards, nothing comes through at all.
	for !n.hears(t, n.frame("", "10.9.0.5", "10.9.0.1")) {
		time.Sleep(10 * time.Millisecond)
	}
	return n
}

// frame is a datagram in a frame to the bridge, behind tags such as "8100 0000". Its
// payload is a number of its own.
func (n *loopbackNode) frame(tags, from, to string) []byte {
	n.counter++
	payload := binary.BigEndian.AppendUint32(nil, uint32(n.counter))
	udp := binary.BigEndian.AppendUint16(nil, 5000)
	udp = binary.BigEndian.AppendUint16(udp, listenPort)
	udp = binary.BigEndian.AppendUint16(udp, uint16(8+len(payload)))
	udp = append(append(udp, 0, 0), payload...)
	ip := []byte{0x45, 0, 0, byte(20 + len(udp)), 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
	ip = append(ip, netip.MustParseAddr(from).AsSlice()...)
	ip = append(ip, netip.MustParseAddr(to).AsSlice()...)
	sum := uint32(0)
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(ip[i])<<8 | uint32(ip[i+1])
	}
	sum = sum&0xffff + sum>>16
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum+sum>>16))
	frame := append(append([]byte{}, n.mac...), 0x02, 0, 0, 0, 0, 9)
	frame = append(frame, unhex(tags)...)
	frame = append(frame, 0x08, 0x00)
	return append(append(frame, ip...), udp...)
}

func unhex(text string) []byte {
	out, err := hex.DecodeString(strings.ReplaceAll(text, " ", ""))
	if err != nil {
		panic(err)
	}
	return out
}

func (n *loopbackNode) send(t *testing.T, frame []byte) {
	t.Helper()
	must.Succeed(t, unix.Sendto(n.raw, frame, 0, n.to))
}

// hears says whether a frame's datagram is received. It waits for another one that is
// sent after it, by the same way, and is received for sure.
func (n *loopbackNode) hears(t *testing.T, frame []byte) bool {
	t.Helper()
	n.send(t, frame)
	want := n.counter
	fence := n.frame("", "10.9.0.5", "10.9.0.1")
	last := n.counter
	n.send(t, fence)
	heard := false
	for {
		var b [16]byte
		must.Succeed(t, n.heard.SetReadDeadline(time.Now().Add(time.Second)))
		size, err := n.heard.Read(b[:])
		if errors.Is(err, unix.EAGAIN) || isTimeout(err) {
			return false
		}
		must.That(t, err == nil && size == 4, "%v %v", size, err)
		switch int(binary.BigEndian.Uint32(b[:])) {
		case want:
			heard = true
		case last:
			return heard
		}
	}
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

func TestFilterDropsWhatOthersSendToTheHostsLoopback(t *testing.T) {
	t.Parallel()
	n := newLoopbackNode(t)
	attacks := []struct{ name, tags, from, to string }{
		{"plain", "", "10.9.0.5", "127.0.0.1"},
		{"another address of 127.0.0.0/8", "", "10.9.0.5", "127.9.9.9"},
		{"from 127.0.0.0/8", "", "127.0.0.9", "10.9.0.1"},
		{"from and to", "", "127.0.0.9", "127.0.0.1"},
		{"with a priority", "8100 e000", "10.9.0.5", "127.0.0.1"},
		{"with a service provider's priority", "88a8 0000", "10.9.0.5", "127.0.0.1"},
		{"with two priorities", "8100 0000 8100 0000", "10.9.0.5", "127.0.0.1"},
		{"with three", "88a8 0000 8100 2000 8100 0000", "10.9.0.5", "127.0.0.1"},
	}
	for _, a := range attacks {
		expect.That(t, n.hears(t, n.frame(a.tags, a.from, a.to)), "%s: the attack does not work without the filter", a.name)
	}
	changed, err := n.ensure(t, n.keep, true)
	must.That(t, err == nil && changed, "Ensure: %t, %v", changed, err)
	for _, a := range attacks {
		expect.That(t, !n.hears(t, n.frame(a.tags, a.from, a.to)), "%s: the host hears it", a.name)
	}
	for _, ok := range []struct{ name, tags, to string }{
		{"plain", "", "10.9.0.1"}, {"with a priority", "8100 e000", "10.9.0.1"},
	} {
		expect.That(t, n.hears(t, n.frame(ok.tags, "10.9.0.5", ok.to)),
			"%s: what is sent to the host's other addresses is dropped", ok.name)
	}
	must.Succeed(t, n.remove(t, n.keep))
	expect.That(t, n.hears(t, n.frame("", "10.9.0.5", "127.0.0.1")), "the filter outlives Remove")
}

// What the firewall has marked passes: answers to the host's own calls.
func TestFilterLetsMarkedPacketsPass(t *testing.T) {
	t.Parallel()
	n := newLoopbackNode(t)
	must.Succeed(t, expect.Err(n.ensure(t, n.keep, true)))
	nstest.Run(t, n.ns, "nft", "add table netdev t; add chain netdev t c { type filter hook ingress device "+port+" priority 0; }; "+
		"add rule netdev t c ip daddr 127.0.0.1 meta mark set 0x3000; add rule netdev t c ip daddr 127.0.0.2 meta mark set 0x2000; add rule netdev t c ip saddr 127.0.0.0/8 meta mark set 0x1000")
	for _, tt := range []struct {
		from, to string
		want     bool
	}{{"10.9.0.5", "127.0.0.1", true}, {"10.9.0.5", "127.0.0.2", false}, {"10.9.0.5", "127.0.0.3", false}, {"127.0.0.5", "10.9.0.1", false}} {
		expect.Equal(t, n.hears(t, n.frame("", tt.from, tt.to)), tt.want, "%s to %s: heard is", tt.from, tt.to)
	}
}

func ingress(t *testing.T, ns *netns.NS) string {
	t.Helper()
	return nstest.Run(t, ns, "tc", "filter", "show", "dev", "br0", "ingress")
}

func TestFilterIsIdempotentAndNotesWhatGoesWithIt(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	k := localnet.Filter{Bridge: "br0", Index: nstest.Index(t, n.ns, "br0"), Mark: 0x1000}
	for _, step := range []struct {
		routed, changes bool
		mark            uint32
	}{{true, true, 0x1000}, {true, false, 0x1000}, {false, true, 0x1000}, {false, false, 0x1000}, {false, true, 0x4000}, {true, true, 0x4000}} {
		k.Mark = step.mark
		expect.Of(n.ensure(t, k, step.routed)).Is(t, step.changes, "Ensure %+v", step)
		kept, err := n.conn.Get(t.Context(), k)
		expect.That(t, err == nil && kept.Exists && kept.Routed == step.routed, "after %+v: %+v, %v", step, kept, err)
		list := ingress(t, n.ns)
		expect.That(t, strings.Count(list, "bytecode") == 1, "after %+v: not one filter:\n%s", step, list)
	}
	k.Mark = 0x1000
	kept, err := n.conn.Get(t.Context(), k)
	expect.That(t, err == nil && !kept.Exists, "a filter of another mark counts: %+v, %v", kept, err)
	for range 2 {
		must.Succeed(t, n.remove(t, k))
		got := nstest.Run(t, n.ns, "tc", "qdisc", "show", "dev", "br0")
		expect.That(t, !strings.Contains(got, "clsact"), "a qdisc of ours is left: %s", got)
	}
	if kept, err := n.conn.Get(t.Context(), k); err != nil || kept.Exists || kept.Routed {
		t.Errorf("after Remove: %+v, %v", kept, err)
	}
}

func TestFilterLeavesOthersAtTheIngressAlone(t *testing.T) {
	t.Parallel()
	const theirs = "pref 7 u32 match ip dst 192.0.2.0/24 classid 1:1"
	for _, tt := range []struct{ name, qdisc, filter string }{
		{"clsact, empty", "clsact", ""},
		{"clsact, with a filter at the ingress", "clsact", "ingress"},
		{"clsact, with a filter at the egress", "clsact", "egress"},
		{"ingress, empty", "ingress", ""},
		{"ingress, with a filter", "ingress", "ingress"},
		{"a filter that came later", "", "ingress"},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			k := localnet.Filter{Bridge: "br0", Index: nstest.Index(t, n.ns, "br0"), Mark: 0x1000}
			state := func() string {
				return nstest.Run(t, n.ns, "tc", "qdisc", "show", "dev", "br0") + nstest.Run(t, n.ns, "tc", "filter", "show", "dev", "br0", "ingress") +
					nstest.Run(t, n.ns, "tc", "filter", "show", "dev", "br0", "egress")
			}
			prepare := func() {
				if tt.filter != "" {
					nstest.Run(t, n.ns, "tc", strings.Fields("filter add dev br0 "+tt.filter+" "+theirs)...)
				}
			}
			if tt.qdisc != "" {
				nstest.Run(t, n.ns, "tc", "qdisc", "add", "dev", "br0", tt.qdisc)
				prepare()
			}
			before := state()
			must.Succeed(t, expect.Err(n.ensure(t, k, true)))
			if kept, err := n.conn.Get(t.Context(), k); err != nil || !kept.Exists {
				t.Fatalf("%+v, %v\n%s", kept, err, state())
			}
			if tt.qdisc == "" {
				prepare()
			}
			must.Succeed(t, n.remove(t, k))
			after := state()
			expect.That(t, tt.qdisc == "" || after == before, "before:\n%s\nafter:\n%s", before, after)
			expect.That(t, tt.qdisc != "" || strings.Contains(after, "pref 7") && !strings.Contains(after, "bytecode"),
				"after:\n%s", after)
		})
	}
}

func TestFilterOfNoBridge(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for _, k := range []localnet.Filter{{}, {Bridge: "br0"}, {Bridge: "br0", Index: -1}, {Bridge: strings.Repeat("x", 16), Index: 1}} {
		expect.Is(t, expect.Err(n.ensure(t, k, true)), tombolo.ErrInvalid, "Ensure(%+v)", k)
		expect.Is(t, n.remove(t, k), tombolo.ErrInvalid, "Remove(%+v)", k)
	}
	gone := localnet.Filter{Bridge: "br9", Index: 9999, Mark: 1}
	expect.Is(t, expect.Err(n.ensure(t, gone, true)), fs.ErrNotExist, "Ensure of a bridge that is gone")
}
