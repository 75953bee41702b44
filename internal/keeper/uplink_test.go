package keeper

import (
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// A cable that is back while a look is under way is heard of after that look, which has seen it already.
func TestACarrierThatALookSawFirstIsStillHeardOf(t *testing.T) {
	t.Parallel()
	host := nstest.New(t)
	machine := nstest.New(t)
	nstest.Veth(t, host, "eth0", machine, "eth0")
	for _, ns := range []*netns.NS{host, machine} {
		nstest.Run(t, ns, "ip", "link", "set", "eth0", "up")
	}
	k := &Keeper{host: host, carriers: make(chan string, 1)}
	u := &uplinks{vigil: vigil{Keeper: k, ctx: t.Context(), restraints: restraints{}}, all: map[string]*taken{}}
	nic := &taken{}
	nic.NIC, nic.Bridge = "eth0", "br0"
	u.find(nic)
	u.linkNews(nic, linkChange{index: nic.links[0], facts: linkFacts{name: "eth0"}})
	u.find(nic)
	u.linkNews(nic, linkChange{index: nic.links[0], carrier: true, facts: linkFacts{name: "eth0"}})
	if len(k.carriers) != 1 {
		t.Errorf("%d bridges are told of, want that of the NIC", len(k.carriers))
	}
}
