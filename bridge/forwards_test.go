package bridge_test

import (
	"fmt"
	"testing"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestHostForwardsWhatItsParametersSay(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for _, v4 := range []bool{false, true} {
		for _, v6 := range []bool{false, true} {
			nstest.Sysctl(t, n.ns, "net/ipv4/ip_forward", digit(v4))
			nstest.Sysctl(t, n.ns, "net/ipv6/conf/all/forwarding", digit(v6))
			for _, r := range []bridge.Routing{{}, {IPv4: true}, {IPv6: true}, {IPv4: true, IPv6: true}} {
				want := (v4 || !r.IPv4) && (v6 || !r.IPv6)
				expect.Of(n.conn.Forwards(t.Context(), r)).Is(t, want, "IPv4 %t, IPv6 %t: Forwards(%+v)", v4, v6, r)
			}
		}
	}
}

func digit(on bool) string {
	if on {
		return "1"
	}
	return "0"
}

func TestLinkSaysWhetherTheKernelRoutesLocalnetOnIt(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for _, on := range []bool{true, false} {
		nstest.Sysctl(t, n.ns, fmt.Sprintf("net/ipv4/conf/%s/route_localnet", n.link.Name), digit(on))
		l := must.Of(n.conn.Link(t.Context(), n.link.Name)).Get(t)
		if l.RouteLocalnet != on {
			t.Errorf("RouteLocalnet is %t where the parameter is %s", l.RouteLocalnet, digit(on))
		}
	}
}
