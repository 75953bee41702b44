package keeper

import (
	"context"
	"encoding/binary"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// The kernel announces changes of links, addresses and routes to the keeper (rtnetlink(7)). It
// waits for a burst to end, looks at the bridges of networks with pods, their addresses and
// routes, and the pods' ports, and has put right what is not as the records have it. The
// announcements do not say who did it. So those that pods cause which come and go are told by
// what they are about: they have the keeper look a little later, as a look reads all records.

// lookAtLinks is how often it is looked at without news: parameters of the kernel (sysctl)
// tell nothing.
const lookAtLinks = time.Minute

// Links is what the keeper looks after links, addresses and routes by.
type Links interface {
	Look(context.Context) (*Seen, error)
	// Repair puts networks right.
	Repair(ctx context.Context, networks []string) error
}

// Seen is what a look has seen.
type Seen struct {
	Bridges, Ports []int               // the indexes of those of networks with pods
	Lacking        map[string][]string // what is not as it should be, by network
}

// linkage looks after them.
type linkage struct {
	vigil[changes] // with a restraint for each network
	look           Links
	bridges        map[int]linkFacts // by index; the facts are empty until they are announced
	ports          map[int]bool      // ports of pods that were seen
	// remains is what putting a network right did not help against: it is told once, and is no
	// news as long as nothing else is lacking there.
	remains map[string][]string
}

// changes are what a datagram of announcements tells.
type changes struct {
	lost    bool // something was; the rest says nothing
	links   []linkChange
	ports   []int // links whose flags as ports have changed
	touched []int // links that an address or a route of went
}

type linkChange struct {
	news
	bridge bool // the link is one
	ours   bool // it has an alias of ours
}

// keepLinks looks after them until ctx is done.
func (k *Keeper) keepLinks(ctx context.Context) {
	k.newLinkage(ctx, k.links, func() (source, error) {
		return nl.FollowOnly(unix.NETLINK_ROUTE, &nl.Config{NetNS: k.host}, linkKinds(), unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
			unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
	}).run()
}

// linkKinds are the announcements that matter. Of routes, those to subnets do that the kernel makes
// with addresses: a routing engine adds and withdraws its own by the ten thousand.
func linkKinds() []nl.Kind {
	const protocolAt = 5 // in struct rtmsg
	return []nl.Kind{
		{Type: unix.RTM_NEWLINK}, {Type: unix.RTM_DELLINK}, {Type: unix.RTM_DELADDR},
		{Type: unix.RTM_DELROUTE, At: protocolAt, Byte: unix.RTPROT_KERNEL},
	}
}

func (k *Keeper) newLinkage(ctx context.Context, look Links, listen func() (source, error)) *linkage {
	l := &linkage{look: look, bridges: map[int]linkFacts{}, ports: map[int]bool{}, remains: map[string][]string{}}
	l.vigil = vigil[changes]{Keeper: k, ctx: ctx, listen: listen, read: changesOf, lost: changes{lost: true}, when: l.when, visit: l.visit,
		trouble: l.linkTrouble, subject: "links", restraints: restraints{}}
	return l
}

// changesOf reads announcements. A message that does not parse counts as lost.
func changesOf(messages []netlink.Message) (c changes, some bool) {
	for _, m := range messages {
		switch m.Header.Type {
		case unix.RTM_NEWLINK, unix.RTM_DELLINK:
			var k link.Link
			if err := k.Decode(m.Data, unix.IFLA_IFNAME, unix.IFLA_MASTER, unix.IFLA_MTU, unix.IFLA_ADDRESS, unix.IFLA_IFALIAS, unix.IFLA_LINKINFO); err != nil {
				c.lost = true
				continue
			}
			if k.Family == unix.AF_BRIDGE {
				c.ports = append(c.ports, k.Index)
				continue
			}
			c.links = append(c.links, linkChange{
				news: news{index: k.Index, gone: m.Header.Type == unix.RTM_DELLINK, facts: &linkFacts{
					name: k.Name, master: k.Master, mtu: k.MTU, mac: string(k.MAC), up: k.Up()}},
				bridge: k.Kind == "bridge", ours: strings.HasPrefix(k.Alias, "tombolo:"),
			})
		case unix.RTM_DELADDR:
			// struct ifaddrmsg
			if len(m.Data) < unix.SizeofIfAddrmsg {
				c.lost = true
				continue
			}
			c.touched = append(c.touched, int(int32(binary.NativeEndian.Uint32(m.Data[4:]))))
		case unix.RTM_DELROUTE:
			index, err := routeLink(m.Data)
			if err != nil {
				c.lost = true
			} else if index != 0 {
				c.touched = append(c.touched, index)
			}
		}
	}
	return c, c.lost || len(c.links)+len(c.ports)+len(c.touched) > 0
}

// routeLink reads where a route leads (struct rtmsg, RTA_OIF).
func routeLink(b []byte) (index int, _ error) {
	if len(b) < unix.SizeofRtMsg {
		return 0, nl.ErrMalformed
	}
	err := nl.Decode(b[unix.SizeofRtMsg:], func(ad *netlink.AttributeDecoder) error {
		if ad.Type() == unix.RTA_OIF {
			index = int(int32(ad.Uint32()))
		}
		return nil
	})
	return index, err
}

// when says how soon links are to be compared: soon after changes that no pod causes, and later after those
// that come and go with pods.
func (l *linkage) when(c changes) urgency {
	when := never
	if c.lost {
		when = soon
	}
	for _, n := range c.links {
		when = max(when, l.linkNews(n))
	}
	for _, index := range c.ports {
		if l.ports[index] {
			when = max(when, later)
		}
	}
	for _, index := range c.touched {
		if _, known := l.bridges[index]; known {
			when = soon
		}
	}
	return when
}

// linkNews says when a link's news have links looked at.
func (l *linkage) linkNews(n linkChange) urgency {
	if before, ok := l.bridges[n.index]; ok {
		if n.gone {
			delete(l.bridges, n.index)
			return soon
		}
		l.bridges[n.index] = *n.facts
		switch before {
		case linkFacts{}:
			return later
		case *n.facts:
			return never
		}
		return soon
	}
	switch {
	case n.bridge:
		return later // it may be one that was deleted and made anew by somebody
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

// visit looks at them, and has put right the networks that nobody fights over.
func (l *linkage) visit() {
	l.due = now().Add(lookAtLinks)
	ctx, cancel := context.WithTimeout(l.ctx, lookAtLinks)
	defer cancel()
	lacking, ok := l.lookAgain(ctx)
	if !ok {
		return
	}
	networks := l.toMend(lacking)
	if len(networks) == 0 {
		return
	}
	for _, name := range networks {
		l.log.Warn("somebody has changed links, addresses or routes that pods need: putting it right", "network", name, "what", strings.Join(lacking[name], "; "))
		l.metrics.drifted(len(lacking[name]))
	}
	if err := l.look.Repair(ctx, networks); err != nil {
		l.linkTrouble("cannot put all links right", err)
		l.due = now().Add(again)
	}
	after, ok := l.lookAgain(ctx)
	if !ok {
		return
	}
	for _, name := range networks {
		l.mended(name, lacking[name], after[name])
	}
}

// toMend lists the networks that are to be put right now, by what they lack.
func (l *linkage) toMend(lacking map[string][]string) (networks []string) {
	maps.DeleteFunc(l.remains, func(name string, _ []string) bool { return len(lacking[name]) == 0 })
	for name, r := range l.restraints {
		if len(lacking[name]) > 0 || now().Before(r.until) {
			continue
		}
		if r.calm() {
			l.log.Info("links and addresses of pods' networks are left alone again", "network", name)
		}
		if !r.recently() {
			delete(l.restraints, name)
		}
	}
	l.metrics.linksAreContested(l.contested())
	for _, name := range slices.Sorted(maps.Keys(lacking)) {
		switch until := l.of(name).until; {
		case len(lacking[name]) == 0, slices.Equal(lacking[name], l.remains[name]):
			// Nothing is to be done, or it is known that it does not help.
		case now().Before(until):
			l.due = earliest(l.due, until)
		default:
			networks = append(networks, name)
		}
	}
	return networks
}

// mended takes down what came of putting a network right.
func (l *linkage) mended(name string, before, after []string) {
	if l.remains[name] = after; len(after) > 0 {
		l.log.Error("repairing has not put right what pods need", "network", name, "what", strings.Join(after, "; "))
	}
	if len(after) >= len(before) {
		return
	}
	l.metrics.mended(len(before) - len(after))
	contested, was := l.of(name).putRight()
	if !contested {
		return
	}
	if !was {
		l.log.Error("another program changes links, addresses or routes that pods need: putting them right only once a minute",
			"network", name, "what", strings.Join(before, "; "), "remedy", "have that program (NetworkManager, systemd-networkd, a script) leave these bridges and ports alone")
	}
	l.due = earliest(l.due, l.of(name).until)
	l.metrics.linksAreContested(true)
}

// lookAgain looks, and learns which bridges to listen for.
func (l *linkage) lookAgain(ctx context.Context) (lacking map[string][]string, ok bool) {
	seen, err := l.look.Look(ctx)
	l.metrics.count(&l.metrics.linkLooks) // as in firewall.visit
	if err != nil {
		l.linkTrouble("cannot look at links", err)
		l.due = now().Add(again)
		return nil, false
	}
	for _, index := range seen.Bridges {
		if _, ok := l.bridges[index]; !ok {
			l.bridges[index] = linkFacts{}
		}
	}
	maps.DeleteFunc(l.bridges, func(index int, _ linkFacts) bool { return !slices.Contains(seen.Bridges, index) })
	clear(l.ports)
	for _, index := range seen.Ports {
		l.ports[index] = true
	}
	return seen.Lacking, true
}

// linkTrouble reports what went wrong.
func (l *linkage) linkTrouble(what string, err error) {
	l.metrics.count(&l.metrics.linkErrors)
	l.log.Warn(what, "err", err)
}
