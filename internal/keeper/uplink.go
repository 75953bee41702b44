package keeper

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/network"
)

// Network managers put their addresses back on the NIC, or take it out of the bridge, when they are restarted. The
// keeper undoes that, but no change that the host's lease or its administrator makes on the bridge: pods follow it,
// and the takeover's record after them; until then, the next keeper sees by the record that there is something to
// do.

// mendWithin is how long the locks of an uplink are waited for, and its router.
const mendWithin = 30 * time.Second

// uplinks looks after all of them.
type uplinks struct {
	source // with a contest over each NIC
	all    map[string]*taken
}

// taken is what is known of a NIC that is taken over.
type taken struct {
	network.UplinkReport
	links    [2]int // the indexes of NIC and bridge; 0 if they are not there
	carrier  bool
	halfway  bool // it was seen to be neither taken nor given back
	failures int  // in a row
}

func (k *Keeper) newUplinks(ctx context.Context) *uplinks {
	u := &uplinks{all: map[string]*taken{}}
	u.source = source{Keeper: k, ctx: ctx, kind: "uplinks", every: time.Minute, listen: k.listenToLinks, hear: u.hear, look: u.visit, contests: map[string]*contest{}}
	return u
}

// hear says how soon announcements have uplinks looked at. Pods that come and go have the kernel
// announce the bridge again, as it was.
func (u *uplinks) hear(messages []netlink.Message) urgency {
	c := changesOf(messages)
	if c.lost {
		return soon
	}
	when := never
	for _, n := range c.links {
		if n.kind == "bridge" || n.facts.master != 0 && n.kind != "veth" {
			when = soon // a takeover may be under way
		}
		for _, t := range u.all {
			when = max(when, u.linkNews(t, n))
		}
	}
	for _, t := range u.all {
		if slices.ContainsFunc(slices.Concat(c.added, c.touched), func(index int) bool { return slices.Contains(t.links[:], index) }) {
			when = soon
		}
	}
	return when
}

// linkNews is about the NIC and the bridge of one uplink.
func (u *uplinks) linkNews(t *taken, n linkChange) urgency {
	switch {
	case n.index == t.links[0] || n.facts.name == t.NIC:
		if n.index != t.links[0] {
			u.of(t.NIC).until = time.Time{} // it is plugged in again, which is worth a try at once
		}
		u.carries(t, n.carrier)
		return soon
	case n.index != t.links[1] && n.facts.name != t.Bridge:
		return never
	case n.gone || !n.facts.up || n.index != t.links[1] || n.facts.name != t.Bridge:
		return soon
	}
	return never
}

// carries has servers asked where a NIC has its carrier again. Announcements tell of it, and so do looks: either may
// be late, and announcements get lost.
func (u *uplinks) carries(t *taken, carrier bool) {
	if carrier && !t.carrier {
		select {
		case u.carriers <- struct{}{}:
		default: // they are to be asked already
		}
	}
	t.carrier = carrier
}

// visit looks at all uplinks.
func (u *uplinks) visit(ctx context.Context) {
	list, err := u.network.Uplinks().List(ctx, "")
	states := map[uplink.State]int{}
	for _, r := range list {
		if r.Err != nil {
			err = r.Err
			continue
		}
		states[r.State]++
		t := u.all[r.NIC]
		if t == nil {
			t = &taken{carrier: true} // what it begins with is no news
			u.all[r.NIC] = t
		}
		t.UplinkReport = r
		u.find(t)
		if until := u.of(r.NIC).until; now().Before(until) {
			u.wake = earliest(u.wake, until)
		} else {
			u.lookAt(ctx, t)
		}
	}
	if err != nil {
		u.trouble("cannot look at uplinks", err)
		u.wake = earliest(u.wake, now().Add(again))
	}
	for nic := range u.all {
		if !slices.ContainsFunc(list, func(r network.UplinkReport) bool { return r.NIC == nic }) {
			delete(u.all, nic)
			delete(u.contests, nic)
		}
	}
	for _, s := range []uplink.State{uplink.Taking, uplink.Taken, uplink.Restoring, uplink.Undoing} {
		u.metrics.uplinks.WithLabelValues(string(s)).Set(float64(states[s]))
	}
}

// find learns which links announcements have to be about.
func (u *uplinks) find(t *taken) {
	t.links = [2]int{}
	conn, err := nl.Dial(unix.NETLINK_ROUTE, u.host)
	if err != nil {
		u.trouble("cannot look at uplink", err)
		return
	}
	defer conn.Close()
	for i, name := range []string{t.NIC, t.Bridge} {
		l, err := link.Find(conn, name)
		if err != nil {
			continue // what is not there is told by the look
		}
		if t.links[i] = l.Index; i == 0 {
			u.carries(t, l.Flags&unix.IFF_LOWER_UP != 0)
		}
	}
}

// lookAt does what there is to be done about an uplink.
func (u *uplinks) lookAt(ctx context.Context, t *taken) {
	who := []any{"nic", t.NIC, "bridge", t.Bridge}
	halfway := t.halfway
	t.halfway = t.State != uplink.Taken
	switch {
	case t.halfway && !halfway:
		u.wake = earliest(u.wake, now().Add(pauseOwn)) // a process may be at work
	case t.halfway:
		u.log.Warn("the work on an uplink was cut short: finishing it", append(who, "state", t.State)...)
		if u.mend(ctx, t, "cannot finish the work on an uplink", who) {
			u.metrics.uplinksFinished.Inc()
			u.log.Info("the work on an uplink is finished", who...)
			u.wake = now() // to see which way
		}
	case len(t.Differences) > 0:
		u.log.Warn("another program changed an uplink: repairing it", append(who, "found", t.Differences)...)
		if u.mend(ctx, t, "cannot mend uplink", who) {
			u.mended(ctx, t, who)
		}
	case !slices.Equal(t.From, t.To):
		u.log.Info("the host has other addresses: its pods follow", append(who, "from", t.From, "to", t.To)...)
		if u.putBack(ctx, t, who) && u.mend(ctx, t, "cannot write down what the host has on its bridge", who) {
			t.failures = 0
		}
	case t.Leased && !u.isAdopted(t.NIC):
		const fails = "cannot adopt the DHCP lease of the host's NIC: it runs out unless a later try succeeds"
		if u.mend(ctx, t, fails, who) && !u.isAdopted(t.NIC) {
			u.failed(t, fails, errors.New("no address of the host's that ends, or no record can be written"), who)
		}
	default:
		t.failures = 0
		u.of(t.NIC).calm()
	}
}

// isAdopted says whether the lease that the NIC had is on record.
func (u *uplinks) isAdopted(nic string) bool {
	_, err := u.leases.Load(lease.HostHash(nic))
	return err == nil
}

// mend brings an uplink and its record up to date.
func (u *uplinks) mend(ctx context.Context, t *taken, fails string, who []any) bool {
	ctx, cancel := context.WithTimeout(ctx, mendWithin)
	defer cancel()
	if err := u.network.Uplinks().Mend(ctx, t.NIC, t.To); err != nil {
		u.failed(t, fails, err, who)
		return false
	}
	return true
}

// mended is what follows a repair.
func (u *uplinks) mended(ctx context.Context, t *taken, who []any) {
	t.failures = 0
	u.metrics.uplinkMends.Inc()
	u.log.Info("uplink mended", who...)
	u.putRight(t.NIC, "something keeps undoing the takeover of an uplink: mending it only once a minute; have the network manager leave it alone "+
		"(NetworkManager: nmcli device set NIC managed no; systemd-networkd: Unmanaged=yes for the NIC), or give it back (tombolo uplink restore NIC BRIDGE)", who...)
	u.putBack(ctx, t, who)
}

// putBack has pods put back: a bridge that was made anew has neither their ports nor what their
// networks set of it, and the host's address is where default routes lead.
func (u *uplinks) putBack(ctx context.Context, t *taken, who []any) bool {
	err := u.network.Repair(ctx)
	if err != nil {
		u.failed(t, "cannot put the pods of an uplink back: tombolo repair, or their network's next ADD, does it", err, who)
	}
	return err == nil
}

// failed has an uplink looked at again later and later.
func (u *uplinks) failed(t *taken, what string, err error, who []any) {
	pause := min(time.Second<<min(t.failures, 10), lastRetry)
	t.failures++
	u.of(t.NIC).until = now().Add(pause)
	u.wake = earliest(u.wake, now().Add(pause))
	u.trouble(what, err, append(who, "tries", t.failures, "again", pause)...)
}
