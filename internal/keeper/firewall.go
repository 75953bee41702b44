package keeper

import (
	"context"
	"encoding/binary"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// The kernel announces every change of nf_tables to the keeper by the one message that ends
// each transaction (NFT_MSG_NEWGEN): the messages about rules and elements are not queued for it,
// since a thousand of them in a burst would overflow its socket. It waits for a burst to end,
// looks at what an ADD would look at, and has it put right. A change of our own is known by its
// generation: what was found right at a generation is not looked at again, and verbs of the
// plugin leave theirs in their note.
//
// What is undone again and again is repaired only once a minute (restraint), written down
// for STATUS, and counted.

// lookAtFirewall is how often it is looked at without news: legacy tables and a table
// that falls asleep tell nothing.
const lookAtFirewall = 30 * time.Second

// Firewall is what the keeper looks after the firewall by.
type Firewall interface {
	// Look gives what is not as it should be, and the generation at which that was seen.
	Look(context.Context) (generation uint32, lacking []string, _ error)
	// Obstacles gives what stops pods and cannot be put right.
	Obstacles(context.Context) ([]string, error)
}

// generation is an announcement: nf_tables has changed.
type generation struct {
	lost bool // there were more than could be queued; the rest says nothing
	id   uint32
	by   string // the process, as it calls itself
}

// firewall looks after it.
type firewall struct {
	vigil[[]generation]
	look    Firewall
	fought  *restraint // for all of it
	known   uint32     // the generation at which all was right
	by      string
	blocked []string  // obstacles, as last told
	sought  time.Time // when they were looked for
}

// keepFirewall looks after it until ctx is done.
func (k *Keeper) keepFirewall(ctx context.Context) {
	k.newFirewall(ctx, k.firewall, func() (source, error) {
		return nl.FollowOnly(unix.NETLINK_NETFILTER, &nl.Config{NetNS: k.host}, []nl.Kind{{Type: newGeneration}}, unix.NFNLGRP_NFTABLES)
	}).run()
}

func (k *Keeper) newFirewall(ctx context.Context, look Firewall, listen func() (source, error)) *firewall {
	f := &firewall{look: look}
	f.vigil = vigil[[]generation]{Keeper: k, ctx: ctx, listen: listen, read: generationsOf, lost: []generation{{lost: true}}, when: f.when, visit: f.visit,
		trouble: f.firewallTrouble, subject: "the firewall", restraints: restraints{}}
	f.fought = f.of("")
	return f
}

const newGeneration = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN

func (f *firewall) run() {
	// What an earlier keeper wrote down is over.
	f.writeContested(nil)
	f.vigil.run()
}

// generationsOf reads announcements.
func generationsOf(messages []netlink.Message) (list []generation, some bool) {
	for _, m := range messages {
		if m.Header.Type == newGeneration {
			list = append(list, generationOf(m.Data))
		}
	}
	return list, len(list) > 0
}

// generationOf reads a struct nfgenmsg and the attributes NFTA_GEN_*. What does not parse is
// as good as lost.
func generationOf(b []byte) generation {
	const header = 4
	if len(b) < header {
		return generation{lost: true}
	}
	g := generation{}
	err := nl.Decode(b[header:], func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case unix.NFTA_GEN_ID:
			ad.ByteOrder = binary.BigEndian
			g.id = ad.Uint32()
		case unix.NFTA_GEN_PROC_NAME:
			g.by = ad.String()
		}
		return nil
	})
	g.lost = err != nil || g.id == 0
	return g
}

// isOurs says that a process is called like a program of ours.
func (g *generation) isOurs() bool { return g.by == "tombolo" || g.by == "tombolod" }

// when says how soon the firewall is to be compared after these announcements: soon if another program changed
// it since the last comparison, later if one of ours did, and never if no change is newer than that.
func (f *firewall) when(list []generation) urgency {
	when := never
	for _, g := range list {
		switch {
		case !g.lost && int32(g.id-f.known) <= 0 && f.known != 0:
			// The firewall was compared after this change.
		case g.by == nftnl.DoctorName:
			// Its table is its own, and goes with it.
		case g.lost || !g.isOurs():
			when, f.by = soon, g.by
		default:
			when = max(when, later)
		}
	}
	return when
}

// visit looks at it, and has it put right.
func (f *firewall) visit() {
	if f.due = now().Add(lookAtFirewall); now().Before(f.fought.until) {
		f.due = f.fought.until
		return
	}
	ctx, cancel := context.WithTimeout(f.ctx, lookAtFirewall)
	defer cancel()
	at, lacking, err := f.look.Look(ctx)
	f.metrics.count(&f.metrics.firewallLooks) // who waits for it may change the firewall then
	if err != nil {
		f.firewallTrouble("cannot look at the firewall", err)
		return
	}
	if len(lacking) == 0 {
		f.known = at
		f.allRight()
		if now().Sub(f.sought) >= lookAtFirewall {
			f.sought = now()
			f.obstacles(ctx) // it reads whole tables
		}
		return
	}
	f.mend(ctx, strings.Join(lacking, "; "))
}

// mend has the networks repaired.
func (f *firewall) mend(ctx context.Context, what string) {
	f.log.Warn("somebody has changed what pods need of the firewall: putting it right", "what", what, "by", f.by)
	if err := f.repair(ctx); err != nil {
		// An obstacle is an error as well, and what could be put right, is.
		f.firewallTrouble("cannot put all of the firewall right", err)
		f.due = now().Add(again)
	}
	f.metrics.count(&f.metrics.firewallMends)
	if f.known == 0 && f.by == "" {
		return // it was so when the keeper began: nobody has undone anything
	}
	contested, before := f.fought.putRight()
	if !contested {
		return
	}
	if !before {
		f.metrics.count(&f.metrics.firewallContests)
		f.log.Error("another program undoes what pods need of the firewall: putting it right only once a minute",
			"what", what, "by", f.by, "remedy", "have that program leave the table inet tombolo and the rule \"tombolo: …\" in FORWARD alone")
	}
	f.due = f.fought.until
	f.metrics.firewallIsContested(true)
	f.writeContested(&state.Contested{At: now(), Times: f.fought.times, What: what, By: f.by})
}

// allRight is told that it is.
func (f *firewall) allRight() {
	if !f.fought.calm() {
		return
	}
	f.log.Info("what pods need of the firewall is left alone again")
	f.metrics.firewallIsContested(false)
	f.writeContested(nil)
}

// obstacles logs those that come and go.
func (f *firewall) obstacles(ctx context.Context) {
	list, err := f.look.Obstacles(ctx)
	if err != nil {
		f.firewallTrouble("cannot look for what stops pods", err)
		return
	}
	if !slices.Equal(list, f.blocked) {
		for _, o := range list {
			f.log.Error("a firewall stops pods", "what", o)
		}
		if len(list) == 0 {
			f.log.Info("no firewall stops pods any more")
		}
	}
	f.blocked = list
	f.metrics.firewallObstaclesAre(len(list))
}

func (f *firewall) writeContested(c *state.Contested) {
	if err := f.state.SetContested(c); err != nil {
		f.firewallTrouble("cannot tell STATUS of the firewall", err)
	}
}

// firewallTrouble reports what went wrong.
func (f *firewall) firewallTrouble(what string, err error) {
	f.metrics.count(&f.metrics.firewallErrors)
	f.log.Warn(what, "err", err)
}
