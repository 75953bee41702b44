package keeper

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// The kernel announces every change of nf_tables by the one message that ends each transaction (NFT_MSG_NEWGEN):
// the messages about rules and elements are not queued, since a thousand of them in a burst would overflow the
// socket. A change of our own is known by its generation: the keeper does not look again at a generation that it
// found right, and verbs of the plugin leave theirs in their note.

// lookAtFirewall is how often the keeper looks at the firewall without an announcement: the kernel announces
// neither changes of legacy tables nor a table that becomes dormant.
const lookAtFirewall = 30 * time.Second

// generation is an announcement: nf_tables has changed.
type generation struct {
	lost bool // there were more than could be queued; the rest says nothing
	id   uint32
	by   string // the process, as it calls itself
}

// firewall looks after it.
type firewall struct {
	source
	fought  *contest // over all of it
	known   uint32   // the generation at which all was right
	by      string
	strays  bool      // another program has changed nf_tables since swept
	swept   time.Time // when the firewall last looked for elements of pods that are gone
	blocked []string  // obstacles, as last told
	sought  time.Time // when they were looked for
}

func (k *Keeper) newFirewall(ctx context.Context) *firewall {
	f := &firewall{}
	f.source = source{Keeper: k, ctx: ctx, kind: "firewall", every: lookAtFirewall, listen: k.listenToFirewall, hear: f.hear, look: f.visit, contests: map[string]*contest{}}
	f.fought = f.of("")
	f.writeContested(nil) // what an earlier keeper wrote down is over
	return f
}

func (k *Keeper) listenToFirewall() (feed, error) {
	return nl.FollowOnly(unix.NETLINK_NETFILTER, k.host, []nl.Kind{{Type: newGeneration}}, unix.NFNLGRP_NFTABLES)
}

const newGeneration = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN

// generationOf reads a struct nfgenmsg and the attributes NFTA_GEN_*. A message that does not parse counts as lost.
func generationOf(b []byte) generation {
	const header = 4
	b = b[min(header, len(b)):]
	id := nftnl.Number(nftnl.Find(b, unix.NFTA_GEN_ID))
	return generation{lost: id == 0, id: id, by: nftnl.Text(nftnl.Find(b, unix.NFTA_GEN_PROC_NAME))}
}

// hear says how soon the firewall is to be compared after announcements: soon if another program changed
// it since the last comparison, later if one of ours did, and never if no change is newer than that.
func (f *firewall) hear(messages []netlink.Message) urgency {
	when := never
	for _, m := range messages {
		if m.Header.Type != newGeneration {
			continue
		}
		g := generationOf(m.Data)
		switch {
		case !g.lost && int32(g.id-f.known) <= 0 && f.known != 0:
			// The firewall was compared after this change.
		case g.by == nftnl.DoctorName:
			// Its table is its own, and goes with it.
		case g.lost || g.by != "tombolo" && g.by != "tombolod":
			when, f.by, f.strays = soon, g.by, true
		default:
			when = max(when, later)
		}
	}
	return when
}

// visit looks at it, and has it put right.
func (f *firewall) visit(ctx context.Context) {
	if now().Before(f.fought.until) {
		f.wake = f.fought.until
		return
	}
	at, lacking, err := f.network.Upkeep().Firewall(ctx)
	f.metrics.firewallLooks.Inc() // who waits for it may change the firewall then
	if err != nil {
		f.trouble("cannot look at the firewall", err)
		return
	}
	if len(lacking) == 0 {
		f.known = at
		f.allRight()
		if now().Sub(f.sought) >= lookAtFirewall {
			f.sought = now()
			f.obstacles(ctx) // it reads whole tables
		}
		f.removeStrays(ctx)
		return
	}
	f.mend(ctx, strings.Join(lacking, "; "))
}

// removeStrays deletes elements of pods that are gone, after another program may have loaded an older save of a set.
// Neither rules nor sentinels show those, and to find them takes a list of all elements.
func (f *firewall) removeStrays(ctx context.Context) {
	if !f.strays || now().Sub(f.swept) < lookAtFirewall {
		return
	}
	f.strays, f.swept = false, now()
	found, err := f.network.Upkeep().RemoveStrays(ctx)
	if err != nil {
		f.trouble("cannot delete elements of pods that are gone", err)
	}
	if found {
		f.log.Warn("deleted elements of pods that are gone, which another program may have loaded from a save", "by", f.by)
	}
}

// mend has the networks repaired.
func (f *firewall) mend(ctx context.Context, what string) {
	f.log.Warn("another program has changed rules that pods need: repairing them", "what", what, "by", f.by)
	if err := f.network.Repair(ctx); err != nil {
		// An obstacle is an error as well, and what could be put right, is.
		f.trouble("cannot repair all of the firewall", err)
		f.wake = now().Add(again)
	}
	f.metrics.firewallMends.Inc()
	if f.known == 0 && f.by == "" {
		return // it was so when the keeper began: no program has undone anything
	}
	fought, begins := f.putRight("", what, "another program undoes rules that pods need: repairing them only once a minute",
		"by", f.by, "remedy", "have that program leave the table inet tombolo and the rule \"tombolo: …\" in FORWARD alone")
	if begins {
		f.metrics.firewallContests.Inc()
	}
	if fought.contested() {
		f.metrics.firewallContested.Set(1)
		f.writeContested(&state.Contested{At: now(), Times: fought.times, What: what, By: f.by})
	}
}

// allRight is told that it is.
func (f *firewall) allRight() {
	if !f.fought.calm() {
		return
	}
	f.log.Info("other programs leave the rules that pods need alone again")
	f.metrics.firewallContested.Set(0)
	f.writeContested(nil)
}

// obstacles logs those that come and go.
func (f *firewall) obstacles(ctx context.Context) {
	obstacles, err := f.network.Upkeep().Obstacles(ctx)
	if err != nil {
		f.trouble("cannot look for what stops pods", err)
		return
	}
	var list []string
	for _, network := range slices.Sorted(maps.Keys(obstacles)) {
		for _, o := range obstacles[network] {
			if !o.Maybe {
				list = append(list, fmt.Sprintf("network %s: %s", network, o))
			}
		}
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
	f.metrics.firewallObstacles.Set(float64(len(list)))
}

func (f *firewall) writeContested(c *state.Contested) {
	if err := f.state.SetContested(c); err != nil {
		f.trouble("cannot tell STATUS of the firewall", err)
	}
}
