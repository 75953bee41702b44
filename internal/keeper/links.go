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
	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Announcements of links, addresses and routes (rtnetlink(7)) do not name the program that made the change. So the
// keeper decides by the changed object when to compare links with the records. It waits longer after changes that ADDs
// and DELs also make, since each comparison reads all records. The kernel announces changes of only a few kernel
// parameters (sysctl), such as forwarding. So the keeper also compares every minute.

// linkSource is the source (see source) that compares links, addresses and routes with the records, and repairs them.
type linkSource struct {
	source                // its contests are counted for each network
	firewall *source      // the source of the firewall, whose rules depend on the host's forwarding
	ports    map[int]bool // the indexes of pods' ports, which are the host's ends of their links
	services int          // the index of kube-ipvs0, or 0 if it does not exist
	// watched holds, by index, the bridges, the host's links in VLANs, the NICs of networks on a LAN, and the veth
	// pairs between bridges and shared NICs (package share). A value is zero until the link's first announcement. nics
	// maps the names of the NICs to their indexes, or to 0 if a NIC does not exist.
	watched map[int]linkFacts
	nics    map[string]int
	// remains maps a network to the differences that its last repair did not remove. The keeper does not repair and log
	// these differences again until they change.
	remains map[string][]string
}

// linkFacts holds the properties of a link that pods depend on. A change of them makes the keeper compare links.
type linkFacts struct {
	name        string
	master      int
	mtu         int
	mac         string
	up          bool
	promiscuous bool
	bridge      string // the settings of a bridge, as text; empty for other links
}

// factsOf returns the properties of a link that pods depend on.
func factsOf(l *link.Info) linkFacts {
	f := linkFacts{name: l.Name, master: l.Master, mtu: l.MTU, mac: string(l.MAC), up: l.Up(),
		promiscuous: l.Flags&unix.IFF_PROMISC != 0}
	if b := l.Bridge; b != nil {
		f.bridge = fact(b.NfCallIptables) + fact(b.NfCallIp6tables) + fact(b.VlanFiltering) + fact(b.FdbMaxLearned)
	}
	return f
}

// fact returns an optional value of the kernel as text, for comparisons, or "-" if p is nil.
func fact[T any](p *T) string {
	if p == nil {
		return "-"
	}
	return fmt.Sprint(" ", *p)
}

// linkKinds returns the types of announcements that the keeper subscribes to. The only routes among them are new
// default routes, and deleted routes that the kernel itself had added. A routing daemon may change tens of thousands of
// other routes, and the keeper does not need these announcements.
func linkKinds() []nl.Kind {
	const (
		lengthAt, protocolAt = 1, 5 // in struct rtmsg

		// netconfSize is the size in bytes of an announcement of one changed parameter: the header, struct netconfmsg,
		// and two attributes of eight bytes. A filter for this size leaves out the longer announcements of a new link's
		// parameters.
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
	l := &linkSource{firewall: firewall, ports: map[int]bool{}, remains: map[string][]string{}}
	listen := func() (feed, error) {
		return nl.FollowOnly(unix.NETLINK_ROUTE, k.host, linkKinds(), unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR,
			unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_NETCONF,
			unix.RTNLGRP_IPV6_NETCONF, unix.RTNLGRP_TC)
	}
	l.source = source{Keeper: k, ctx: ctx, kind: "links", every: time.Minute, listen: listen, hear: l.hear,
		look: l.visit, contests: map[string]*contest{}}
	return l
}

// hear returns how soon the keeper must compare links after a netlink notification. For a malformed one it returns
// soon. If a parameter such as forwarding has changed (RTM_NEWNETCONF), it also schedules a visit to the firewall.
func (l *linkSource) hear(m netlink.Message) urgency {
	const indexAt = 4 // in struct ifaddrmsg and struct tcmsg
	index, gone := 0, false
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		var k link.Info
		err := k.Decode(m.Data, unix.IFLA_IFNAME, unix.IFLA_MASTER, unix.IFLA_MTU, unix.IFLA_ADDRESS,
			unix.IFLA_IFALIAS, unix.IFLA_LINKINFO)
		switch {
		case err != nil:
			return soon
		case k.Family != unix.AF_BRIDGE:
			return l.linkUrgency(&k, m.Header.Type == unix.RTM_DELLINK)
		case l.ports[k.Index]: // a change of its settings as a bridge port
			return later
		}
		return never
	case unix.RTM_NEWROUTE:
		return later
	case unix.RTM_NEWNETCONF:
		l.firewall.receive(nil)
		return soon
	case unix.RTM_DELROUTE:
		if len(m.Data) < unix.SizeofRtMsg {
			return soon
		}
		if oif := nftnl.Find(m.Data[unix.SizeofRtMsg:], unix.RTA_OIF); len(oif) == 4 {
			index, gone = int(int32(binary.NativeEndian.Uint32(oif))), true
		}
	default:
		if len(m.Data) < indexAt+4 {
			return soon
		}
		index, gone = int(int32(binary.NativeEndian.Uint32(m.Data[indexAt:]))), m.Header.Type != unix.RTM_NEWADDR
	}

	isFilter := m.Header.Type == unix.RTM_DELTFILTER || m.Header.Type == unix.RTM_DELQDISC
	_, isWatched := l.watched[index]
	switch {
	case isWatched && gone:
		return soon
	case !isFilter && index != 0 && index == l.services:
		return later
	}
	return never
}

// linkUrgency returns how soon the keeper must compare links after a change or deletion of the link n. It also updates
// the sets of links and pods' ports to watch. If a NIC was renamed, it schedules a visit to the firewall, whose netdev
// chains contain the name.
func (l *linkSource) linkUrgency(n *link.Info, gone bool) urgency {
	before, isWatched := l.watched[n.Index]
	index, isNIC := l.nics[n.Name]
	if isWatched && !gone && !isNIC && slices.Contains(slices.Collect(maps.Values(l.nics)), n.Index) {
		l.firewall.receive(nil)
	}

	switch {
	case isNIC && n.Index != index:
		return soon
	case isWatched && gone:
		delete(l.watched, n.Index)
		return soon
	case isWatched:
		l.watched[n.Index] = factsOf(n)
		if before == l.watched[n.Index] {
			return never
		}
		return soon // also at the first announcement, since the properties before it are unknown
	}

	switch {
	case n.Name == link.ServiceLink && n.Index != l.services:
		return later
	case strings.HasPrefix(n.Alias, endpoint.ShareAlias):
		return soon // the veth pair of a shared NIC may be new: a comparison finds the NIC
	case n.Kind == "bridge":
		return later // another program may have deleted one of our bridges and created it again
	case !strings.HasPrefix(n.Alias, endpoint.AliasPrefix):
		return never
	}

	was, isPort := l.ports[n.Index], !gone && n.Master != 0 && n.Up()
	l.ports[n.Index] = isPort
	if was && !isPort && !gone {
		return soon
	}
	return later
}

// visit compares the links of the networks that have pods with the records, and repairs the networks that
// networksToMend selects. While another program undoes the repairs of a network (see contest), visit repairs it only
// once a minute.
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
		l.Log.Warn("another program has changed links, addresses or routes that pods need: repairing them", "network",
			name, "what", strings.Join(lacking[name], "; "))
		l.metrics.driftFound.Add(float64(len(lacking[name])))
	}

	if err := l.Node.Upkeep().Repair(ctx, networks); err != nil {
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

// networksToMend returns the networks to repair now. lacking maps each network to its differences. networksToMend
// leaves out a network whose next repair is not due, or whose differences are equal to those that its last repair left.
// It also ends the contests (see contest) over networks that have no differences when a repair is due again, and sets
// the Prometheus gauge tombolo_links_contested.
func (l *linkSource) networksToMend(lacking map[string][]string) (networks []string) {
	maps.DeleteFunc(l.remains, func(name string, _ []string) bool { return len(lacking[name]) == 0 })
	for name, r := range l.contests {
		if len(lacking[name]) > 0 || now().Before(r.until) {
			continue
		}
		if r.end() {
			l.Log.Info("other programs no longer change links and addresses of pods' networks", "network", name)
		}
		if !r.repairedRecently() {
			delete(l.contests, name)
		}
	}

	l.metrics.linksContested.Set(0)
	if l.anyContest((*contest).isContested) {
		l.metrics.linksContested.Set(1)
	}

	for _, name := range slices.Sorted(maps.Keys(lacking)) {
		switch until := l.contestOver(name).until; {
		case len(lacking[name]) == 0, slices.Equal(lacking[name], l.remains[name]):
			// Do not repair: nothing is missing, or the last repair did not help.
		case now().Before(until):
			l.wake = trace.Earliest(l.wake, until)
		default:
			networks = append(networks, name)
		}
	}

	return networks
}

// recordMend logs the differences that the repair of a network left. If the repair removed differences, it adds their
// number to the metrics, and the repair to the network's contest (see contest).
func (l *linkSource) recordMend(name string, before, after []string) {
	if l.remains[name] = after; len(after) > 0 {
		l.Log.Error("a repair did not restore all that pods need", "network", name, "what", strings.Join(after, "; "))
	}

	if len(after) >= len(before) {
		return
	}

	l.metrics.driftMended.Add(float64(len(before) - len(after)))
	const say = "another program changes links, addresses or routes that pods need: repairing them only once a " +
		"minute"
	current, _ := l.recordRepair(name, strings.Join(before, "; "), say, "network", name, "remedy",
		"have that program (NetworkManager, systemd-networkd, a script) leave these bridges and ports alone")
	if current.isContested() {
		l.metrics.linksContested.Set(1)
	}
}

// lookAgain returns the differences between the links and the records, by network. It updates the sets of bridges, NICs
// and pods' ports to watch. If it fails, it logs the error and schedules another visit, and ok is false.
func (l *linkSource) lookAgain(ctx context.Context) (lacking map[string][]string, ok bool) {
	seen, err := l.Node.Upkeep().Links(ctx)
	l.metrics.linkLooks.Inc() // tests wait for this counter, and may change links then
	if err != nil {
		l.reportError("cannot look at links", err)
		l.wake = now().Add(again)
		return nil, false
	}

	l.services, l.nics = seen.Services, seen.Uplinks
	watched := map[int]linkFacts{}
	for _, index := range slices.AppendSeq(slices.Concat(seen.Bridges, seen.Pairs), maps.Values(seen.Uplinks)) {
		watched[index] = l.watched[index]
	}

	delete(watched, 0) // the index of NICs that do not exist
	l.watched = watched
	clear(l.ports)
	for _, index := range seen.Ports {
		l.ports[index] = true
	}

	return seen.Lacking, true
}
