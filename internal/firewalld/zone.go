package firewalld

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/godbus/dbus/v5"
)

// The names of firewalld's D-Bus interface (firewalld.dbus(5)).
const (
	name        = "org.fedoraproject.FirewallD1"
	path        = dbus.ObjectPath("/org/fedoraproject/FirewallD1")
	runtimeZone = name + ".zone."
	configPath  = path + "/config"
	zoneOf      = "getZoneOfInterface"

	// zone is the zone for our links. firewalld accepts all packets that come in by its links, both to the host and
	// through it.
	zone = "trusted"
)

// zones holds the zones of one link in firewalld's configurations.
type zones struct {
	// running is the zone in the running configuration. If it is empty, firewalld treats the link as in the default
	// zone.
	running   string
	permanent string // in the permanent configuration; empty if none
	standard  string // the default zone
}

// chosen returns the zone that a program or a user chose for the link.
func (z zones) chosen() string {
	return cmp.Or(z.permanent, z.running)
}

// act is an action on a link.
type act int

const (
	stay       act = iota // the link is in our zone, as it should be
	forget                // the link is not ours, or is in the zone without our doing
	leaveAlone            // another zone was chosen for the link
	join                  // the link is in no zone
	move                  // the link is in the default zone, where network managers put links
	yield                 // we put the link into our zone, and another zone was chosen since
	leave                 // we put the link into our zone, and its network is gone
)

// text returns the log message for a completed action.
func (a act) text() string {
	switch a {
	case join, move:
		return "a bridge joins a zone of firewalld, so that what pods send passes"
	case yield:
		return "a bridge goes from this zone to the one that firewalld's permanent configuration has it in"
	}
	return "a bridge leaves a zone of firewalld, as its network is gone"
}

// decide returns the action for a link with the zones z. ours is set if we put the link into our zone. needed is set
// if a network has the link. sure is set if all networks could be read.
func decide(z zones, ours, needed, sure bool) act {
	switch {
	case z.running == zone && ours && z.permanent != "" && z.permanent != zone:
		// A reload of firewalld keeps a link's running zone. So our change would keep overriding the operator's
		// choice.
		return yield
	case !needed && z.running == zone && ours && z.permanent == "":
		if !sure {
			return stay
		}
		return leave
	case !needed, z.running == zone && z.permanent == zone, z.running == zone && !ours:
		return forget
	case z.running == zone:
		return stay
	case z.permanent != "":
		return leaveAlone
	case z.running == "":
		return join
	case z.running == z.standard:
		return move
	}

	return leaveAlone
}

// isThere reports whether firewalld is on the bus, and runs in this network namespace.
func (b *bus) isThere(ctx context.Context) (bool, error) {
	var pid uint32
	if err := b.callBus(ctx, "GetConnectionUnixProcessID", name, &pid); isNoOwner(err) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	return !worksElsewhere(pid), nil
}

// worksElsewhere reports whether a process is firewalld and runs in another network namespace. This occurs in a node
// that is a container and shares its host's bus. If the process cannot be inspected, because it is in another PID
// namespace, it counts as running here.
func worksElsewhere(pid uint32) bool {
	dir := "/proc/" + strconv.FormatUint(uint64(pid), 10)
	comm, err := os.ReadFile(dir + "/comm")
	if err != nil || strings.TrimSpace(string(comm)) != "firewalld" {
		return false
	}

	its, err := os.Readlink(dir + "/ns/net")
	if err != nil {
		return false
	}

	own, err := os.Readlink("/proc/thread-self/ns/net")
	return err == nil && its != own
}

// zonesOf asks firewalld for the zones of a link.
func (b *bus) zonesOf(ctx context.Context, link string) (z zones, err error) {
	if err := b.call(ctx, name, path, runtimeZone+zoneOf, []any{link}, &z.running); err != nil {
		return z, fmt.Errorf("ask for the zone of %s: %w", link, err)
	}
	if err := b.call(ctx, name, configPath, name+".config."+zoneOf, []any{link}, &z.permanent); err != nil {
		return z, fmt.Errorf("ask for the permanent zone of %s: %w", link, err)
	}
	if err := b.call(ctx, name, path, name+".getDefaultZone", nil, &z.standard); err != nil {
		return z, fmt.Errorf("ask for the default zone: %w", err)
	}
	return z, nil
}

// changeZone asks firewalld to carry out an action on a link with the zones z.
func (b *bus) changeZone(ctx context.Context, what act, link string, z zones) error {
	method, to := "changeZoneOfInterface", zone
	switch what {
	case join:
		method = "addInterface" // firewalld refuses this if another program was faster
	case leave:
		method = "removeInterface"
	case yield:
		to = z.permanent
	}

	var was string
	if err := b.call(ctx, name, path, runtimeZone+method, []any{to, link}, &was); err != nil {
		return fmt.Errorf("%s %s %s: %w", method, to, link, err)
	}
	return nil
}
