package bridge

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"strconv"

	"github.com/tombolo-cni/tombolo"
)

// Check compares the host's end of a pod's veth pair with port, and lists the differences. It compares the MACs only
// where port has them, and the MTU unless it is 0. The pod's end belongs to the pod once Attach has returned: its owner
// may change all of it, so Check does not look there.
func (c *Conn) Check(ctx context.Context, port Port) ([]tombolo.Difference, error) {
	p, cmp := &port, &comparison{object: "port " + port.Name}
	l, err := c.Link(ctx, p.Name)
	if errors.Is(err, fs.ErrNotExist) {
		return []tombolo.Difference{{Object: "port " + p.Name, What: "link", Want: p.Name}}, nil
	}
	if err != nil {
		return nil, err
	}
	if !l.Up {
		cmp.differs("link", "up", "down")
	}
	if p.MTU != 0 && l.MTU != p.MTU {
		cmp.differs("MTU", strconv.Itoa(p.MTU), strconv.Itoa(l.MTU))
	}
	if p.MAC != nil && !bytes.Equal(p.MAC, l.MAC) {
		cmp.differs("MAC", p.MAC.String(), l.MAC.String())
	}
	if p.Alias != "" && p.Alias != l.Alias {
		cmp.differs("alias", strconv.Quote(p.Alias), strconv.Quote(l.Alias))
	}
	br, err := c.Link(ctx, p.Bridge)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		cmp.missing("bridge", p.Bridge)
	case err != nil:
		return nil, err
	case br.Index != l.Master:
		cmp.missing("membership in bridge", p.Bridge)
	default:
		if !br.Up {
			cmp.list = append(cmp.list, tombolo.Difference{Object: "bridge " + p.Bridge, What: "link", Want: "up", Have: "down"})
		}
		cmp.port(p, l.Port)
		if !p.VLAN.IsZero() {
			diffs, err := c.VLANs().Check(ctx, l.Index, p.Name, p.VLAN)
			if err != nil {
				return nil, err
			}
			cmp.list = append(cmp.list, diffs...)
		}
		if err := cmp.staticFDB(ctx, c, p, l.Index); err != nil {
			return nil, err
		}
	}
	cmp.hostEnd(l)
	return cmp.list, nil
}

// comparison collects differences of one object.
type comparison struct {
	object string
	list   []tombolo.Difference
}

func (c *comparison) missing(what, want string) {
	c.list = append(c.list, tombolo.Difference{Object: c.object, What: what, Want: want})
}

func (c *comparison) flag(what string, want, have bool) {
	if want != have {
		c.list = append(c.list, tombolo.Difference{Object: c.object, What: what, Want: onOff(want), Have: onOff(have)})
	}
}

func (c *comparison) differs(what, want, have string) {
	c.list = append(c.list, tombolo.Difference{Object: c.object, What: what, Want: want, Have: have})
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

// Differences compares a link, nil where there is none, with what br describes. It leaves out what br leaves open,
// and the alias, which is only given to a new bridge.
func (br *Bridge) Differences(l *Link) []tombolo.Difference {
	if br == nil {
		return nil
	}
	cmp := &comparison{object: "bridge " + br.Name}
	if l == nil {
		cmp.missing("link", br.Name)
		return cmp.list
	}
	if l.Bridge == nil {
		cmp.differs("link", "of kind bridge", describeKind(l))
		return cmp.list
	}
	if !l.Up {
		cmp.differs("link", "up", "down")
	}
	if br.MTU != 0 && br.MTU != l.MTU {
		cmp.differs("MTU", strconv.Itoa(br.MTU), strconv.Itoa(l.MTU))
	}
	if br.MAC != nil && !bytes.Equal(br.MAC, l.MAC) {
		cmp.differs("MAC", br.MAC.String(), l.MAC.String())
	}
	if br.Promiscuous != nil {
		cmp.flag("promiscuous mode", *br.Promiscuous, l.Promiscuous)
	}
	if br.NFCall != nil {
		cmp.flag("nf_call_iptables", *br.NFCall, l.Bridge.NFCallIPTables)
		cmp.flag("nf_call_ip6tables", *br.NFCall, l.Bridge.NFCallIP6Tables)
	}
	if br.VLANFiltering {
		cmp.flag("vlan_filtering", true, l.Bridge.VLANFiltering)
	}
	if br.limits(l) {
		cmp.limit("fdb_max_learned", br.MaxLearned, *l.Bridge.MaxLearned)
	}
	return cmp.list
}

func (c *comparison) port(p *Port, have *PortState) {
	if have == nil {
		return
	}
	c.flag("hairpin", p.Hairpin, have.Hairpin)
	c.flag("isolation", p.Isolated, have.Isolated)
	c.flag("forwarding of link-local groups", p.ForwardGroups, have.ForwardGroups)
	c.flag("learning", !p.NoLearning, have.Learning)
	c.flag("flood", !p.NoFlood, have.Flood)
	c.flag("multicast flood", !p.NoMulticastFlood, have.MulticastFlood)
}

func (c *comparison) limit(what string, want, have uint32) {
	if want != have {
		c.differs(what, strconv.FormatUint(uint64(want), 10), strconv.FormatUint(uint64(have), 10))
	}
}
