package ruleset

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Share describes how a NIC of the host connects a bridge to a LAN. It has the same fields as nft.Share.
//
// Chains at the NIC's hooks send frames for pods, and copies of multicast frames, into a veth pair that leads to the
// bridge. A BPF program at the pair (package bridge/share) handles the other direction. It makes frames for the host
// come in by the NIC. So packets that the host routes for pods come in and go out by the NIC. The chains of family
// inet recognize them by the pods' addresses.
type Share struct {
	NIC   string
	MAC   net.HardwareAddr
	Outer int
	Port  string
}

// Prefixes of the names of chains and sets for a Share. After a prefix follows the name of the bridge, so networks on
// one bridge share these objects.
const (
	sharePrefix       = "share-"
	sharePodsPrefix   = sharePrefix + "pods-"
	shareInPrefix     = sharePrefix + "in-"
	shareOutPrefix    = sharePrefix + "out-"
	shareGuardPrefix  = sharePrefix + "guard-"
	shareMutePrefix   = sharePrefix + "mute-"
	shareTrackPrefix  = sharePrefix + "track-"
	shareClosedPrefix = sharePrefix + "closed-"
	shareAnswerPrefix = sharePrefix + "answers-"
	shareUnmarkPrefix = sharePrefix + "unmark-"
)

// ShareSet returns the name of the set that contains the MACs of a bridge's pods. The set is in the table of family
// netdev.
func ShareSet(bridge string) string { return sharePodsPrefix + bridge }

func shareSet(name string) Set {
	s := setOf(InNetdev(name), nftnl.TypeEther)
	s.KeyLen = EtherLen // a key of one part has no padding
	return s
}

// ofShare reports whether a chain or set belongs to the Share of a bridge.
func ofShare(at Place, bridge string) bool {
	rest, ok := strings.CutPrefix(at.Name, sharePrefix)
	_, owner, _ := strings.Cut(rest, "-")
	return ok && owner == bridge
}

// addShare adds the chains that the network's Share needs. For a network without a Share, it adds none.
func (rs *Ruleset) addShare(n *Network, mark uint32) {
	if n.Share == nil {
		return
	}

	s := &share{*n.Share, n.Bridge, mark}
	pair := "pair " + strconv.Itoa(s.Outer)
	at := func(prefix, device string, hook uint32, settings string, write func(*rules)) {
		rs.add(Chain{Place: InNetdev(prefix + n.Bridge), Kind: "filter", Hook: hook, Device: device, settings: settings,
			write: write})
	}
	at(shareInPrefix, s.NIC, unix.NF_NETDEV_INGRESS, pair, s.addIn)
	at(shareOutPrefix, s.NIC, unix.NF_NETDEV_EGRESS, pair, s.addOut)
	at(shareGuardPrefix, s.Port, unix.NF_NETDEV_EGRESS, sharedSettings, s.addGuard)
	at(shareMutePrefix, n.Bridge, unix.NF_NETDEV_INGRESS, sharedSettings, s.addMute)

	host := fmt.Sprintf("%s at %s", s.MAC, s.NIC)
	rs.filter(InInet(shareTrackPrefix+n.Bridge), unix.NF_INET_PRE_ROUTING, priorityRaw, host, s.addTrack)
	marks := s.NIC + ", " + markSettings(mark)
	rs.filter(InInet(shareClosedPrefix+n.Bridge), unix.NF_INET_FORWARD, priorityBeforeFilter+1, marks, s.addClosed)
	rs.filter(InInet(shareUnmarkPrefix+n.Bridge), unix.NF_INET_POST_ROUTING, priorityUnmark, marks, s.addUnmark)
	if n.NFCall {
		rs.gone = append(rs.gone, InInet(shareAnswerPrefix+n.Bridge))
		return
	}

	rs.nat(shareAnswerPrefix+n.Bridge, unix.NF_INET_POST_ROUTING, priorityBeforeSourceNAT, s.NIC, s.addAnswers)
}

// share holds the parameters of the rules for a Share.
type share struct {
	Share
	bridge string
	mark   uint32
}

// addIn appends the rules for packets that the NIC receives, from the wire or from the BPF program at the veth pair.
// They send frames for pods, and copies of multicast frames, into the veth pair. Frames of VLANs, and frames that pods
// sent, go to the host only.
func (s *share) addIn(list *rules) {
	list.addTagged()
	s.isMAC(list.begin("what pods send"), etherSource).Return()
	s.addToPods(list)
}

// addOut appends the rules for packets that the NIC sends. They come from the host, or from pods through the BPF
// program at the veth pair. The rules drop the host's ICMP redirects to pods. They send other frames for pods, and
// copies of multicast frames, into the veth pair. Frames of VLANs, and frames that pods sent, leave by the NIC only.
func (s *share) addOut(list *rules) {
	list.addTagged()
	s.isMAC(list.begin("what pods send"), etherSource).Return()
	for _, redirect := range []struct {
		family        string
		typ           uint16
		protocol, ofL byte
	}{
		{"IPv4", unix.ETH_P_IP, unix.IPPROTO_ICMP, icmpRedirect},
		{"IPv6", unix.ETH_P_IPV6, unix.IPPROTO_ICMPV6, redirectMessage},
	} {
		s.isMAC(list.begin("the host's redirects to pods that have it for their router, "+redirect.family),
			etherTarget).
			isEtherType(redirect.typ).isL4(redirect.protocol).firstByte(redirect.ofL, redirect.ofL).Drop()
	}

	s.addToPods(list)
}

// addToPods appends the rules that send frames for pods, and copies of multicast frames, into the veth pair.
func (s *share) addToPods(list *rules) {
	s.isMAC(list.begin("for a pod"), etherTarget).Forward(s.Outer)
	list.begin("for all").isEthernet().isMulticast().Duplicate(s.Outer)
}

// addTagged appends rules that end the chain for frames of a VLAN, so that these go their usual way. A tag with VLAN ID
// 0 contains only a priority, so it does not count.
func (list *rules) addTagged() {
	for _, tag := range []struct {
		comment string
		typ     uint16
	}{{"of a VLAN", unix.ETH_P_8021Q}, {"of a VLAN, by an outer tag", unix.ETH_P_8021AD}} {
		list.begin(tag.comment).isEthernet().isEtherType(tag.typ).
			load(expr.PayloadBaseLLHeader, vlanTag, 2).hasAny(vlanID).Return()
	}
}

// addGuard appends a rule that drops multicast frames that leave the bridge through the pair, unless a pod sent them.
// The chains at the NIC know only the MACs of pods. They would send a copy of any other sender's frame back to the
// bridge.
func (s *share) addGuard(list *rules) {
	list.begin("multicast of MACs that are no pod's").
		isEthernet().load(expr.PayloadBaseLLHeader, etherSource, EtherLen).isNotIn(ShareSet(s.bridge)).
		isMulticast().Drop()
}

// addMute appends a rule that drops multicast frames that the bridge passes to the host. The host receives the same
// frames through the NIC.
func (s *share) addMute(list *rules) {
	list.begin("what the host hears by " + s.NIC).isEthernet().isMulticast().Drop()
}

// addTrack appends rules that exclude packets between the host and pods from connection tracking in br_netfilter. The
// kernel already tracks these packets at the NIC.
func (s *share) addTrack(list *rules) {
	for _, way := range []struct {
		comment string
		offset  uint32
	}{{"the host sends", etherSource}, {"pods send to the host", etherTarget}} {
		list.begin("tracked at "+s.NIC+": what "+way.comment).
			isMeta(expr.MetaKeyIIFNAME, nftnl.LinkKey(s.bridge, nil, 0)).isEthernet().
			isAt(expr.PayloadBaseLLHeader, way.offset, s.MAC).Add(&expr.Notrack{})
	}
}

// addClosed appends rules for pods' packets that come in by the NIC. If a packet opens a connection to another
// program's bridge or veth link, they clear its mark. The chain forward, which runs before, does this only for
// packets from our bridges.
func (s *share) addClosed(list *rules) {
	for _, kind := range [...]string{"bridge", "veth"} {
		list.addFamilies("except what opens a connection to a "+kind+" of others", func(x expressions, f Family) {
			s.isPod(x, f, expr.MetaKeyIIFNAME, f.src).opens(kind, s.NIC).clearMark(s.mark)
		})
	}
}

// addUnmark appends rules that clear the mark bit of pods' packets that come in or go out by the NIC.
func (s *share) addUnmark(list *rules) {
	list.addFamilies("what pods send", func(x expressions, f Family) {
		s.isPod(x, f, expr.MetaKeyIIFNAME, f.src).clearMark(s.mark)
	})
	list.addFamilies("what pods receive", func(x expressions, f Family) {
		s.isPod(x, f, expr.MetaKeyOIFNAME, f.dst).clearMark(s.mark)
	})
}

// addAnswers appends rules that masquerade redirected packets from pods and to pods, since their answers would
// otherwise bypass the host. The bridge is connected to the LAN, so pods and LAN machines reach each other directly.
func (s *share) addAnswers(list *rules) {
	list.addFamilies("a pod answers past the host", func(x expressions, f Family) {
		s.isPod(x.isRedirected(), f, expr.MetaKeyOIFNAME, f.dst).masquerade()
	})
	list.addFamilies("a pod is answered past the host", func(x expressions, f Family) {
		s.isPod(x.isRedirected(), f, expr.MetaKeyOIFNAME, f.src).masquerade()
	})
}

// isMAC matches frames whose source or destination MAC belongs to a pod. offset selects the source or the
// destination.
func (s *share) isMAC(x expressions, offset uint32) expressions {
	return x.isEthernet().load(expr.PayloadBaseLLHeader, offset, EtherLen).isIn(ShareSet(s.bridge))
}

// isPod matches packets that come in or go out by the NIC and have a pod's address. link selects the incoming or the
// outgoing link, and offset the source or the destination.
func (s *share) isPod(x expressions, f Family, link expr.MetaKey, offset uint32) expressions {
	return x.isMeta(link, nftnl.LinkKey(s.NIC, nil, 0)).isPod(f, link, offset)
}

// isMulticast matches frames to a multicast or broadcast MAC.
func (x expressions) isMulticast() expressions {
	group := []byte{1, 0, 0, 0, 0, 0}
	x.load(expr.PayloadBaseLLHeader, etherTarget, EtherLen).Mask(group, nil)
	return x.compare(expr.CmpOpEq, group)
}

// RemoveShare deletes the chains and sets of a bridge's Share from the table. It deletes the whole table of family
// netdev if that table contains no other objects.
func (inv *Inventory) RemoveShare(t *Transaction, bridge string) {
	others := func(at Place) bool { return !ofShare(at, bridge) }
	if inv.family == unix.NFPROTO_NETDEV && inv.Table &&
		!slices.ContainsFunc(slices.Concat(inv.chains, inv.sets), others) {
		t.delTable(inv.family)
		return
	}

	inv.remove(t, func(at Place) bool { return ofShare(at, bridge) })
}
