package nft

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func snatted(ep Endpoint, snat SNAT) Endpoint {
	ep.PortSNAT = snat
	return ep
}

// Whose calls come from the host's address is the endpoint's to say; the firewall sees to it
// where it must, whatever is said.
func TestPortSNATSaysWhoLosesItsAddress(t *testing.T) {
	t.Parallel()
	const none = "no answer"
	callers := []string{"outside", "host", "127.0.0.1", "pod", "other pod", "pod of another bridge"}
	for _, tc := range []struct {
		name   string
		snat   SNAT
		nfCall bool
		want   []string // of IPv4, as the callers are listed
	}{
		{"needed", SNATNeeded, false, []string{caller4, host4, bridge4, bridge4, bridge4, remote4}},
		{"all", SNATAll, false, []string{bridge4, bridge4, bridge4, bridge4, bridge4, bridge4}},
		{"all, where the firewall sees the answer", SNATAll, true, []string{bridge4, bridge4, bridge4, bridge4, bridge4, bridge4}},
		{"none", SNATNone, false, []string{caller4, host4, bridge4, none, none, remote4}},
		{"none, where the firewall sees the answer", SNATNone, true, []string{caller4, host4, bridge4, none, other4, remote4}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ctx := context.Background()
			p := newPublished(t, tc.nfCall)
			ep := p.ep
			ep.Ports, ep.PortSNAT = tcpAndUDP(Port{HostPort: hostPort, PodPort: podPort}), tc.snat
			n := p.network
			n.PortSNAT = true
			must.Succeed(t, p.c.Remove(ctx, p.ep))
			mustEnsure(t, p.c, n)
			mustAdd(t, p.c, ep)
			p.serve(t)
			six := map[string]string{bridge4: bridge6, other4: other6, caller4: caller6, host4: host6, remote4: remote6, none: none}
			var want, got []string
			for i, caller := range callers {
				at := map[string]string{host4: tc.want[i], host6: six[tc.want[i]]}
				from := p.where(caller)
				if caller == "127.0.0.1" {
					at, from = map[string]string{caller: tc.want[i]}, p.host
				}
				for _, to := range []string{host4, host6, "127.0.0.1"} {
					source, asked := at[to]
					if !asked {
						continue
					}
					for _, network := range []string{"tcp", "udp"} {
						want = append(want, strings.Join([]string{caller, "at", to, network, "is seen as", source}, " "))
						seen, err := nstest.AskWithin(t, from, network, netip.AddrPortFrom(nstest.Addr(to), hostPort), map[bool]time.Duration{true: briefly, false: patience}[source == none])
						text := seen.Addr().String()
						if err != nil {
							text = none
						}
						got = append(got, strings.Join([]string{caller, "at", to, network, "is seen as", text}, " "))
					}
				}
			}
			expect.NoDiff(t, cmp.Diff(want, got))
			expect.Of(checkAll(p.c, n, ep)).Len(t, 0, "Check")
			// Another one, as what it was is removed whole.
			ep.PortSNAT = SNATAll
			must.Succeed(t, p.c.Remove(ctx, ep))
			if eps, err := p.c.Endpoints(ctx, "podnet"); err != nil || len(eps) > 1 || strings.Contains(nft(t, p.host, "list", "table", "inet", "tombolo"), string(ep.Owner)) {
				t.Errorf("after Remove: %v, %v", eps, err)
			}
		})
	}
}

func TestPortSNATThatIsNone(t *testing.T) {
	t.Parallel()
	c, _ := dialNew(t)
	mustEnsure(t, c, Network{Name: "podnet", Masquerade: true, PortSNAT: true})
	ep := publisher(1, tcpPort("", 8080))
	ep.PortSNAT = snatAny
	expect.Is(t, c.Add(context.Background(), ep), tombolo.ErrInvalid, "Add")
}
