package docker

import (
	"errors"
	"io/fs"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// A dockerd that was killed gives endpoints to no container and does not delete them: the next one has not heard of
// them, or deletes what it knows of them without a call of ours, and brings their interfaces back to the host's namespace,
// before it first speaks to us or after. Those that go with a container's namespace are dead pods, which the keeper
// reclaims.

// joins is how long an interface may be in no container.
const joins = 5 * time.Minute

// tidy looks again and again for endpoints that were in no container before, which are given, and are in none now.
func (d *Driver) tidy(before []string) {
	waiting := d.sweep(before)
	d.after(joins, func() { d.tidy(waiting) })
}

// sweep takes down the endpoints that are in no container, but for those that may be on their way into one, which it
// gives: this dockerd has created them, as far as is known, and before does not name them.
func (d *Driver) sweep(before []string) (waiting []string) {
	for _, id := range d.endpoints.list() {
		var e endpoint
		here, err := isHere(srcName(id))
		if err = errors.Join(err, d.endpoints.load(id, &e)); err != nil || !here {
			continue // another sweep comes
		}
		if !e.Moved && e.Created.UnixNano() > d.begun.Load() && !slices.Contains(before, id) {
			waiting = append(waiting, id)
			continue
		}
		d.forgo(id)
	}
	return waiting
}

// isHere says whether the host has a link.
func isHere(name string) (bool, error) {
	conn, err := nl.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return false, err
	}
	defer conn.Close()
	_, err = link.IndexOf(conn, name)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// forgo takes an endpoint down that is in no container.
func (d *Driver) forgo(id string) {
	defer d.lock(id)()
	var e endpoint
	err := d.endpoints.load(id, &e)
	if here, _ := isHere(srcName(id)); err != nil || e.Made && !here {
		return // by now
	}
	err = d.takeDown(id, e.NetworkID)
	d.Log.Warn("took an endpoint down that dockerd has left in no container", "endpoint", id, "err", err)
}
