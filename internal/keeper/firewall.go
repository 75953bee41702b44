package keeper

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

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
// What is undone again and again is repaired once in a minute only (restraint), written down
// for STATUS, and counted.

const (
	// A change is looked at when there was none for the first of these, and after the second
	// at the latest.
	pauseFirewall = 200 * time.Millisecond
	urgeFirewall  = 700 * time.Millisecond

	// The same if it was put right within the last minute. A reload of ufw runs a dozen programs
	// one after the other, and each undoes what is repaired before it. That is not on purpose;
	// pods need their rules when it is done.
	pauseAgain = 900 * time.Millisecond
	urgeAgain  = 5 * time.Second

	// pauseOwn is the same for changes by programs that are called like ours: pods that
	// come and go change nothing that is looked at. The name can be forged, so they are
	// looked at all the same.
	pauseOwn = 3 * time.Second

	// lookAtFirewall is how often it is looked at without news: legacy tables and a table
	// that falls asleep tell nothing.
	lookAtFirewall = 30 * time.Second

	// againFirewall is when what failed is tried again.
	againFirewall = 10 * time.Second
)

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
	*Keeper
	ctx    context.Context
	look   Firewall
	listen func() (source, error)

	heard chan generation
	due   time.Time
	first time.Time // of the news that wait; zero: none do
	known uint32    // the generation at which all was right
	by    string
	restraint
	blocked []string  // obstacles, as last told
	sought  time.Time // when they were looked for
}

// keepFirewall looks after it until ctx is done.
func (k *Keeper) keepFirewall(ctx context.Context) {
	f := &firewall{Keeper: k, ctx: ctx, look: k.firewall, heard: make(chan generation, 64), listen: func() (source, error) {
		return nl.FollowType(unix.NETLINK_NETFILTER, &nl.Config{NetNS: k.host}, newGeneration, unix.NFNLGRP_NFTABLES)
	}}
	f.run()
}

const newGeneration = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN

func (f *firewall) run() {
	stop := f.follow()
	defer stop()
	// What an earlier keeper wrote down is over.
	f.writeContested(nil)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for f.ctx.Err() == nil {
		if !f.due.After(now()) {
			f.visit()
		}
		timer.Reset(max(f.due.Sub(now()), 0))
		select {
		case <-f.ctx.Done():
		case <-timer.C:
		case g := <-f.heard:
			f.news(g)
		}
	}
}

// follow subscribes to changes until ctx is done. Without that, the looks that are made
// once in a while remain.
func (f *firewall) follow() (stop func()) {
	s, err := f.listen()
	if err != nil {
		f.firewallTrouble("cannot hear of changes of the firewall: looking once in a while", err)
		return func() {}
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			messages, err := s.Next()
			switch {
			case errors.Is(err, unix.ENOBUFS):
				f.tell(generation{lost: true})
			case errors.Is(err, nl.ErrMalformed):
				f.tell(generation{lost: true})
			case err != nil:
				return // it is closed, or as good as that
			}
			for _, m := range messages {
				if m.Header.Type == newGeneration {
					f.tell(generationOf(m.Data))
				}
			}
		}
	}()
	return func() { _ = s.Close(); <-ended }
}

// tell never waits: where news wait already, more of them change nothing.
func (f *firewall) tell(g generation) {
	select {
	case f.heard <- g:
	default:
	}
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

// news has the firewall looked at.
func (f *firewall) news(g generation) {
	if !g.lost && int32(g.id-f.known) <= 0 && f.known != 0 {
		return // it was looked at since
	}
	due := now().Add(pauseOwn)
	if g.lost || !g.isOurs() {
		if f.first.IsZero() {
			f.first = now()
		}
		f.by = g.by
		settle, urge := pauseFirewall, urgeFirewall
		if f.recently() {
			settle, urge = pauseAgain, urgeAgain
		}
		due = earliest(now().Add(settle), f.first.Add(urge))
	} else if !due.Before(f.due) {
		return
	}
	if f.due = due; due.Before(f.until) {
		f.due = f.until
	}
}

// visit looks at it, and has it put right.
func (f *firewall) visit() {
	f.first = time.Time{}
	f.due = now().Add(lookAtFirewall)
	if f.due.Before(f.until) {
		f.due = f.until
	}
	if now().Before(f.until) {
		return
	}
	ctx, cancel := context.WithTimeout(f.ctx, lookAtFirewall)
	defer cancel()
	f.metrics.count(&f.metrics.firewallLooks)
	at, lacking, err := f.look.Look(ctx)
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
		f.due = now().Add(againFirewall)
	}
	f.metrics.count(&f.metrics.firewallMends)
	if f.known == 0 && f.by == "" {
		return // it was so when the keeper began: nobody has undone anything
	}
	contested, before := f.putRight()
	if !contested {
		return
	}
	if !before {
		f.metrics.count(&f.metrics.firewallContests)
		f.log.Error("another program undoes what pods need of the firewall: putting it right once in a minute only",
			"what", what, "by", f.by, "remedy", "have that program leave the table inet tombolo and the rule \"tombolo: …\" in FORWARD alone")
	}
	f.due = f.until
	f.metrics.firewallIsContested(true)
	f.writeContested(&state.Contested{At: now(), Times: f.times, What: what, By: f.by})
}

// allRight is told that it is.
func (f *firewall) allRight() {
	if !f.calm() {
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
