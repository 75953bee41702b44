package keeper

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Announcements of links, addresses and routes (rtnetlink(7)) do not name the program that made the change. So the
// keeper judges by the changed objects. After changes that ADDs and DELs also make, it waits a little longer, since
// each comparison reads all records. The kernel announces changes of only a few kernel parameters (sysctl), such as
// forwarding. So the keeper also compares every minute.

// linkSource is the source that compares links with the records, and repairs them.
type linkSource struct {
	source                     // with a contest for each network
	firewall *source           // its rules depend on the host's forwarding
	bridges  map[int]linkFacts // bridges by index; a value is empty until an announcement
	ports    map[int]bool      // known ports of pods
	services int               // the index of kube-ipvs0, or 0 if it does not exist
	// uplinks are the NICs of networks on a LAN, and the veth pairs that connect shared NICs with bridges, by index.
	// nics maps the names of the NICs to their indexes.
	uplinks map[int]linkFacts
	nics    map[string]int
	// remains maps a network to the differences that its last repair did not remove. The keeper does not repair and
	// log them again until they change.
	remains map[string][]string
}

// changes is the content of several announcements.
type changes struct {
	lost    bool // announcements were lost; the other fields are incomplete
	routing bool // a forwarding parameter has changed
	links   []linkChange
	ports   []int // links whose properties as ports have changed
	added   []int // links that got an address
	touched []int // links that lost an address or a route
	uplinks bool  // a default route was added
	filters []int // links that lost a filter or a queueing discipline
}

type linkChange struct {
	index  int
	gone   bool
	kind   string
	ours   bool // its alias is one of ours
	shares bool // it belongs to a pair that shares a NIC with a bridge
	facts  linkFacts
}

// linkFacts are the properties of a link that the keeper compares. The fields after promiscuous belong to a bridge.
type linkFacts struct {
	name        string
	master      int
	mtu         int
	mac         string
	up          bool
	promiscuous bool

	nfCall, nfCall6, vlanFiltering string
	maxLearned                     string
}

// bridgeFacts sets the facts that only a bridge has. For any other link it does nothing.
func (f *linkFacts) bridgeFacts(l *link.Info) {
	if b := l.Bridge; b != nil {
		f.nfCall, f.nfCall6, f.vlanFiltering = fact(b.NfCallIptables), fact(b.NfCallIp6tables), fact(b.VlanFiltering)
		f.maxLearned = fact(b.FdbMaxLearned)
	}
}

// fact returns an optional value of the kernel as text, for comparisons. nil becomes "".
func fact[T any](p *T) string {
	if p == nil {
		return ""
	}
	return fmt.Sprint(*p)
}

func (k *Keeper) listenToLinks() (feed, error) {
	return nl.FollowOnly(unix.NETLINK_ROUTE, k.host, linkKinds(), unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR,
		unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_NETCONF,
		unix.RTNLGRP_IPV6_NETCONF, unix.RTNLGRP_TC)
}

// linkKinds returns the types of announcements that the keeper receives. For routes it receives additions of default
// routes, and deletions of the routes that the kernel adds with addresses. A routing daemon may change other routes
// by the ten thousand.
func linkKinds() []nl.Kind {
	const (
		lengthAt, protocolAt = 1, 5 // in struct rtmsg

		// netconfSize is the size of an announcement of one changed parameter: the header, struct netconfmsg, and two
		// attributes of eight bytes. The announcement of a new link's parameters is longer.
		netconfSize = 16 + 4 + 2*8
	)

	return []nl.Kind{
		{Type: unix.RTM_NEWLINK}, {Type: unix.RTM_DELLINK}, {Type: unix.RTM_NEWADDR}, {Type: unix.RTM_DELADDR},
		{Type: unix.RTM_DELROUTE, At: protocolAt, Byte: unix.RTPROT_KERNEL},
		{Type: unix.RTM_NEWROUTE, At: lengthAt, Byte: 0}, // a default route, since the host may have another uplink now
		{Type: unix.RTM_NEWNETCONF, Size: netconfSize},
		{Type: unix.RTM_DELTFILTER}, {Type: unix.RTM_DELQDISC},
	}
}

func (k *Keeper) newLinkSource(ctx context.Context, firewall *source) *linkSource {
	l := &linkSource{firewall: firewall, bridges: map[int]linkFacts{}, ports: map[int]bool{},
		remains: map[string][]string{}}
	l.source = source{Keeper: k, ctx: ctx, kind: "links", every: time.Minute, listen: k.listenToLinks, hear: l.hear,
		look: l.visit, contests: map[string]*contest{}}
	return l
}

// changesOf parses announcements. A malformed message counts as lost.
func changesOf(messages []netlink.Message) (c changes) {
	for _, m := range messages {
		if err := c.add(m); err != nil {
			c.lost = true
		}
	}
	return c
}

func (c *changes) add(m netlink.Message) error {
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		var k link.Info
		if err := k.Decode(m.Data, unix.IFLA_IFNAME, unix.IFLA_MASTER, unix.IFLA_MTU, unix.IFLA_ADDRESS,
			unix.IFLA_IFALIAS, unix.IFLA_LINKINFO); err != nil {
			return err
		}

		if k.Family == unix.AF_BRIDGE {
			c.ports = append(c.ports, k.Index)
			return nil
		}

		change := linkChange{
			index: k.Index, gone: m.Header.Type == unix.RTM_DELLINK, kind: k.Kind,
			ours:   strings.HasPrefix(k.Alias, "tombolo:"),
			shares: strings.HasPrefix(k.Alias, endpoint.ShareAlias),
			facts: linkFacts{name: k.Name, master: k.Master, mtu: k.MTU, mac: string(k.MAC), up: k.Up(),
				promiscuous: k.Flags&unix.IFF_PROMISC != 0},
		}
		change.facts.bridgeFacts(&k)
		c.links = append(c.links, change)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		// The data begins with struct ifaddrmsg.
		if len(m.Data) < unix.SizeofIfAddrmsg {
			return nl.ErrMalformed
		}
		index := int(int32(binary.NativeEndian.Uint32(m.Data[4:])))
		if m.Header.Type == unix.RTM_NEWADDR {
			c.added = append(c.added, index)
		} else {
			c.touched = append(c.touched, index)
		}
	case unix.RTM_DELTFILTER, unix.RTM_DELQDISC:
		// The data begins with struct tcmsg.
		if len(m.Data) < 8 {
			return nl.ErrMalformed
		}
		c.filters = append(c.filters, int(int32(binary.NativeEndian.Uint32(m.Data[4:]))))
	case unix.RTM_NEWROUTE:
		c.uplinks = true
	case unix.RTM_NEWNETCONF:
		c.routing = true
	case unix.RTM_DELROUTE:
		index, err := routeLink(m.Data)
		if err == nil && index != 0 {
			c.touched = append(c.touched, index)
		}
		return err
	}

	return nil
}

// routeLink returns the index of a route's outgoing link (struct rtmsg, RTA_OIF), or 0 if it has none.
func routeLink(b []byte) (index int, _ error) {
	if len(b) < unix.SizeofRtMsg {
		return 0, nl.ErrMalformed
	}
	if oif := nftnl.Find(b[unix.SizeofRtMsg:], unix.RTA_OIF); len(oif) == 4 {
		index = int(int32(binary.NativeEndian.Uint32(oif)))
	}
	return index, nil
}

// hear returns the urgency of comparing links after announcements: soon after changes that no pod causes, later after
// changes that pods also cause when they come and go. If a forwarding parameter has changed, hear also schedules a
// look at the firewall.
func (l *linkSource) hear(messages []netlink.Message) urgency {
	c, when := changesOf(messages), never
	if c.lost || c.routing {
		when = soon
	}

	if c.routing {
		l.firewall.receive(nil)
	}

	for _, n := range c.links {
		when = max(when, l.linkUrgency(n))
	}

	isPort := func(index int) bool { return l.ports[index] }
	isServices := func(index int) bool { return index == l.services }
	isBridge := func(index int) bool { _, known := l.bridges[index]; return known }
	isUplink := func(index int) bool { _, known := l.uplinks[index]; return known }
	switch {
	case slices.ContainsFunc(c.touched, isBridge), slices.ContainsFunc(c.filters, isUplink):
		return soon
	case c.uplinks, slices.ContainsFunc(c.ports, isPort),
		slices.ContainsFunc(slices.Concat(c.touched, c.added), isServices):
		return max(when, later)
	}

	return when
}

// uplinkUrgency returns the urgency of comparing links after the change n. It handles the NICs of networks on a LAN,
// and the veth pairs that connect shared NICs with bridges. For other links it returns never. It records the link's
// new facts.
func (l *linkSource) uplinkUrgency(n linkChange) urgency {
	before, known := l.uplinks[n.index]
	index, isNIC := l.nics[n.facts.name]

	switch {
	case n.gone && known:
		delete(l.uplinks, n.index)
	case known:
		l.uplinks[n.index] = n.facts
		if !isNIC && slices.Contains(slices.Collect(maps.Values(l.nics)), n.index) {
			l.firewall.receive(nil) // the NIC was renamed: look at the firewall, whose netdev chains contain the name
		}
	}

	if known && (n.gone || before != n.facts) || isNIC && n.index != index {
		return soon
	}

	return never
}

// linkUrgency returns the urgency of comparing links after a change of the link n.
func (l *linkSource) linkUrgency(n linkChange) urgency {
	if when := l.uplinkUrgency(n); when != never {
		return when
	}

	if before, ok := l.bridges[n.index]; ok {
		if n.gone {
			delete(l.bridges, n.index)
			return soon
		}

		l.bridges[n.index] = n.facts
		if before == n.facts {
			return never
		}
		return soon // also at the first announcement, which may be of a change
	}

	switch {
	case n.facts.name == link.ServiceLink && n.index != l.services:
		return later
	case n.shares:
		return soon // look soon, to know the NIC
	case n.kind == "bridge":
		return later // another program may have deleted it and created it again
	case !n.ours:
		return never
	case n.gone:
		delete(l.ports, n.index)
		return later
	case n.facts.master == 0 || !n.facts.up:
		was := l.ports[n.index]
		delete(l.ports, n.index)
		if was {
			return soon
		}
		return later
	}

	l.ports[n.index] = true
	return later
}

// visit compares the links of all networks with the records, and repairs the networks with differences. It repairs
// contested networks less often.
func (l *linkSource) visit(ctx context.Context) {
	lacking, ok := l.lookAgain(ctx)
	if !ok {
		return
	}

	networks := l.networksToMend(lacking)
	if len(networks) == 0 {
		return
	}

	for _, name := range networks {
		l.log.Warn("another program has changed links, addresses or routes that pods need: repairing them", "network",
			name, "what", strings.Join(lacking[name], "; "))
		l.metrics.driftFound.Add(float64(len(lacking[name])))
	}

	if err := l.network.Upkeep().Repair(ctx, networks); err != nil {
		l.reportError("cannot repair all links", err)
		l.wake = now().Add(again)
	}

	after, ok := l.lookAgain(ctx)
	if !ok {
		return
	}

	for _, name := range networks {
		l.recordMend(name, lacking[name], after[name])
	}
}

// networksToMend returns the networks to repair now. lacking maps each network to its differences. networksToMend also
// ends contests over networks without differences.
func (l *linkSource) networksToMend(lacking map[string][]string) (networks []string) {
	maps.DeleteFunc(l.remains, func(name string, _ []string) bool { return len(lacking[name]) == 0 })
	for name, r := range l.contests {
		if len(lacking[name]) > 0 || now().Before(r.until) {
			continue
		}
		if r.end() {
			l.log.Info("links and addresses of pods' networks are left alone again", "network", name)
		}
		if !r.repairedRecently() {
			delete(l.contests, name)
		}
	}

	l.metrics.linksContested.Set(boolValue(l.anyContest((*contest).isContested)))
	for _, name := range slices.Sorted(maps.Keys(lacking)) {
		switch until := l.contestOver(name).until; {
		case len(lacking[name]) == 0, slices.Equal(lacking[name], l.remains[name]):
			// Do not repair: nothing is missing, or the last repair did not help.
		case now().Before(until):
			l.wake = earliest(l.wake, until)
		default:
			networks = append(networks, name)
		}
	}

	return networks
}

// recordMend logs the differences that the repair of a network left, and counts the differences that it removed. It
// records the repair for the network's contest.
func (l *linkSource) recordMend(name string, before, after []string) {
	if l.remains[name] = after; len(after) > 0 {
		l.log.Error("a repair did not restore all that pods need", "network", name, "what", strings.Join(after, "; "))
	}

	if len(after) >= len(before) {
		return
	}

	l.metrics.driftMended.Add(float64(len(before) - len(after)))
	const say = "another program changes links, addresses or routes that pods need: putting them right only once a " +
		"minute"
	current, _ := l.recordRepair(name, strings.Join(before, "; "), say, "network", name, "remedy",
		"have that program (NetworkManager, systemd-networkd, a script) leave these bridges and ports alone")
	if current.isContested() {
		l.metrics.linksContested.Set(1)
	}
}

// lookAgain returns the differences of all networks' links. It updates the sets of bridges, NICs and ports to watch.
// If it fails, it logs the error and schedules another look, and ok is false.
func (l *linkSource) lookAgain(ctx context.Context) (lacking map[string][]string, ok bool) {
	seen, err := l.network.Upkeep().Links(ctx)
	l.metrics.linkLooks.Inc() // see firewall.visit
	if err != nil {
		l.reportError("cannot look at links", err)
		l.wake = now().Add(again)
		return nil, false
	}

	for _, index := range seen.Bridges {
		if _, ok := l.bridges[index]; !ok {
			l.bridges[index] = linkFacts{}
		}
	}

	maps.DeleteFunc(l.bridges, func(index int, _ linkFacts) bool { return !slices.Contains(seen.Bridges, index) })
	l.services, l.nics = seen.Services, seen.Uplinks
	watched := map[int]linkFacts{}
	for _, index := range slices.AppendSeq(slices.Clone(seen.Pairs), maps.Values(seen.Uplinks)) {
		watched[index] = l.uplinks[index]
	}

	delete(watched, 0) // the index of NICs that do not exist
	l.uplinks = watched
	clear(l.ports)
	for _, index := range seen.Ports {
		l.ports[index] = true
	}

	return seen.Lacking, true
}
