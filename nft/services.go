package nft

import (
	"context"
	"net/netip"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// servicesComment is the comment of addresses that host ports leave alone.
const servicesComment = ruleset.OwnerPrefix + "services"

// LeftAlone lists the addresses of the host that ports without a HostAddr leave to others: see LeaveAlone.
func (c *Conn) LeftAlone(ctx context.Context) (list []netip.Addr, _ error) {
	err := c.retry(ctx, func() (err error) {
		list, err = c.leftAlone()
		return err
	})
	return list, err
}

func (c *Conn) leftAlone() (list []netip.Addr, _ error) {
	families := ruleset.Families()
	elements, err := c.tables.ElementsOf([]ruleset.Place{ruleset.InInet(families[0].Services), ruleset.InInet(families[1].Services)})
	for _, el := range elements {
		if a, ok := netip.AddrFromSlice(el.Key); ok {
			list = append(list, a)
		}
	}
	return list, err
}

// LeaveAlone makes ports without a HostAddr leave these addresses of the host to others, and no further ones. A port
// whose HostAddr is one of them takes it. The error matches fs.ErrNotExist where the table or a set is missing.
func (c *Conn) LeaveAlone(ctx context.Context, addrs []netip.Addr) error {
	return c.retry(ctx, func() error {
		generation, err := nftnl.SeenGeneration(c.tables.Conn)
		if err != nil {
			return err
		}
		have, err := c.leftAlone()
		if err != nil {
			return err
		}
		gone := map[netip.Addr]bool{}
		for _, a := range have {
			gone[a] = true
		}
		element := func(a netip.Addr) ruleset.Element {
			return ruleset.Element{Set: ruleset.InInet(ruleset.FamilyOf(a).Services), Key: a.AsSlice()}
		}
		t := c.tables.Begin(&generation)
		for _, a := range addrs {
			if !gone[a] {
				t.NewElement(element(a), servicesComment)
			}
			delete(gone, a)
		}
		for a := range gone {
			t.DelElement(element(a))
		}
		return c.commitEndpoints(t)
	})
}
