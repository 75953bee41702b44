package bandwidth_test

import (
	"testing"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestMain(m *testing.M) { nstest.Main(m) }

const hash = "0123456789a"

var both = bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 10e6}, Egress: bandwidth.Limit{Rate: 20e6}}

// node is a namespace with a bridge and a pod at a port of it.
type node struct {
	ns, pod *netns.NS
	conn    *bandwidth.Conn
	target  bandwidth.Target
}

func newNode(tb testing.TB) *node {
	tb.Helper()
	n := &node{ns: nstest.New(tb)}
	nstest.Run(tb, n.ns, "ip", "link", "add", "br0", "type", "bridge")
	nstest.Run(tb, n.ns, "ip", "link", "set", "br0", "up")
	n.conn = n.through(tb, func(t nl.Transport) nl.Transport { return t })
	n.target, n.pod = n.addPod(tb, hash)
	return n
}

func (n *node) addPod(tb testing.TB, hash string) (bandwidth.Target, *netns.NS) {
	tb.Helper()
	pod := nstest.New(tb)
	port := "veth" + hash
	index, _ := nstest.Veth(tb, n.ns, port, pod, "eth0")
	nstest.Run(tb, n.ns, "ip", "link", "set", port, "master", "br0")
	owner := "tombolo:1:" + hash + ":"
	return bandwidth.Target{Port: port, PortIndex: index, MTU: 1500, IFB: bandwidth.IFBName(hash), Owner: owner, Alias: owner + "net:"}, pod
}

func (n *node) ensure(tb testing.TB, s bandwidth.Shape) (changed bool) {
	tb.Helper()
	changed, err := n.conn.Ensure(tb.Context(), n.target, s)
	must.Succeed(tb, err)
	return changed
}
