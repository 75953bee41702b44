package bridge

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"

	"github.com/tombolo-cni/tombolo"
)

// Check compares the host's end of a pod's veth pair with port, and returns the differences. It compares the MACs
// only if port has them, and the MTU unless it is 0. It does not look at the pod's end, which belongs to the pod once
// Attach has returned.
func (c *Conn) Check(ctx context.Context, port Port) ([]tombolo.Difference, error) {
	l, err := c.Link(ctx, port.Name)
	if errors.Is(err, fs.ErrNotExist) {
		return []tombolo.Difference{{Object: "port " + port.Name, What: "link", Want: port.Name}}, nil
	}

	if err != nil {
		return nil, err
	}

	br, err := c.bridgeNamed(ctx, port.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return port.Differences(*l, Link{}), nil
	}

	if err != nil {
		return nil, err
	}

	found := &comparison{object: "port " + port.Name, list: port.Differences(*l, *br)}
	if br.Index != l.Master {
		return found.list, nil
	}

	if !br.Up {
		down := tombolo.Difference{Object: "bridge " + port.Bridge, What: "link", Want: "up", Have: "down"}
		found.list = append(found.list, down)
	}

	if !port.VLAN.IsZero() {
		diffs, err := c.VLANs().Check(ctx, l.Index, port.Name, port.VLAN)
		if err != nil {
			return nil, err
		}
		found.list = append(found.list, diffs...)
	}

	lacks, err := c.lacksStaticFDB(ctx, &port, l.Index)
	if lacks {
		found.missing("static FDB entry", port.PeerMAC.String())
	}

	return found.list, err
}

// Differences compares the link l with the host's end described by p, as a port of the bridge br. br.Index is 0 if
// the bridge is missing. It does not compare VLANs and the static FDB entry, which are not properties of a link.
func (p *Port) Differences(l, br Link) []tombolo.Difference {
	cmp := &comparison{object: "port " + p.Name}
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

	switch have := l.Port; {
	case br.Index == 0:
		cmp.missing("bridge", p.Bridge)
	case br.Index != l.Master:
		cmp.missing("membership in bridge", p.Bridge)
	case have != nil:
		cmp.flag("hairpin", p.Hairpin, have.Hairpin)
		cmp.flag("isolation", p.Isolated, have.Isolated)
		cmp.flag("forwarding of link-local groups", p.ForwardGroups, have.ForwardGroups)
		cmp.flag("learning", !p.NoLearning, have.Learning)
		cmp.flag("flood", !p.NoFlood, have.Flood)
		cmp.flag("multicast flood", !p.NoMulticastFlood, have.MulticastFlood)
	}

	// A loose rp_filter, which some systems set on each new link, is as good as a strict one.
	if l.ReversePath == 0 {
		cmp.differs("IPv4 rp_filter", "1", "0")
	}

	cmp.flag("IPv6 drop_unicast_in_l2_multicast", true, !l.UnicastInMulticast)
	if l.AcceptRA != 0 {
		cmp.differs("IPv6 accept_ra", "0", strconv.Itoa(l.AcceptRA))
	}

	return cmp.list
}

// comparison collects the differences of one object.
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

// Differences compares a link, or nil if there is none, with the bridge that br describes. It leaves out properties
// that br leaves open, and the alias, which only a new bridge gets.
func (br *Bridge) Differences(l *Link) []tombolo.Difference {
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

	if br.limits(l) && br.MaxLearned != *l.Bridge.MaxLearned {
		cmp.differs("fdb_max_learned", fmt.Sprint(br.MaxLearned), fmt.Sprint(*l.Bridge.MaxLearned))
	}

	return cmp.list
}
