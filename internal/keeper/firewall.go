package keeper

import (
	"cmp"
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

// At the end of each transaction of nf_tables, the kernel announces a new generation (NFT_MSG_NEWGEN). A filter keeps
// the messages about rules and elements out of the socket's queue, since a burst of a thousand would overflow it.
// Generations have numbers. If a comparison finds no differences, the keeper ignores the announcements of the compared
// generation and of earlier ones.

// lookAtFirewall is the interval between comparisons of the firewall with the records, if the kernel announces no
// changes. The kernel does not announce changes of legacy iptables.
const lookAtFirewall = 30 * time.Second

// firewall is the source (see source) that compares nf_tables with the records, and repairs the rules of pods. Its
// methods run in the loop or in the source's worker.
type firewall struct {
	source
	contest    *contest  // the count of repairs of the whole firewall
	checked    uint32    // the last generation that had no differences
	names      []string  // up to two other programs that changed nf_tables after checked; "" is an unknown one
	strays     bool      // another program has changed nf_tables since lastSweep
	lastSweep  time.Time // the last search for elements of pods that no longer exist
	blocked    []string  // the obstacles that were logged last
	lastSearch time.Time // the last search for obstacles
}

func (k *Keeper) newFirewall(ctx context.Context) *firewall {
	f := &firewall{}
	listen := func() (feed, error) {
		return nl.FollowOnly(unix.NETLINK_NETFILTER, k.host, []nl.Kind{{Type: newGeneration}}, unix.NFNLGRP_NFTABLES)
	}
	f.source = source{Keeper: k, ctx: ctx, kind: "firewall", every: lookAtFirewall, listen: listen,
		hear: f.hear, look: f.visit, contests: map[string]*contest{}}
	f.contest = f.contestOver("")
	f.writeContested(nil) // an earlier keeper's record no longer applies
	return f
}

const newGeneration = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN

// hear returns how soon the keeper must compare the firewall after an announcement: soon if another program changed it
// or the message is malformed, later if one of our programs did. It ignores changes up to the generation f.checked, and
// those of `tombolo doctor`. It adds the other programs to f.names.
func (f *firewall) hear(m netlink.Message) urgency {
	if m.Header.Type != newGeneration {
		return never
	}

	// The data is a struct nfgenmsg and attributes NFTA_GEN_*.
	const header = 4
	attributes := m.Data[min(header, len(m.Data)):]
	id := nftnl.Number(nftnl.Find(attributes, unix.NFTA_GEN_ID)) // 0 if the message is malformed
	by := nftnl.Text(nftnl.Find(attributes, unix.NFTA_GEN_PROC_NAME))
	switch {
	case id != 0 && int32(id-f.checked) <= 0 && f.checked != 0:
		return never // the last comparison without differences came after this change
	case by == nftnl.DoctorName:
		return never // `tombolo doctor` changes only its own table, and deletes it afterwards
	case id != 0 && (by == "tombolo" || by == "tombolod"):
		return later
	}

	f.strays = true
	if !slices.Contains(f.names, by) && len(f.names) < 2 {
		f.names = append(f.names, by)
	}

	return soon
}

// visit compares the firewall with the records, and repairs it if anything is missing. While another program undoes its
// repairs (see contest), it does nothing until the next repair is due. If nothing is missing, it also looks for other
// programs' rules that drop packets of pods (foreign.Obstacle), and for set elements of pods that are gone.
func (f *firewall) visit(ctx context.Context) {
	if now().Before(f.contest.until) {
		f.wake = f.contest.until
		return
	}

	at, lacking, err := f.Node.Upkeep().Firewall(ctx)
	f.metrics.firewallLooks.Inc() // tests wait for this counter, and may change the firewall then
	if err != nil {
		f.reportError("cannot look at the firewall", err)
		return
	}

	if len(lacking) == 0 {
		f.checked, f.names = at, nil
		if f.contest.end() {
			f.Log.Info("other programs no longer change the rules that pods need")
			f.metrics.firewallContested.Set(0)
			f.writeContested(nil)
		}

		if now().Sub(f.lastSearch) >= lookAtFirewall {
			f.lastSearch = now()
			f.obstacles(ctx) // rarely, because obstacles reads whole tables
		}
		f.removeStrays(ctx)
		return
	}

	f.mend(ctx, strings.Join(lacking, "; "))
}

// removeStrays deletes the set elements and IFB links of pods that no longer exist. Another program may have loaded the
// elements from an old copy of a set. A comparison with the records does not find such elements, so removeStrays lists
// all elements. It does nothing unless another program has changed nf_tables, and runs at most once in lookAtFirewall.
func (f *firewall) removeStrays(ctx context.Context) {
	if !f.strays || now().Sub(f.lastSweep) < lookAtFirewall {
		return
	}

	f.strays, f.lastSweep = false, now()
	found, err := f.Node.Upkeep().RemoveStrays(ctx)
	if err != nil {
		f.reportError("cannot delete elements of pods that are gone", err)
	}
	if found {
		f.Log.Warn("deleted elements of pods that are gone, which another program may have loaded from a save")
	}
}

// findCause returns the name of the program that caused the firewall's differences, or "" if that is not certain. It is
// certain if only one other program has changed nf_tables since the firewall was right. The host's links and kernel
// parameters must not differ either.
func (f *firewall) findCause(ctx context.Context) string {
	links, err := f.Node.Upkeep().Links(ctx)
	if err != nil || len(links.Lacking) > 0 || len(f.names) != 1 {
		return ""
	}
	return f.names[0]
}

// mend logs the differences in what, and repairs the firewall. If another program undoes the repairs again and again,
// mend records this conflict for STATUS and the metrics.
func (f *firewall) mend(ctx context.Context, what string) {
	cause := f.findCause(ctx)
	args := []any{"what", what}
	if cause != "" {
		args = append(args, "by", cause)
	}
	f.Log.Warn("pods lack rules of the firewall: repairing them", args...)
	if err := f.Node.Repair(ctx); err != nil {
		// Continue after the error. Repair returns an error for obstacles too, although it repairs everything else.
		f.reportError("cannot repair all of the firewall", err)
		f.wake = now().Add(again)
	}

	f.metrics.firewallMends.Inc()
	if len(f.names) == 0 {
		return // no other program has changed nf_tables since it was right, or since the keeper began
	}

	current, begins := f.recordRepair("", what,
		"another program undoes rules that pods need: repairing them only once a minute",
		"by", cmp.Or(cause, "unknown"), "remedy", "have that program leave the table inet tombolo and the rule "+
			"\"tombolo: …\" in FORWARD alone")
	if begins {
		f.metrics.firewallContests.Inc()
	}

	if current.isContested() {
		f.metrics.firewallContested.Set(1)
		f.writeContested(&state.Contested{At: now(), Times: current.times, What: what, By: cause})
	}
}

// obstacles finds obstacles: rules and policies of other programs' firewalls that certainly stop packets of pods. It
// logs them if they have changed since the last call, and sets their metric.
func (f *firewall) obstacles(ctx context.Context) {
	obstacles, err := f.Node.Upkeep().Obstacles(ctx)
	if err != nil {
		f.reportError("cannot look for firewalls that stop pods", err)
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
		f.Log.Warn("firewalls that stop pods have changed", "obstacles", len(list), "what", strings.Join(list, "; "))
	}

	f.blocked = list
	f.metrics.firewallObstacles.Set(float64(len(list)))
}

func (f *firewall) writeContested(c *state.Contested) {
	if err := f.State.SetContested(c); err != nil {
		f.reportError("cannot record for STATUS who undoes repairs", err)
	}
}
