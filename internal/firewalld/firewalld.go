// Package firewalld puts links into the zone "trusted" of firewalld, so that firewalld lets pods' packets pass.
// These are the links over which the host forwards packets of pods, except bridges with an uplink. A link stays in the
// zone as long as the state directory has a record of its network. The zone is necessary because an accept in our own
// nf_tables tables does not override firewalld's rejects.
//
//	z := firewalld.New(ctx, &firewalld.Config{State: dir, Address: firewalld.SystemBus, Tell: tell, Log: logger})
//	defer z.Close()
//	for err := error(nil); err == nil; _, err = z.Next() {
//		log.Print(z.Look(ctx))
//	}
//
// It talks to firewalld over D-Bus. It changes only firewalld's running configuration, never the permanent one. So it
// checks the links again whenever firewalld starts or reloads. It respects an operator's choice. It leaves a link alone
// that has a zone in the permanent configuration, or is in another zone than the default one.
package firewalld

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/godbus/dbus/v5"
	"github.com/mdlayher/netlink"

	"github.com/tombolo-cni/tombolo/internal/state"
)

const (
	// timeout is the time limit for answers from the bus and firewalld. While firewalld loads many rules, it may
	// take many seconds to answer.
	timeout = 30 * time.Second

	// pollInterval is the interval between the checks of Next for new and removed networks, and for signals.
	pollInterval = 250 * time.Millisecond

	// minInterval is the least time between two results of Next caused by D-Bus signals, since any local user can
	// send such signals.
	minInterval = time.Second
)

// Config configures Zones. All fields are required.
type Config struct {
	// State has the networks' records, and stores which links Look has put into the zone.
	State *state.Dir
	// Address is the address of the bus, as in DBUS_SYSTEM_BUS_ADDRESS. Only unix:path=… is supported.
	Address string
	// Tell updates our nf_tables rules about trusted links from State.Zones. Look calls it before each change of a
	// link's zone, and again at the end.
	Tell func(context.Context) error
	// Log receives a line for each link that joins or leaves the zone, or that stays in another zone.
	Log *slog.Logger
}

// Zones puts links into the zone "trusted", and takes them out when their networks are gone. Another goroutine may call
// Next while Look is at work.
type Zones struct {
	Config
	ctx     context.Context // the connection to the bus ends when ctx is done
	timeout time.Duration
	bus     *bus          // nil while there is no connection
	lock    *os.File      // tells an ADD that a process handles links' zones; nil while firewalld is down
	news    chan struct{} // has an element after a call of notify
	changed int64         // the last result of State.NetworksChanged
	last    time.Time     // the time when Next last returned because of a signal
}

// New returns a Zones. When ctx is done, its connection to the bus ends, and Next returns an error.
func New(ctx context.Context, cfg *Config) *Zones {
	return &Zones{Config: *cfg, ctx: ctx, timeout: timeout, news: make(chan struct{}, 1)}
}

// Close closes the connection and releases z.lock. The links stay in the zone, for the next process.
func (z *Zones) Close() error {
	z.release()
	return nil
}

// Next waits until firewalld, its bus or a network may have changed, so that the caller should call Look. It always
// returns nil messages. When the ctx of New is done, Next returns the error of ctx.
func (z *Zones) Next() ([]netlink.Message, error) {
	poll := time.NewTicker(pollInterval)
	defer poll.Stop()
	for {
		select {
		case <-z.ctx.Done():
			return nil, z.ctx.Err()
		case <-poll.C:
			if now := z.State.NetworksChanged(); now != z.changed {
				z.changed = now
				return nil, nil
			}
			if len(z.news) > 0 && time.Since(z.last) > minInterval {
				<-z.news
				z.last = time.Now()
				return nil, nil
			}
		}
	}
}

// notify makes Next return soon. It does nothing if an earlier notification is still waiting.
func (z *Zones) notify() {
	select {
	case z.news <- struct{}{}:
	default:
	}
}

// Look puts the links of State.ForwardedLinks into the zone, except links for which another program or a user chose a
// zone. It takes out links whose networks are gone. If firewalld does not run in this network namespace, Look only
// calls Tell. After an error, call Look again soon. ErrNoBus is usually no fault: the bus does not run, or firewalld
// has just ended. Look may then not have called Tell.
func (z *Zones) Look(ctx context.Context) error {
	if z.bus != nil && z.bus.conn.Context().Err() != nil {
		z.release()
	}

	err := z.attend(ctx)
	if err != nil {
		z.release() // ADDs must not wait for the zone now
	}

	if isDisconnected(err) {
		return ErrNoBus
	}
	return err
}

// attend connects to the bus if necessary. If firewalld runs, it takes z.lock and calls look. If not, it releases
// z.lock and calls Tell.
func (z *Zones) attend(ctx context.Context) (err error) {
	if z.bus == nil {
		if z.bus, err = dialBus(z.ctx, z.Address, z.timeout, z.notify); err != nil {
			return err
		}
	}

	isRunning, err := z.bus.isThere(ctx)
	if err == nil && !isRunning {
		z.unlock()
		return z.Tell(ctx)
	}

	if err == nil && z.lock == nil {
		z.lock, err = z.State.AttendZones()
	}

	if err != nil {
		return err
	}
	return z.look(ctx, z.bus)
}

// release closes the connection and releases z.lock.
func (z *Zones) release() {
	if z.bus != nil {
		z.bus.close()
		z.bus = nil
	}
	z.unlock()
}

func (z *Zones) unlock() {
	_ = z.lock.Close() // Close does nothing if lock is nil
	z.lock = nil
}

// look decides about each link of State.ForwardedLinks, and each link that we put into the zone before, and carries
// out the action. It records the links in the zone, and those in a zone that somebody else chose. It calls Tell before
// each change, and at the end.
func (z *Zones) look(ctx context.Context, b *bus) error {
	// A network that cannot be read may have any of our links. So if there is one, do not take a link out of the zone
	// because no other network has it.
	links, unread := z.State.ForwardedLinks()
	before, err := z.State.Zones()
	if err != nil {
		return err
	}

	errs := []error{unread}
	now := state.Zones{}
	for _, link := range union(links, before.Joined) {
		joined := slices.Contains(before.Joined, link)
		current, err := b.zonesOf(ctx, link)
		if err != nil {
			return errors.Join(append(errs, err)...)
		}

		switch action := decide(current, joined, slices.Contains(links, link), unread == nil); action {
		case stay:
			now.Joined = append(now.Joined, link)
		case forget:
		case leaveAlone:
			now.Left = append(now.Left, link)
			if !slices.Contains(before.Left, link) {
				z.Log.Info("a bridge stays in the zone of firewalld that another program or a user chose",
					"link", link, "zone", cmp.Or(current.permanent, current.running))
			}
		default:
			// Write the record and the rules before the change. So even if this process is killed, every link that it
			// put into the zone has a record, and rules that restrict its pods.
			if err := errors.Join(z.record(before, now, link), z.Tell(ctx)); err != nil {
				return errors.Join(append(errs, err)...)
			}

			err := b.changeZone(ctx, action, link, current)
			switch {
			case err == nil:
				z.Log.Info(action.text(), "link", link, "zone", zone)
			case !isAnswer(err):
				return errors.Join(append(errs, err)...)
			}

			errs = append(errs, err)
			if joins := action == join || action == move; joins == (err == nil) {
				now.Joined = append(now.Joined, link)
			}

			if action == yield && err == nil {
				now.Left = append(now.Left, link)
			}
		}
	}

	if !slices.Equal(now.Joined, before.Joined) || !slices.Equal(now.Left, before.Left) {
		errs = append(errs, z.State.SetZones(now))
	}

	return errors.Join(append(errs, z.Tell(ctx))...)
}

// record adds the link to the links that State.Zones lists as joined. The caller changes the link's zone afterwards.
func (z *Zones) record(before, now state.Zones, link string) error {
	all := union(before.Joined, now.Joined, []string{link})
	if slices.Equal(all, before.Joined) {
		return nil
	}
	return z.State.SetZones(state.Zones{Joined: all, Left: now.Left})
}

// union returns the names of all lists, sorted and each once.
func union(lists ...[]string) []string {
	return slices.Compact(slices.Sorted(slices.Values(slices.Concat(lists...))))
}

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

// act is a decision about a link's zone in firewalld. The values stay, forget and leaveAlone leave the zone unchanged,
// and the others change it.
type act int

const (
	stay       act = iota // we put the link into our zone, and it stays there
	forget                // no network has the link, or another program or a user chose our zone for it
	leaveAlone            // another program or a user chose a zone for the link
	join                  // the link is in no zone
	move                  // the link is in the default zone, where network managers put links
	yield                 // we put the link into our zone, and another zone was chosen since
	leave                 // we put the link into our zone, and its network is gone
)

// text returns the log message for a completed action.
func (a act) text() string {
	switch a {
	case join, move:
		return "a bridge joins a zone of firewalld, so that packets of pods pass"
	case yield:
		return "a bridge moves from this zone to the zone in firewalld's permanent configuration"
	}
	return "a bridge leaves a zone of firewalld, as its network is gone"
}

// decide returns the action for a link with the zones z. ours is set if we put the link into our zone. needed is set if
// State.ForwardedLinks has the link. sure is set if all networks could be read.
func decide(z zones, ours, needed, sure bool) act {
	switch {
	case z.running == zone && ours && z.permanent != "" && z.permanent != zone:
		// The operator has chosen another zone in the permanent configuration. A reload of firewalld keeps the running
		// zone, which is ours, so move the link to the chosen zone.
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
	err := b.callBus(ctx, "GetConnectionUnixProcessID", name, &pid)
	if isNoOwner(err) {
		return false, nil
	}
	return err == nil && !worksElsewhere(pid), err
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

	its, itsErr := os.Readlink(dir + "/ns/net")
	own, ownErr := os.Readlink("/proc/thread-self/ns/net")
	return itsErr == nil && ownErr == nil && its != own
}

// zonesOf asks firewalld for the zones of a link.
func (b *bus) zonesOf(ctx context.Context, link string) (z zones, err error) {
	if err := b.call(ctx, name, path, runtimeZone+zoneOf, []any{link}, &z.running); err != nil {
		return z, fmt.Errorf("ask for the zone of %s: %w", link, err)
	}
	if err := b.call(ctx, name, configPath, name+".config."+zoneOf, []any{link}, &z.permanent); err != nil {
		return z, fmt.Errorf("ask for the permanent zone of %s: %w", link, err)
	}

	err = b.call(ctx, name, path, name+".getDefaultZone", nil, &z.standard)
	return z, state.WithOperation(err, "ask for the default zone")
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

	err := b.call(ctx, name, path, runtimeZone+method, []any{to, link}, new(string))
	return state.WithOperation(err, "%s %s %s", method, to, link)
}

// SystemBus is the address of the system bus if the environment names no other (D-Bus Specification, "Well-known
// Message Bus Instances"). The specification writes /var/run, usually a link to /run.
const SystemBus = "unix:path=/run/dbus/system_bus_socket"

const (
	busName = "org.freedesktop.DBus"
	busPath = dbus.ObjectPath("/org/freedesktop/DBus")
)

// ErrNoBus means that no connection to the bus is possible, or that firewalld has just ended.
var ErrNoBus = errors.New("no bus")

// bus is a connection to a D-Bus message bus.
type bus struct {
	socket  net.Conn
	conn    *dbus.Conn
	timeout time.Duration
	notify  func() // called after a signal about firewalld, and at the end of the connection
}

// dialBus connects to a bus, and subscribes to signals about firewalld. The connection ends with ctx. If connect(2)
// fails, for example because no program listens, the error matches ErrNoBus.
func dialBus(ctx context.Context, address string, timeout time.Duration, notify func()) (*bus, error) {
	socket, err := dialSocket(ctx, address, timeout)
	if err != nil {
		return nil, err
	}

	b := &bus{socket: socket, timeout: timeout, notify: notify}

	// Pass a connected socket to godbus. It then accepts no file descriptors from peers, which it would never close.
	b.conn, err = dbus.NewConn(socket, dbus.WithContext(ctx), dbus.WithSignalHandler(b),
		dbus.WithIncomingInterceptor(ignoreCalls))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("bus %s: %w", address, err), socket.Close())
	}

	if err := b.begin(ctx); err != nil {
		b.close()
		return nil, fmt.Errorf("bus %s: %w", address, err)
	}

	context.AfterFunc(b.conn.Context(), notify)
	return b, nil
}

// begin authenticates to the bus, and subscribes to two signals: a program takes or gives up firewalld's name on the
// bus, and firewalld has reloaded its rules. It returns an error if the bus does not answer in time.
func (b *bus) begin(ctx context.Context) error {
	if err := b.socket.SetDeadline(time.Now().Add(b.timeout)); err != nil {
		return err
	}

	if err := b.conn.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(os.Geteuid()))}); err != nil {
		return fmt.Errorf("authenticate: %w", err)
	}

	if err := b.conn.Hello(); err != nil {
		return fmt.Errorf("say hello: %w", err)
	}

	if err := b.socket.SetDeadline(time.Time{}); err != nil {
		return err
	}

	for _, rule := range []string{
		"type='signal',sender='" + busName + "',interface='" + busName + "',member='NameOwnerChanged',arg0='" + name +
			"'",
		"type='signal',sender='" + name + "',interface='" + name + "',member='Reloaded'",
	} {
		if err := b.callBus(ctx, "AddMatch", rule); err != nil {
			return fmt.Errorf("subscribe: %w", err)
		}
	}

	return nil
}

// dialSocket connects to a bus's socket. It supports only the transport unix with a path. Some of the other transports
// reach another machine or start a program.
func dialSocket(ctx context.Context, address string, timeout time.Duration) (net.Conn, error) {
	path, ok := strings.CutPrefix(address, "unix:path=")
	if !ok {
		return nil, fmt.Errorf("bus %q: want an address such as %s", address, SystemBus)
	}

	path, _, _ = strings.Cut(path, ",") // cut off options such as guid=…
	dialer := net.Dialer{Timeout: timeout}
	socket, err := dialer.DialContext(ctx, "unix", path)
	return socket, state.WithOperation(err, "%w", ErrNoBus)
}

// ignoreCalls drops method calls, which are not for a client. It also drops the signals NameLost and NameAcquired if
// they contain no name, since godbus would panic on such a signal.
func ignoreCalls(m *dbus.Message) {
	member, _ := m.Headers[dbus.FieldMember].Value().(string)
	isAboutName := m.Type == dbus.TypeSignal && (member == "NameLost" || member == "NameAcquired")
	var name any
	if len(m.Body) > 0 {
		name = m.Body[0]
	}

	_, hasName := name.(string)
	if m.Type == dbus.TypeMethodCall || isAboutName && !hasName {
		m.Type = 0 // no message has this type, so godbus ignores it
	}
}

// DeliverSignal calls b.notify for a signal about firewalld. godbus calls DeliverSignal for each signal. The signal's
// content is not used: Look asks firewalld for its state.
func (b *bus) DeliverSignal(_, member string, _ *dbus.Signal) {
	if member == "NameOwnerChanged" || member == "Reloaded" {
		b.notify()
	}
}

// close closes the connection. It closes the socket first, since godbus would otherwise wait for its own writes.
func (b *bus) close() {
	_ = b.socket.Close()
	_ = b.conn.Close()
}

// callBus calls a method of the bus itself.
func (b *bus) callBus(ctx context.Context, method, arg string, answers ...any) error {
	return b.call(ctx, busName, busPath, busName+"."+method, []any{arg}, answers...)
}

// call calls a method and waits for the answer. It does not make the bus start a service.
func (b *bus) call(ctx context.Context, to string, at dbus.ObjectPath, method string, args []any,
	answers ...any) error {
	ctx, cancel := context.WithTimeout(ctx, b.timeout)
	defer cancel()
	err := b.socket.SetWriteDeadline(time.Now().Add(b.timeout))
	if err == nil {
		err = b.conn.Object(to, at).CallWithContext(ctx, method, dbus.FlagNoAutoStart, args...).Store(answers...)
	}
	return state.WithOperation(err, "call %s", method)
}

// errorName returns the name of an error message over D-Bus, without the prefix "org.freedesktop.DBus.Error.". For any
// other error, it returns "".
func errorName(err error) string {
	e, _ := errors.AsType[dbus.Error](err)
	return strings.TrimPrefix(e.Name, busName+".Error.")
}

// isAnswer reports whether an error is an error message over D-Bus, except the messages of isDisconnected. Usually the
// called program sent it.
func isAnswer(err error) bool { return errorName(err) != "" && !isDisconnected(err) }

// isDisconnected reports whether an error of the bus means that the called program does not run, or ended before it
// answered.
func isDisconnected(err error) bool { return isNoOwner(err) || errorName(err) == "NoReply" }

// isNoOwner reports whether an error of the bus means that no program owns the called name.
func isNoOwner(err error) bool {
	return slices.Contains([]string{"NameHasNoOwner", "ServiceUnknown"}, errorName(err))
}
