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
// them, or deletes what it knows of them without a call of ours. Their interfaces are in the host's namespace then. Those
// that go with a container's namespace are dead pods, which the keeper reclaims.

// joins is how long an interface may be in no container.
const joins = 5 * time.Minute

// tidy looks again and again for endpoints that were in no container before, which are given, and are in none now.
func (d *Driver) tidy(before []string) {
	waiting := d.sweep(func(id string) bool { return !slices.Contains(before, id) })
	d.after(joins, func() { d.tidy(waiting) })
}

// sweep takes down the endpoints that are in no container, but for those that may wait for one, which it gives. nil is
// none.
func (d *Driver) sweep(mayWait func(id string) bool) (waiting []string) {
	for _, id := range d.endpoints.list() {
		switch here, err := isHere(srcName(id)); {
		case err != nil:
			d.Log.Warn("cannot look for an endpoint of Docker's", "endpoint", id, "err", err)
		case here && mayWait != nil && mayWait(id):
			waiting = append(waiting, id)
		case here:
			d.forgo(id)
		}
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
