package keeper

import (
	"context"
	"encoding/binary"
	"errors"
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

const (
	// A change is looked at when there was none for the first of these, and after the second
	// at the latest.
	pauseLinks = 200 * time.Millisecond
	urgeLinks  = 700 * time.Millisecond

	// pausePorts is the same for ports of pods, which come and go.
	pausePorts = 3 * time.Second

	// lookAtLinks is how often it is looked at without news: parameters of the kernel
	// (sysctl) tell nothing.
	lookAtLinks = time.Minute

	// againLinks is when what failed is tried again.
	againLinks = 10 * time.Second
)

// Links is what the keeper looks after links, addresses and routes by.
type Links interface {
	Look(context.Context) (*Seen, error)
}

// Seen is what a look has seen.
type Seen struct {
	Bridges, Ports []int    // the indexes of those of networks with pods
	Lacking        []string // what is not as it should be
}

// linkage looks after them.
type linkage struct {
	*Keeper
	ctx    context.Context
	look   Links
	listen func() (source, error)

	heard   chan changes
	bridges map[int]linkFacts // by index; the facts are empty until they are announced
	ports   map[int]bool      // ports of pods that were seen
	due     time.Time
	first   time.Time // of the news that wait; zero: none do
	restraint
	// remains is what putting right did not help against: it is told once, and is no news
	// as long as nothing else is lacking.
	remains []string
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
	l := &linkage{Keeper: k, ctx: ctx, look: k.links, listen: func() (source, error) {
		return nl.Follow(unix.NETLINK_ROUTE, &nl.Config{NetNS: k.host}, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
			unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
	}}
	l.run()
}

func (l *linkage) run() {
	l.heard, l.bridges, l.ports = make(chan changes, 64), map[int]linkFacts{}, map[int]bool{}
	stop := l.follow()
	defer stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for l.ctx.Err() == nil {
		if !l.due.After(now()) {
			l.visit()
		}
		timer.Reset(max(l.due.Sub(now()), 0))
		select {
		case <-l.ctx.Done():
		case <-timer.C:
		case c := <-l.heard:
			l.news(c)
		}
	}
}

// follow subscribes to changes until ctx is done. Without that, the looks that are made
// once in a while remain.
func (l *linkage) follow() (stop func()) {
	s, err := l.listen()
	if err != nil {
		l.linkTrouble("cannot hear of changes of links: looking once in a while", err)
		return func() {}
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			messages, err := s.Next()
			c := changesOf(messages)
			switch {
			case errors.Is(err, unix.ENOBUFS), errors.Is(err, nl.ErrMalformed):
				c = changes{lost: true}
			case err != nil:
				return // it is closed, or as good as that
			case len(c.links)+len(c.ports)+len(c.touched) == 0 && !c.lost:
				continue
			}
			select {
			case l.heard <- c:
			case <-l.ctx.Done():
				return
			}
		}
	}()
	return func() { _ = s.Close(); <-ended }
}

// changesOf reads announcements. A message that does not parse counts as lost.
func changesOf(messages []netlink.Message) changes {
	var c changes
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
	return c
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

// news has links looked at: soon for what pods do not cause, else later.
func (l *linkage) news(c changes) {
	soon, later := c.lost, false
	for _, n := range c.links {
		s, p := l.linkNews(n)
		soon, later = soon || s, later || p
	}
	for _, index := range c.ports {
		later = later || l.ports[index]
	}
	for _, index := range c.touched {
		_, known := l.bridges[index]
		soon = soon || known
	}
	var due time.Time
	switch {
	case soon:
		if l.first.IsZero() {
			l.first = now()
		}
		settle, urge := pauseLinks, urgeLinks
		if l.recently() {
			settle, urge = pauseAgain, urgeAgain
		}
		due = earliest(now().Add(settle), l.first.Add(urge))
	case later:
		if due = now().Add(pausePorts); !due.Before(l.due) {
			return
		}
	default:
		return
	}
	if l.due = due; due.Before(l.until) {
		l.due = l.until
	}
}

// linkNews says whether a link's news have links looked at soon, or as a port's.
func (l *linkage) linkNews(n linkChange) (soon, port bool) {
	if before, ok := l.bridges[n.index]; ok {
		if n.gone {
			delete(l.bridges, n.index)
			return true, false
		}
		l.bridges[n.index] = *n.facts
		return before != linkFacts{} && before != *n.facts, before == linkFacts{}
	}
	switch {
	case n.bridge:
		return false, true // it may be one that was deleted and made anew by somebody
	case !n.ours:
		return false, false
	case n.gone:
		delete(l.ports, n.index)
		return false, true
	case n.facts.master == 0 || !n.facts.up:
		was := l.ports[n.index]
		delete(l.ports, n.index)
		return was, true
	}
	l.ports[n.index] = true
	return false, true
}

// visit looks at them, and has them put right.
func (l *linkage) visit() {
	l.first = time.Time{}
	l.due = now().Add(lookAtLinks)
	if now().Before(l.until) {
		l.due = l.until
		return
	}
	ctx, cancel := context.WithTimeout(l.ctx, lookAtLinks)
	defer cancel()
	lacking, ok := l.lookAgain(ctx)
	switch {
	case !ok:
		return
	case len(lacking) == 0:
		if l.remains = nil; l.calm() {
			l.log.Info("links and addresses of pods' networks are left alone again")
			l.metrics.linksAreContested(false)
		}
		return
	case slices.Equal(lacking, l.remains):
		return // it is known that repairing does not help
	}
	what := strings.Join(lacking, "; ")
	l.log.Warn("somebody has changed links, addresses or routes that pods need: putting it right", "what", what)
	l.metrics.drifted(len(lacking))
	if err := l.repair(ctx); err != nil {
		l.linkTrouble("cannot put all links right", err)
		l.due = now().Add(againLinks)
	}
	after, ok := l.lookAgain(ctx)
	if !ok {
		return
	}
	if l.remains = after; len(after) > 0 {
		l.log.Error("repairing has not put right what pods need", "what", strings.Join(after, "; "))
	}
	if len(after) >= len(lacking) {
		return
	}
	l.metrics.mended(len(lacking) - len(after))
	contested, before := l.putRight()
	if !contested {
		return
	}
	if !before {
		l.log.Error("another program changes links, addresses or routes that pods need: putting them right once in a minute only",
			"what", what, "remedy", "have that program (NetworkManager, systemd-networkd, a script) leave these bridges and ports alone")
	}
	l.due = l.until
	l.metrics.linksAreContested(true)
}

// lookAgain looks, and learns which bridges to listen for.
func (l *linkage) lookAgain(ctx context.Context) (lacking []string, ok bool) {
	l.metrics.count(&l.metrics.linkLooks)
	seen, err := l.look.Look(ctx)
	if err != nil {
		l.linkTrouble("cannot look at links", err)
		l.due = now().Add(againLinks)
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
