package network

import (
	"testing"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A look may meet with another link of the bridge's name, on which somebody runs tcpdump.
func TestPromiscuousLinkThatIsNoBridgeHasRules(t *testing.T) {
	t.Parallel()
	rec := &state.Network{Name: "podnet", Bridge: "cbr0", Gateways: nstest.Prefixes("10.22.0.1/16")}
	n := &site{rec: rec, bridge: &bridge.Link{Name: "cbr0", Index: 7, Promiscuous: true}}
	if got := n.rules(); got.Bridge != "cbr0" || len(got.Dedup) > 0 {
		t.Errorf("%+v", got)
	}
}
