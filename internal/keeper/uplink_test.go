package keeper

import (
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// A cable that is back is told of once, by the look or the announcement that sees it first; either may be late.
func TestACarrierIsToldOfOnce(t *testing.T) {
	t.Parallel()
	host, machine := nstest.New(t), nstest.New(t)
	nstest.Veth(t, host, "eth0", machine, "eth0")
	for _, ns := range []*netns.NS{host, machine} {
		nstest.Run(t, ns, "ip", "link", "set", "eth0", "up")
	}
	for name, c := range map[string]struct {
		happens string // l: a look, which sees the carrier; -, +: announcements that it is lost, and back
		told    int
	}{
		"begin with it":            {"l+l", 0},
		"all is heard":             {"l-+l", 1},
		"a look first":             {"l-l+", 1},
		"its announcement is lost": {"l-l", 1},
		"twice":                    {"l-+l-+l", 2},
	} {
		k := &Keeper{host: host, carriers: make(chan struct{}, 2)}
		u := &uplinks{source: source{Keeper: k, ctx: t.Context(), contests: map[string]*contest{}}, all: map[string]*taken{}}
		nic := &taken{carrier: true}
		nic.NIC, nic.Bridge = "eth0", "br0"
		for _, what := range c.happens {
			if what == 'l' {
				u.find(nic)
			} else {
				u.linkNews(nic, linkChange{index: 2, carrier: what == '+', facts: linkFacts{name: "eth0"}})
			}
		}
		expect.That(t, len(k.carriers) == c.told, "%s: it is told of %d times, want %d", name, len(k.carriers), c.told)
	}
}
