package lan

import (
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// The kernel takes others of a subnet along with the address that was there first, unless promote_secondaries is on.
func TestTheHostsOtherAddressesStayWhereItsLeaseMoves(t *testing.T) {
	t.Parallel()
	n, d, k := takenWithLease(t)
	for _, link := range []string{"all", bridge} {
		nstest.Sysctl(t, n.host.ns, "net/ipv4/conf/"+link+"/promote_secondaries", "0")
	}
	const administrators = "192.168.50.99/24"
	ip(t, n.host.ns, "address add "+administrators+" dev "+bridge)
	k.kill()
	d.Stop()
	d.start("--dhcp-host=" + macOf(t, n.host, nic) + ",192.168.50.66")
	n.makeDue(lease.HostHash(nic))
	n.keeper()
	has := func() string { return n.hostRun("ip", "-4", "-o", "address", "show", "dev", bridge) }
	must.Until(t, "the host has another address", func() bool {
		return strings.Contains(has(), " 192.168.50.66/24 ") && !strings.Contains(has(), " "+n.host.ip4.String()+"/24 ")
	})
	if list := has(); !strings.Contains(list, " "+administrators+" ") {
		t.Errorf("the host's lease has moved, and %s, which an administrator gave it, is gone:\n%s", administrators, list)
	}
}
