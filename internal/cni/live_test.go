package cni

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

func TestSTATUSWithoutAFacility(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for _, lacking := range []int{unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER} {
		a := n.run(t, &Plugin{Dial: func(protocol int, _ bool) (*nl.Conn, error) {
			if protocol == lacking {
				return nil, errNoKernel
			}
			return nl.Dial(protocol, nil)
		}}, "STATUS", nil)
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
