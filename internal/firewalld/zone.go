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

// firewalld's interface (firewalld.dbus(5)).
const (
	name        = "org.fedoraproject.FirewallD1"
	path        = dbus.ObjectPath("/org/fedoraproject/FirewallD1")
	runtimeZone = name + ".zone."
	configPath  = path + "/config"
	zoneOf      = "getZoneOfInterface"

	// zone is the one that links join: what comes in by its links passes, to the host and through it.
	zone = "trusted"
)

// zones are what a link is in.
type zones struct {
	running   string // in the running configuration; empty: in none, and so treated as in the default zone
	permanent string // by the permanent one; empty: in none
	standard  string // the default zone
}

// chosen is the zone that a program or a user chose.
func (z zones) chosen() string {
	return cmp.Or(z.permanent, z.running)
}

// act is what is done with a link.
type act int

const (
	stay       act = iota // it is as it should be
	forget                // it is none of our doing any more, or never was
	leaveAlone            // another zone was chosen for it
	join                  // it is in no zone
	move                  // it is in the default zone, which network managers put links into
	yield                 // it is in our zone by our doing, and another one was chosen since
	leave                 // it is in our zone by our doing, and its network is gone
)

// text is what the log says once it is done.
func (a act) text() string {
	switch a {
	case join, move:
		return "a bridge joins a zone of firewalld, so that what pods send passes"
	case yield:
		return "a bridge goes from this zone to the one that firewalld's permanent configuration has it in"
	}
	return "a bridge leaves a zone of firewalld, as its network is gone"
}

// decide says what is done with a link. ours: it joined by our doing; wanted: a network has it;
// sure: all networks are known.
func decide(z zones, ours, wanted, sure bool) act {
	switch {
	case z.running == zone && ours && z.permanent != "" && z.permanent != zone:
		// A reload keeps what is running, and so our doing would override the operator's.
		return yield
	case !wanted && z.running == zone && ours && z.permanent == "":
		if !sure {
			return stay
		}
		return leave
	case !wanted, z.running == zone && z.permanent == zone, z.running == zone && !ours:
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

// isThere says whether firewalld is on the bus, and works in this network namespace.
func (b *bus) isThere(ctx context.Context) (bool, error) {
	var pid uint32
	if err := b.callBus(ctx, "GetConnectionUnixProcessID", name, &pid); noOwner(err) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	return !worksElsewhere(pid), nil
}

// worksElsewhere says that a process is firewalld, and works in another network namespace: where
// this node is a container that has got its host's bus. A process that cannot be looked at, as it
// is in another PID namespace, is believed to work here.
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

// zonesOf asks which zones a link is in.
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

// carryOut has firewalld do it.
func (b *bus) carryOut(ctx context.Context, what act, link string, z zones) error {
	method, to := "changeZoneOfInterface", zone
	switch what {
	case join:
		method = "addInterface" // which firewalld refuses if another program was faster
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
