package icmp_test

import (
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// pair makes two namespaces that are joined by a veth pair: 10.9.0.1 and fd09::1 are
// a's, 10.9.0.2 and fd09::2 are b's.
func pair(t *testing.T) (a, b *netns.NS) {
	t.Helper()
	a, b = nstest.New(t), nstest.New(t)
	nstest.Veth(t, a, "eth0", b, "eth0")
	for i, ns := range []*netns.NS{a, b} {
		host := string(rune('1' + i))
		nstest.Run(t, ns, "ip", "address", "add", "10.9.0."+host+"/24", "dev", "eth0")
		nstest.Run(t, ns, "ip", "address", "add", "fd09::"+host+"/64", "dev", "eth0", "nodad")
	}
	nstest.WaitForAddresses(t, a, b)
	return a, b
}
