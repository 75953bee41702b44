package firewalld

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/godbus/dbus/v5"
)

// SystemBus is the address of the system bus if the environment names no other (D-Bus Specification, "Well-known
// Message Bus Instances").
const SystemBus = "unix:path=/run/dbus/system_bus_socket"

const (
	busName = "org.freedesktop.DBus"
	busPath = dbus.ObjectPath("/org/freedesktop/DBus")
)

// ErrNoBus means that no program listens at the bus's address, or that firewalld has just ended.
var ErrNoBus = errors.New("no bus")

// bus is a connection to a message bus.
type bus struct {
	socket  net.Conn
	conn    *dbus.Conn
	timeout time.Duration
	notify  func() // called after a signal about firewalld, and at the end of the connection
}

// dialBus connects to a bus, and subscribes to signals about firewalld. The connection ends with ctx. If no program
// listens, the error matches ErrNoBus.
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

// begin authenticates to the bus and subscribes. It returns an error if the bus does not answer in time.
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

// dialSocket connects to a bus's socket. It supports only the transport unix with a path, since the other transports
// reach another machine or start a program.
func dialSocket(ctx context.Context, address string, timeout time.Duration) (net.Conn, error) {
	path, ok := strings.CutPrefix(address, "unix:path=")
	if !ok {
		return nil, fmt.Errorf("bus %q: want an address such as %s", address, SystemBus)
	}

	path, _, _ = strings.Cut(path, ",") // cut off options such as guid=…
	dialer := net.Dialer{Timeout: timeout}
	socket, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoBus, err)
	}
	return socket, nil
}

// ignoreCalls drops messages that are not for a client: method calls, and the signals NameLost and NameAcquired
// without a name. godbus would panic on such a signal.
func ignoreCalls(m *dbus.Message) {
	const ignored = 0 // no message has this type
	switch m.Type {
	case dbus.TypeMethodCall:
		m.Type = ignored
	case dbus.TypeSignal:
		if len(m.Body) > 0 {
			if _, ok := m.Body[0].(string); ok {
				return
			}
		}
		if member, _ := m.Headers[dbus.FieldMember].Value().(string); member == "NameLost" || member == "NameAcquired" {
			m.Type = ignored
		}
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
	if err := b.socket.SetWriteDeadline(time.Now().Add(b.timeout)); err != nil {
		return fmt.Errorf("call %s: %w", method, err)
	}
	if err := b.conn.Object(to, at).CallWithContext(ctx, method, dbus.FlagNoAutoStart,
		args...).Store(answers...); err != nil {
		return fmt.Errorf("call %s: %w", method, err)
	}
	return nil
}

// isAnswer reports whether an error came from the called program rather than from the bus.
func isAnswer(err error) bool {
	var e dbus.Error
	return errors.As(err, &e) && !isDisconnected(err)
}

// isDisconnected reports whether an error of the bus means that the called program does not run, or ended before it
// answered.
func isDisconnected(err error) bool {
	var e dbus.Error
	return isNoOwner(err) || errors.As(err, &e) && e.Name == busName+".Error.NoReply"
}

// isNoOwner reports whether an error of the bus means that no program owns the called name.
func isNoOwner(err error) bool {
	var e dbus.Error
	return errors.As(err, &e) && (e.Name == busName+".Error.NameHasNoOwner" ||
		e.Name == busName+".Error.ServiceUnknown")
}
