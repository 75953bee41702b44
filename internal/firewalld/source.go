package firewalld

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/godbus/dbus/v5"

	"github.com/tombolo-cni/tombolo/internal/sources"
)

// active is what firewalld's zones have in the running configuration, by their names.
type active map[string]map[string][]string

// text is an address as firewalld has it among a zone's sources.
func text(a netip.Addr) string { return a.String() + "/" + strconv.Itoa(a.BitLen()) }

// in is the source by which a zone has an address by itself, whether written with a length or not; empty
// if it has not.
func (z active) in(zone string, a netip.Addr) string {
	for _, source := range z[zone]["sources"] {
		if source == text(a) || source == a.String() {
			return source
		}
	}
	return ""
}

// elsewhere is a zone, other than this one, that has an address by itself; empty if none has.
func (z active) elsewhere(zone string, a netip.Addr) string {
	for _, other := range slices.Sorted(maps.Keys(z)) {
		if other != zone && z.in(other, a) != "" {
			return other
		}
	}
	return ""
}

// lookAtSources makes pods' addresses sources of the zones that their attachments ask for, and takes back
// those that no attachment asks for any more. Only an error of the bus ends it. An attachment for which it
// fails does not keep it from the others.
func (k *keeper) lookAtSources(ctx context.Context, b *bus) error {
	entries, err := k.sources.List()
	k.entries = entries
	errs := []error{err}
	defer func() { k.reportSources(errors.Join(errs...)) }()
	if len(entries) == 0 {
		return nil
	}
	var zones active
	if err := b.call(ctx, name, path, runtimeZone+"getActiveZones", nil, &zones); err != nil {
		return fmt.Errorf("ask for the zones: %w", err)
	}
	if zones == nil {
		zones = active{}
	}
	// What leaves first: another attachment may be waiting for that.
	for _, do := range []func(context.Context, *bus, active, *sources.Entry) error{k.takeOut, k.putIn} {
		for _, e := range entries {
			if err := do(ctx, b, zones, e); err != nil && !answered(err) {
				return err
			} else if err != nil {
				errs = append(errs, err)
			}
		}
	}
	return nil
}

// reportSources logs an error once, until there is another one or none.
func (k *keeper) reportSources(err error) {
	text := ""
	if err != nil {
		text = short(err.Error())
	}
	if text != "" && text != k.toldSources {
		k.log.Warn("cannot have all of firewalld's sources as pods need them", "err", text)
	}
	k.toldSources = text
}

// putIn puts the addresses of an attachment into its zone, and says so.
func (k *keeper) putIn(ctx context.Context, b *bus, zones active, e *sources.Entry) error {
	r := e.Wants
	if r == nil {
		return nil
	}
	begun, why := e.IsBegun(), ""
	refuse := func(text string) {
		if why == "" {
			why = text
		}
	}
	for _, a := range r.Addresses {
		if zones.in(r.Zone, a) != "" {
			continue
		}
		if other := zones.elsewhere(r.Zone, a); other != "" {
			refuse(fmt.Sprintf("%s is a source of its zone %s", a, other))
			continue
		}
		// On record before it is done, so that a kill leaves no address behind in the zone.
		if !begun {
			if err := k.sources.Begin(e); err != nil {
				return k.unwritten(err)
			}
			begun = true
		}
		var was string
		err := b.call(ctx, name, path, runtimeZone+"addSource", []any{r.Zone, text(a)}, &was)
		if err != nil && !answered(err) {
			return fmt.Errorf("put %s into zone %s: %w", a, r.Zone, err)
		}
		if err != nil && !strings.Contains(err.Error(), "ZONE_ALREADY_SET") {
			refuse(reason(err))
			continue
		}
		zones.add(r.Zone, text(a))
	}
	if why == "" && e.IsDone() || e.Refused(why) {
		return nil
	}
	if why != "" {
		k.log.Warn("firewalld does not take a pod's addresses into a zone", "network", r.Network, "zone", r.Zone, "addresses", r.Addresses, "why", why)
	} else {
		k.log.Info("a pod's addresses are in a zone of firewalld, as its network asks", "network", r.Network, "zone", r.Zone, "addresses", r.Addresses)
	}
	return k.unwritten(k.sources.Finish(e, why))
}

// unwritten logs that a file cannot be written: what is on record still is looked at again.
func (k *keeper) unwritten(err error) error {
	if err != nil {
		k.log.Warn("cannot say what became of a pod's addresses in firewalld", "err", err)
	}
	return nil
}

// add notes a source.
func (z active) add(zone, source string) {
	if z[zone] == nil {
		z[zone] = map[string][]string{}
	}
	z[zone]["sources"] = append(z[zone]["sources"], source)
}

// takeOut takes the addresses of an attachment out of a zone that it does not ask for. What another one asks
// for, or the permanent configuration has, stays.
func (k *keeper) takeOut(ctx context.Context, b *bus, zones active, e *sources.Entry) error {
	if e.Has == nil {
		if e.Wants == nil {
			return k.unwritten(k.sources.Forget(e))
		}
		return nil
	}
	for _, a := range e.Has.Addresses {
		zone := e.Has.Zone
		source := zones.in(zone, a)
		if source == "" || slices.ContainsFunc(k.entries, func(o *sources.Entry) bool { return o.Wants.In(zone, a) }) {
			continue
		}
		var permanent, was string
		if err := b.call(ctx, name, configPath, name+".config.getZoneOfSource", []any{source}, &permanent); err != nil {
			return fmt.Errorf("ask for the permanent zone of %s: %w", source, err)
		}
		if permanent == zone {
			continue
		}
		if err := b.call(ctx, name, path, runtimeZone+"removeSource", []any{zone, source}, &was); err != nil && !isGone(err) {
			return fmt.Errorf("take %s out of zone %s: %w", source, zone, err)
		}
		zones[zone]["sources"] = slices.DeleteFunc(zones[zone]["sources"], func(s string) bool { return s == source })
	}
	if e.Wants != nil {
		return nil // putIn replaces the file
	}
	return k.unwritten(k.sources.Forget(e))
}

// isGone says that firewalld answers that a source is in no zone, or in another one, or that there is no
// such zone.
func isGone(err error) bool {
	return answered(err) && slices.ContainsFunc([]string{"UNKNOWN_SOURCE", "ZONE_CONFLICT", "INVALID_ZONE"}, func(s string) bool { return strings.Contains(err.Error(), s) })
}

// reason is what firewalld answered, in one short line.
func reason(err error) string {
	var e dbus.Error
	errors.As(err, &e)
	text := strings.TrimSpace(e.Error())
	if text == "" {
		return "it gives no reason" // none would mean that it is done
	}
	return strings.Map(func(c rune) rune {
		if c < ' ' || c == 0x7f || c == utf8.RuneError {
			return '?'
		}
		return c
	}, short(text))
}

// short cuts what firewalld may have made long.
func short(text string) string {
	const most = 200
	return text[:min(len(text), most)]
}

// dropSources forgets attachments that are gone, where there is no firewalld that could have their
// addresses.
func (k *keeper) dropSources() {
	entries, err := k.sources.List()
	k.reportSources(err)
	for _, e := range entries {
		if e.Wants == nil {
			_ = k.unwritten(k.sources.Forget(e))
		}
	}
}
