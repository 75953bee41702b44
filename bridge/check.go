package bridge

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"net"
	"strconv"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/diff"
)

// Check compares the host's end of a pod's veth pair with port, and returns the differences. MACs and the MTU are
// compared only if port sets them. Check does not look at the pod's end, which belongs to the pod after Attach has
// returned.
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

	found := diff.List(port.Differences(*l, *br))
	if br.Index != l.Master {
		return found, nil
	}

	found.Up("bridge "+port.Bridge, br.Up)
	if !port.VLAN.IsZero() {
		diffs, err := c.VLANs().Check(ctx, l.Index, port.Name, port.VLAN)
		if err != nil {
			return nil, err
		}
		found = append(found, diffs...)
	}

	lacks, err := c.lacksStaticFDB(ctx, &port, l.Index)
	if lacks {
		found.Add("port "+port.Name, "static FDB entry", port.PeerMAC.String(), "")
	}

	return found, err
}

// Differences compares the link l with the port p on the bridge br. If the bridge does not exist, br.Index is 0.
// VLANs and the static FDB entry are not compared, since they are not properties of a link.
func (p *Port) Differences(l, br Link) []tombolo.Difference {
	var list diff.List
	object := "port " + p.Name
	list.Up(object, l.Up)
	list.Number(object, "MTU", cmp.Or(p.MTU, l.MTU), l.MTU)
	list.Add(object, "MAC", orString(p.MAC, l.MAC), l.MAC.String())
	list.Add(object, "alias", strconv.Quote(cmp.Or(p.Alias, l.Alias)), strconv.Quote(l.Alias))
	switch have := l.Port; {
	case br.Index == 0:
		list.Add(object, "bridge", p.Bridge, "")
	case br.Index != l.Master:
		list.Add(object, "membership in bridge", p.Bridge, "")
	case have != nil:
		list.Flag(object, "hairpin", p.Hairpin, have.Hairpin)
		list.Flag(object, "isolation", p.Isolated, have.Isolated)
		list.Flag(object, "forwarding of link-local groups", p.ForwardGroups, have.ForwardGroups)
		list.Flag(object, "learning", !p.NoLearning, !have.NoLearning)
		list.Flag(object, "flood", !p.NoFlood, !have.NoFlood)
		list.Flag(object, "multicast flood", !p.NoMulticastFlood, !have.NoMulticastFlood)
	}

	// Report only 0 (off). Some systems set rp_filter to 2 (loose) on each new link, which protects as well as 1
	// (strict).
	list.Number(object, "IPv4 rp_filter", max(1, l.reversePath), l.reversePath)
	list.Flag(object, "IPv6 drop_unicast_in_l2_multicast", true, !l.unicastInMulticast)
	list.Number(object, "IPv6 accept_ra", 0, l.AcceptRA)
	return list
}

// orString returns the text of a MAC, or of another one if it is nil.
func orString(mac, other net.HardwareAddr) string {
	if mac == nil {
		mac = other
	}
	return mac.String()
}

// Differences compares the link l with the bridge br. l is nil if the bridge does not exist. Fields that are not set
// in br are not compared. The alias is not compared either, since only a new bridge gets it.
func (br *Bridge) Differences(l *Link) []tombolo.Difference {
	var list diff.List
	object := "bridge " + br.Name
	switch {
	case l == nil:
		list.Add(object, "link", br.Name, "")
		return list
	case l.Bridge == nil:
		list.Add(object, "link", "of kind bridge", describeKind(l))
		return list
	}

	list.Up(object, l.Up)
	list.Number(object, "MTU", cmp.Or(br.MTU, l.MTU), l.MTU)
	list.Add(object, "MAC", orString(br.MAC, l.MAC), l.MAC.String())
	if br.Promiscuous != nil {
		list.Flag(object, "promiscuous mode", *br.Promiscuous, l.Promiscuous)
	}

	if br.NFCall != nil {
		list.Flag(object, "nf_call_iptables", *br.NFCall, l.Bridge.NFCallIPTables)
		list.Flag(object, "nf_call_ip6tables", *br.NFCall, l.Bridge.NFCallIP6Tables)
	}

	list.Flag(object, "vlan_filtering", br.VLANFiltering || l.Bridge.VLANFiltering, l.Bridge.VLANFiltering)
	if br.setsMaxLearned(l) {
		list.Number(object, "fdb_max_learned", int(br.MaxLearned), int(*l.Bridge.MaxLearned))
	}

	return list
}
