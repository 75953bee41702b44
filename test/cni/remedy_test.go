package cni

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// advised gives the command that STATUS advises, as it stands in the plugin's output.
func (w *network) advised(t *testing.T) string {
	t.Helper()
	o := w.call(call{verb: "STATUS", stdin: w.stdin(nil)})
	e := failure(o.stdout)
	must.That(t, e != nil, "STATUS: %+v", o)
	_, command, ok := strings.Cut(e.Msg, "this helps: ")
	must.That(t, ok && strings.Contains(o.stdout, command),
		"no command, or another one than in the message: %s", o.stdout)
	return command
}

func TestAdvisedCommandLetsPodsAndTheirPublishedPortsPass(t *testing.T) {
	t.Parallel()
	for name, chain := range map[string]string{
		"before our chain": "nft 'add table inet fw; add chain inet fw f { type filter hook forward priority -300; policy accept; };" +
			" add rule inet fw f counter drop'",
		"behind our chain": "nft 'add table inet fw; add chain inet fw f { type filter hook forward priority 0; policy drop; }'",
		"of iptables":      "iptables -t mangle -P FORWARD DROP",
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			out := n.outside()
			w := n.portnet(nil)
			p := w.addPod("a", publish(t, "8080:80/tcp"))
			p.serve(t, "tcp", 80)
			n.run("sh", "-ec", chain)
			wantNoPing(t, p.NS, outside4)
			_, err := nstest.AskWithin(t, out, "tcp", netip.AddrPortFrom(nstest.Addr(uplink4), 8080), time.Second)
			must.That(t, err != nil, "it stops nothing")
			n.run("sh", "-ec", w.advised(t))
			wantPing(t, p.NS, outside4)
			expect.Success(t, expect.Err(askPort(t, out, "tcp", uplink4, 8080)))
			expect.Success(t, w.status())
			n.run("iptables", "-t", "mangle", "-S") // it can still read its tables
		})
	}
}

func TestStatusKnowsThatThePodsSubnetsMayPass(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	n.run("sh", "-ec", "nft 'add table inet fw; add chain inet fw f { type filter hook forward priority 0; policy drop; };"+
		" add rule inet fw f ip saddr "+subnet4+" accept; add rule inet fw f ip daddr "+subnet4+" accept;"+
		" add rule inet fw f ip6 saddr "+subnet6+" accept; add rule inet fw f ip6 daddr "+subnet6+" accept'")
	w := n.podnet(nil)
	p := w.addPod("a")
	wantPing(t, p.NS, outside4)
	expect.Success(t, w.status())
	n.run("nft", "flush chain inet fw f")
	wantNoPing(t, p.NS, outside4)
	wantError(t, w.status(), 50, "chain f of table inet fw drops")
}
