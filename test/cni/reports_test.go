package cni

import (
	"net"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A pod says which groups it is in when it starts, and again at each change. That is for
// multicast routers, whose ports the operator takes out of the group that pods are in.
func TestPodsAreSparedWhatOnlyMulticastRoutersRead(t *testing.T) {
	t.Parallel()
	const listenerReport = 143
	n := newNode(t)
	w := n.podnet(nil)
	spared, router, speaker := n.pod("spared"), n.pod("router"), n.pod("speaker")
	r := w.add(spared)
	w.add(router)
	n.ip("link set " + w.port(router) + " group 0")
	said := w.add(speaker)
	wantPing(t, speaker.NS, r.IPs[1].Address.IP.String())
	from := must.Of(net.ParseMAC(said.Interfaces[2].Mac)).Get(t)
	isReport := func(f frame) bool { return f.icmp6 == listenerReport && f.incoming && f.from == from.String() }
	podHears, routerHears, speaks := capture(t, spared.NS, "eth0"), capture(t, router.NS, "eth0"), capture(t, speaker.NS, "eth0")
	nstest.Run(t, speaker.NS, "ip", "address", "add", "fd00:77::77/64", "dev", "eth0", "nodad")
	routerHears.until(isReport)
	speaks.send(from, "the report was before this")
	for _, f := range podHears.until(func(f frame) bool { return f.protocol == testProtocol }) {
		expect.That(t, !isReport(f), "the pod heard %+v", f)
	}
	for _, p := range []*pod{spared, router, speaker} {
		expect.Success(t, w.check(p))
	}
}
