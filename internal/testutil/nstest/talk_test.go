package nstest_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestTalkHearsOfALossAndOfACut(t *testing.T) {
	t.Parallel()
	for network, how := range map[string]string{"udp": "drop", "tcp": "reject with tcp reset"} {
		nstest.RunParallel(t, network, func(t *testing.T) {
			a, b := nstest.New(t), nstest.New(t)
			nstest.Veth(t, a, "eth0", b, "eth0")
			nstest.Run(t, a, "ip", "address", "add", "10.0.0.1/24", "dev", "eth0")
			nstest.Run(t, b, "ip", "address", "add", "10.0.0.2/24", "dev", "eth0")
			at := netip.MustParseAddrPort("10.0.0.1:7")
			talk := nstest.NewTalk(t, network, a, at, b, at)
			talk.Check(t)
			nstest.Run(t, a, "nft", "add table ip cut; add chain ip cut in { type filter hook input priority 0; }; add rule ip cut in "+network+" dport 7 counter "+how)
			for strings.Contains(nstest.Run(t, a, "nft", "list", "table", "ip", "cut"), "packets 0 ") {
			}
			nstest.Run(t, a, "nft", "flush", "ruleset")
			var heard listener
			talk.Check(&heard)
			expect.That(t, heard.failed, "some questions met %q, and Check does not say so", how)
		})
	}
}

// listener is a test that may fail.
type listener struct {
	testing.TB
	failed bool
}

func (l *listener) Helper()               {}
func (l *listener) Errorf(string, ...any) { l.failed = true }
