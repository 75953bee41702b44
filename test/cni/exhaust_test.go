package cni

import (
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// flood sends frames from a pod, as many as are asked for.
func (p *pod) flood(tb testing.TB, count int, frame func(i int) []byte) {
	tb.Helper()
	out := rawSocket(tb, p.NS, "eth0")
	must.Succeed(tb, nstest.OnOneCPU(func() error {
		for i := range count {
			if _, err := unix.Write(out, frame(i)); err != nil {
				return err
			}
		}
		return nil
	}))
}

func (n *node) link(name string) *bridge.Link {
	n.Helper()
	conn := must.Of(bridge.Dial(n.ns)).Get(n)
	defer conn.Close()
	return must.Of(conn.Link(n.Context(), name)).Get(n)
}

// setBridgeLimit sets what iproute2 6.1 does not know of a bridge.
func (n *node) setBridgeLimit(name string, attribute uint16, value uint32) {
	n.Helper()
	conn := must.Of(nl.Dial(unix.NETLINK_ROUTE, n.ns)).Get(n)
	defer conn.Close()
	var b nl.Batch
	m, err := nl.Encode(unix.RTM_NEWLINK, 0, make([]byte, unix.SizeofIfInfomsg), func(ae *netlink.AttributeEncoder) {
		ae.String(unix.IFLA_IFNAME, name)
		ae.Nested(unix.IFLA_LINKINFO, func(ae *netlink.AttributeEncoder) error {
			ae.String(unix.IFLA_INFO_KIND, "bridge")
			ae.Nested(unix.IFLA_INFO_DATA, func(ae *netlink.AttributeEncoder) error {
				ae.Uint32(attribute, value)
				return nil
			})
			return nil
		})
	})
	b.Add("set", nl.Name(name), m, err)
	must.Succeed(n, conn.Execute(&b))
}

// fromAnyone is a frame to nobody, of a MAC of its own.
func fromAnyone(i int) []byte {
	return slices.Concat([]byte{2, 0x77, 0, 0, 0, 1}, []byte{2, 0x55}, binary.BigEndian.AppendUint32(nil, uint32(i)), be16(0x88b5), make([]byte, 46))
}

// limitsLearning says whether the kernel bounds what a bridge learns (Linux 6.7). Where it
// does not, bridges learn nothing from pods.
func (n *node) limitsLearning(name string) bool {
	n.Helper()
	return n.link(name).Bridge.MaxLearned != nil
}

func TestBridgeLearnsNoEndOfMACsFromAPod(t *testing.T) {
	t.Parallel()
	for name, fields := range map[string]conf{
		"gateway": {"bridge": "cbr0"}, "layer 2": {"bridge": "cbr0", "mode": "l2"}, "promiscuous": {"bridge": "cbr0", "promiscMode": true},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(fields)
			a := w.addPod("a")
			most, more := 16384, 20000
			unlimit := func() { n.setBridgeLimit("cbr0", unix.IFLA_BR_FDB_MAX_LEARNED, 0) }
			difference := "fdb_max_learned"
			if !n.limitsLearning("cbr0") {
				most, more = 0, 4096
				unlimit = func() { n.run("bridge", "link", "set", "dev", w.port(a), "learning", "on") }
				difference = "learning"
			}
			learnt := func() int {
				n.run("ip", "link", "set", "cbr0", "type", "bridge", "fdb_flush")
				a.flood(t, more, fromAnyone)
				return strings.Count(n.run("bridge", "fdb", "show", "dev", w.port(a)), "02:55:")
			}
			if got := learnt(); got > most || got < most/2 {
				t.Errorf("the bridge learns %d MACs of %d, where %d are the most", got, more, most)
			}
			expect.Success(t, w.check(a), "CHECK")
			unlimit()
			if got := learnt(); got < more {
				t.Errorf("without a limit, the bridge learns %d MACs of %d: nothing is to be limited", got, more)
			}
			wantError(t, w.check(a), 113, difference)
			must.Succeed(t, n.operate("repair", "--state", n.state).err(), "repair")
			got := learnt()
			expect.That(t, got <= most, "after a repair, the bridge learns %d MACs", got)
			expect.Success(t, w.check(a), "CHECK after a repair")
		})
	}
}

// A pod that the guard holds to its MAC can teach the bridge that one only.
func TestBridgeLearnsAGuardedPodsMAC(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"bridge": "cbr0", "guard": true})
	a := w.addPod("a")
	a.flood(t, 100, fromAnyone)
	known := n.run("bridge", "fdb", "show", "dev", w.port(a))
	expect.That(t, !strings.Contains(known, "02:55:") && !n.link(w.port(a)).Port.NoLearning,
		"the bridge knows of the port, which is to learn:\n%s", known)
	expect.Success(t, w.check(a), "CHECK")
}

func TestBridgeOfSomebodyElsesLearnsAsItDid(t *testing.T) {
	n := parallelNode(t)
	n.ip("link add cbr0 type bridge")
	w := n.podnet(conf{"bridge": "cbr0"})
	a := w.addPod("a")
	if limit := n.link("cbr0").Bridge.MaxLearned; limit != nil && *limit != 0 {
		t.Errorf("it learns %d MACs at most", *limit)
	}
	expect.Success(t, w.check(a), "CHECK")
	// Nor does an operator's own number change.
	own := n.network("own", conf{"bridge": "br1", "ipam": hostLocal("10.78.0.0/24")})
	own.add(n.pod("b"))
	if !n.limitsLearning("br1") {
		return
	}
	n.setBridgeLimit("br1", unix.IFLA_BR_FDB_MAX_LEARNED, 77)
	must.Succeed(t, n.operate("repair", "--state", n.state).err(), "repair")
	expect.Equal(t, *n.link("br1").Bridge.MaxLearned, 77, "an operator's limit of 77 has become")
}

// A killed ADD may leave a bridge that has neither our alias nor a limit.
func TestBridgeThatAKilledADDBeganLearnsNoMoreThanOthers(t *testing.T) {
	n := parallelNode(t)
	n.ip("link add cbr0 mtu 1499 group 29808 type bridge")
	w := n.podnet(nil)
	p := w.addPod("a")
	expect.Success(t, w.check(p))
	// Nor does it keep the MTU that it was begun with.
	l := n.link("cbr0")
	expect.That(t, l.MTU == 1500, "its MTU is %d, want 1500", l.MTU)
}
