package network_test

import (
	"sync"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/network"
)

// leased has the pod lease its address.
func leasedAddresses(n *node) {
	nstest.NewDnsmasq(n, n.lan(), "eth0", "--dhcp-range=10.61.0.2,10.61.0.5,255.255.255.0,infinite", "--dhcp-sequential-ip")
	n.pod.Addresses, n.pod.Lease, n.nw.Origin = nil, &network.Lease{}, network.Origin{Type: "dhcp", Dir: n.leases}
	n.keep()
}

// keep starts a keeper that does nothing.
func (n *node) keep() {
	n.Helper()
	dir, err := lease.Open(n.leases)
	must.Succeed(n, err)
	keeper, err := dir.Keep()
	must.Succeed(n, err)
	n.stop = sync.OnceFunc(func() { keeper.Close() })
	n.Cleanup(n.stop)
}

// edit changes the record of the pod's lease, of which a copy stays.
func edit(change func(*lease.Record)) func(*node) {
	return func(n *node) {
		n.Helper()
		dir, err := lease.Open(n.leases)
		must.Succeed(n, err)
		held, err := dir.Lock(n.Context(), n.names("$H"))
		must.Succeed(n, err)
		defer held.Close()
		rec, err := held.Load()
		must.Succeed(n, err)
		change(rec)
		must.Succeed(n, held.Replace(rec))
	}
}

func TestABrokenLeaseIsNamedAndMended(t *testing.T) {
	const keep, back = "cp $L/$H.json $L/kept", "mv $L/kept $L/$H.json"
	end := func(r *lease.Record) {
		then := time.Unix(1e9, 0).UTC()
		r.Lease.Obtained, r.Lease.Renew, r.Lease.Rebind, r.Lease.Expire = then, then, then, then
	}
	table{with: leasedAddresses, faults: map[string]fault{
		"no record": {on: "rm $L/$H.json", says: "its lease has no record in $L [recreate pod]"},
		"damaged":   {on: "echo '{' >$L/$H.json", says: "load lease: record $L/$H.json: damaged: not valid JSON at line 2, column 1: it ends too early; a DEL or GC of the attachment removes it [recreate pod]"},
		"ended":     {on: keep, do: edit(end), undo: back, says: "its lease of 10.61.0.2/24 ended at 2001-09-09T01:46:40Z [configuration]"},
		"lost": {on: keep, do: edit(func(r *lease.Record) { r.State, r.Error = lease.Expired, "the server refused it" }), undo: back,
			says: "its lease is expired: the server refused it [configuration]"},
		"no keeper": {do: func(n *node) { n.stop() },
			says: "no keeper runs for the leases of $L: start it (systemctl start tombolod, or tombolod --leases $L) [start tombolod]"},
		"of another address": {in: "ip address add 10.61.0.3/24 dev eth0", do: edit(func(r *lease.Record) { r.Lease.Address = nstest.Prefix("10.61.0.3/24") }),
			says: "its lease has the address 10.61.0.3/24 [repair]"},
	}}.run(t)
}
