package foreign

import (
	"context"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

func TestMain(m *testing.M) { nstest.Main(m) }

func messageType(msg uint16) uint16 { return uint16(nftnl.Type(msg)) }

func dial(tb testing.TB, ns *netns.NS) *Conn {
	tb.Helper()
	return dialMark(tb, ns, 0)
}

func dialMark(tb testing.TB, ns *netns.NS, mark uint32) *Conn {
	tb.Helper()
	conn := must.Of(nl.Dial(unix.NETLINK_NETFILTER, ns)).Get(tb)
	tb.Cleanup(func() { conn.Close() })
	return On(conn, &Config{Mark: mark})
}

// newHost makes a namespace in which cbr0 is our bridge.
func newHost(tb testing.TB) *netns.NS {
	tb.Helper()
	ns := nstest.New(tb)
	nftables(tb, ns, `table inet tombolo { set ours { type ifname; elements = { "cbr0" }; }; }`)
	return ns
}

// dialNew gives a Conn to a newHost.
func dialNew(tb testing.TB) (*Conn, *netns.NS) {
	tb.Helper()
	ns := newHost(tb)
	return dial(tb, ns), ns
}

// dialFaulty gives a Conn to a real kernel that fails as the test says.
func dialFaulty(tb testing.TB, ns *netns.NS, faults ...*nltest.Fault) *Conn {
	tb.Helper()
	return On(nltest.Dial(tb, unix.NETLINK_NETFILTER, ns, faults...), nil)
}

// watched is a Conn to a real kernel that lets the test look at requests.
func watched(tb testing.TB, ns *netns.NS, msg uint16, look func()) *Conn {
	tb.Helper()
	tr := must.Of(nl.Open(unix.NETLINK_NETFILTER, ns)).Get(tb)
	conn := nl.New(nltest.NewFaulty(tr, &nltest.Fault{Type: messageType(msg), Match: func(netlink.Message) bool { look(); return false }}))
	tb.Cleanup(func() { conn.Close() })
	return On(conn, nil)
}

// site is nstest's, with our firewall on its host.
type site struct {
	host, pod, other, outside *netns.NS
	c                         *Conn
	fw                        *nft.Conn
}

const (
	pod4 = "10.22.0.5"
	pod6 = "fd00:22::5"
	far4 = "198.51.100.1" // addresses outside
	far6 = "2001:db8:2::1"
)

// newSite has the pod in the firewall, and not masqueraded: so outside has the pod's own
// address to answer and to call.
func newSite(tb testing.TB) *site {
	tb.Helper()
	s := nstest.NewSite(tb)
	fw := must.Of(nft.Dial(&nft.Config{NetNS: s.Host})).Get(tb)
	tb.Cleanup(func() { fw.Close() })
	mustEnsure(tb, fw, podnet())
	must.Succeed(tb, fw.SetHost(context.Background(), []string{"up0"}, nil, nil))
	ep := pod("0123456789a", pod4, pod6)
	ep.Masquerade = false
	mustAdd(tb, fw, ep)
	return &site{s.Host, s.Pod, s.Other, s.Outside, On(fw.Socket(), nil), fw}
}

// podnet is the network of most tests: dual-stack, with masquerade.
func podnet() nft.Network {
	return nft.Network{Name: "podnet", Bridge: "cbr0", Prefixes: nstest.Prefixes("10.22.0.0/16", "fd00:22::/64"), Masquerade: true}
}

// pod is an endpoint of podnet.
func pod(owner nft.Owner, addresses ...string) nft.Endpoint {
	ep := nft.Endpoint{Owner: owner, Network: "podnet", Bridge: "cbr0", Masquerade: true}
	for _, a := range addresses {
		ep.Addrs = append(ep.Addrs, nstest.Addr(a))
	}
	return ep
}

func mustEnsure(tb testing.TB, c *nft.Conn, n nft.Network) {
	tb.Helper()
	must.Succeed(tb, expect.Err(c.Ensure(context.Background(), n)))
}

func mustAdd(tb testing.TB, c *nft.Conn, ep nft.Endpoint) {
	tb.Helper()
	must.Succeed(tb, c.Add(context.Background(), ep))
}

func nftables(tb testing.TB, ns *netns.NS, args ...string) string {
	tb.Helper()
	return nstest.Run(tb, ns, "nft", args...)
}

func many(t *testing.T, n int) []*Conn {
	t.Helper()
	ns := nstest.New(t)
	conns := make([]*Conn, n)
	for i := range conns {
		conns[i] = dial(t, ns)
	}
	return conns
}
