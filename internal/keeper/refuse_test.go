package keeper

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// The LAN's server takes the pod's address away and grants it one that the host, or the
// network, cannot do without.
func TestAPodDoesNotMoveToAnAddressThatIsNotToBeHad(t *testing.T) {
	t.Parallel()
	for name, address := range map[string]string{
		"the host's own": hostAddress, "a gateway of the host's": "10.9.0.9", "the server's and router's": "10.9.0.1",
		"the network's": "10.9.0.0", "the broadcast address": "10.9.255.255", "a link-local one": "169.254.169.254",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, s := newMovable(t, time.Hour)
			nstest.Run(t, m.host, "ip", "route", "add", "10.77.0.0/16", "via", "10.9.0.9")
			p := m.pod
			s.set(func(s *server) { s.refuse, s.base = true, netip.MustParseAddr(address) })
			due(p.record)
			m.write(p.record)
			stop := m.keeper()
			until(t, "it is granted and declined", func() bool { return s.count("DECLINE") >= 1 })
			m.settled("")
			stop()
			if r := m.load(p); r.State != lease.Expired || !r.Lease.Address.Contains(netip.MustParseAddr(firstAddress)) {
				t.Errorf("on record is %s, %s", r.State, r.Lease.Address)
			}
			if got := nstest.Run(t, m.host, "nft", "list", "ruleset"); strings.Contains(got, ". "+address+" ") {
				t.Errorf("the firewall has %s:\n%s", address, got)
			}
			// And when it grants one that can be had, all is well.
			s.set(func(s *server) { clear(s.given); s.base = netip.MustParseAddr(nextAddress) })
			m.keeper()
			m.settled(nextAddress)
		})
	}
}

// With a shared NIC or a VLAN, the host's link in the pods' network is not the bridge.
func TestAGatewayBesideTheBridgeIsNotLeased(t *testing.T) {
	t.Parallel()
	m, _ := newMovable(t, time.Hour)
	k := must.Of(New(&Config{Leases: m.dir, State: m.state})).Get(t)
	k.host = m.host
	k.node = kernel{host: m.host}
	nstest.Run(t, m.host, "ip", "link", "add", "nic0", "address", "02:00:00:00:00:70", "type", "bridge")
	nstest.Run(t, m.host, "ip", "address", "add", "10.50.0.2/24", "dev", "nic0")
	nstest.Run(t, m.host, "ip", "link", "set", "nic0", "up")
	nstest.Run(t, m.host, "ip", "route", "add", "10.77.0.0/16", "via", "10.50.0.9")
	r := m.pod.record
	r.GatewayLink = "nic0"
	free := k.addressCheck(r)
	var conflict lease.Conflict
	must.That(t, errors.As(free(netip.MustParseAddr("10.50.0.9"), netip.Addr{}, false), &conflict), "a gateway: no conflict")
	expect.Success(t, free(netip.MustParseAddr("10.50.0.10"), netip.Addr{}, false), "another address")
}

func TestAPodThatHasAnAddressKeepsItFromOthers(t *testing.T) {
	t.Parallel()
	m, _ := newMovable(t, time.Hour)
	k := must.Of(New(&Config{Leases: m.dir, State: m.state})).Get(t)
	k.host = m.host
	r, own := m.pod.record, netip.MustParseAddr(firstAddress)
	other := ident.Hash(r.Network, "another", r.IfName)
	if err := k.refuseOwned(r.Network, other, r.Bridge, own); err == nil || !strings.Contains(err.Error(), r.ContainerID) {
		t.Errorf("to another pod: %v", err)
	}
	if err := k.refuseOwned("elsewhere", r.Hash(), r.Bridge, own); err == nil {
		t.Error("to a pod of another network that has the same hash: no error")
	}
	expect.Success(t, k.refuseOwned(r.Network, r.Hash(), r.Bridge, own), "to itself")
	expect.Success(t, k.refuseOwned(r.Network, other, r.Bridge, own.Next()), "nobody's")
	nstest.Run(t, m.host, "nft", "add", "element", "inet", "tombolo", "pods4", "{ "+r.Bridge+" . 10.9.3.3 comment \"by hand\" }")
	if err := k.refuseOwned(r.Network, other, r.Bridge, netip.MustParseAddr("10.9.3.3")); err == nil {
		t.Error("another program's: no error")
	}
	// What a pod that is gone has left is no obstacle.
	must.Succeed(t, m.state.Remove(r.Network, r.Hash()))
	expect.Success(t, k.refuseOwned(r.Network, other, r.Bridge, own), "of a pod that is gone")
}
