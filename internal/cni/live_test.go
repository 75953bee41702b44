package cni

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

func TestSTATUSWithoutAFacility(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	noBridge, noNFT := n.plugin(), n.plugin()
	noBridge.DialBridge = func() (*bridge.Conn, error) { return nil, errNoKernel }
	noNFT.DialNFT = func(*nft.Config) (*nft.Conn, error) { return nil, errNoKernel }
	for _, p := range []*Plugin{noBridge, noNFT} {
		a := n.run(t, p, "STATUS", nil)
		expect.That(t, a.err != nil && a.err.Code == codeNotAvailable && a.err.Msg == errNoKernel.Error(), "got %s", a.stdout)
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

func TestRemovingWhatIsNoBridgeLeavesItAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.run(t, n.plugin(), "ADD", nil).must(t)
	n.run(t, n.plugin(), "DEL", nil).must(t)
	nstest.Run(t, n.host, "ip", "link", "del", "cbr0")
	nstest.Run(t, n.host, "ip", "link", "add", "cbr0", "type", "veth", "peer", "name", "other-end")
	const want = `code 116: cbr0 is no longer a bridge but of kind "veth": it is left alone`
	expect.NoDiff(t, cmp.Diff(want, describe(n.remove(t, "pods"))), "error")
	expect.That(t, hasLink(t, n.host, "cbr0"), "the link is gone")
}
