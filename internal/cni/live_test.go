package cni

import (
	"encoding/json"
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// CHECK knows the pod from the result alone, which says less than what was made.
func TestCHECKRightAfterADDFindsNothing(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		conf map[string]any
	}{
		{"the first version with CHECK", map[string]any{"cniVersion": "0.4.0"}},
		{"routes of all kinds", map[string]any{"ipam": map[string]any{
			"type": "host-local", "ranges": []any{[]any{map[string]any{"subnet": "10.61.0.0/24"}}},
			"routes": []any{
				map[string]any{"dst": "192.0.2.7/24"}, // by the address's gateway
				map[string]any{"dst": "198.51.100.0/24", "scope": 253},
				map[string]any{"dst": "203.0.113.0/24", "gw": "10.61.0.9", "mtu": 1300, "advmss": 1200, "priority": 50},
				map[string]any{"dst": "0.0.0.0/0", "gw": "10.61.0.9", "table": 100},
				map[string]any{"dst": "0.0.0.0/0", "gw": "10.61.0.9", "table": 254},
			},
		}}},
		{"a gateway off link", map[string]any{"isGateway": false, "isDefaultGateway": true, "ipam": map[string]any{
			"type": "static", "addresses": []any{map[string]any{"address": "10.61.0.2/32", "gateway": "10.99.0.1"}},
		}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			conf := map[string]any{}
			maps.Copy(conf, tt.conf)
			conf["prevResult"] = json.RawMessage(n.run(t, n.plugin(), "ADD", tt.conf).must(t).stdout)
			if a := n.run(t, n.plugin(), "CHECK", conf).must(t); a.stdout != "" {
				t.Errorf("CHECK printed %s", a.stdout)
			}
		})
	}
}

func TestSTATUSWithoutAFacility(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	noBridge, noNFT := n.plugin(), n.plugin()
	noBridge.DialBridge = func() (*bridge.Conn, error) { return nil, errNoKernel }
	noNFT.DialNFT = func(*nft.Config) (*nft.Conn, error) { return nil, errNoKernel }
	for _, p := range []*Plugin{noBridge, noNFT} {
		a := n.run(t, p, "STATUS", nil)
		if a.err == nil || a.err.Code != codeNotAvailable || a.err.Msg != errNoKernel.Error() {
			t.Errorf("got %s", a.stdout)
		}
	}
}

func (n *node) remove(t *testing.T, name string) error {
	t.Helper()
	return n.host.Do(func() error {
		node, err := network.Open(t.Context(), &network.Config{StateDir: n.stateDir})
		if err != nil {
			return err
		}
		return node.Remove(t.Context(), name)
	})
}

func hasLink(t *testing.T, ns *netns.NS, name string) bool {
	t.Helper()
	for _, l := range linkNames(t, ns) {
		if l == name {
			return true
		}
	}
	return false
}

func TestNetworkIsRemovedWithoutWhatItShares(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	other := map[string]any{"name": "other", "ipam": map[string]any{
		"type": "host-local", "ranges": []any{[]any{map[string]any{"subnet": "10.62.0.0/24"}}},
	}}
	n.run(t, n.plugin(), "ADD", nil).must(t)
	n.run(t, n.plugin(), "DEL", nil).must(t)
	n.run(t, n.plugin(), "ADD", other).must(t)
	must.Succeed(t, n.remove(t, "pods"))
	shown := nstest.Run(t, n.host, "ip", "-o", "addr", "show", "dev", "cbr0")
	if !strings.Contains(shown, "10.62.0.1/24") || strings.Contains(shown, "10.61.0.1/24") || strings.Contains(shown, "fd61::1/64") {
		t.Errorf("the bridge has:\n%s", shown)
	}
	if !hasLink(t, n.host, "cbr0") || len(n.elements(t)) != 1 {
		t.Errorf("links %v, elements %v", linkNames(t, n.host), n.elements(t))
	}
}

func TestRemovingWhatIsNoBridgeLeavesItAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.run(t, n.plugin(), "ADD", nil).must(t)
	n.run(t, n.plugin(), "DEL", nil).must(t)
	nstest.Run(t, n.host, "ip", "link", "del", "cbr0")
	nstest.Run(t, n.host, "ip", "link", "add", "cbr0", "type", "veth", "peer", "name", "other-end")
	const want = `code 116: cbr0 is no longer a bridge but of kind "veth": it is left alone`
	expect.NoDiff(t, cmp.Diff(want, describe(n.remove(t, "pods"))), "error")
	if !hasLink(t, n.host, "cbr0") {
		t.Error("the link is gone")
	}
}
