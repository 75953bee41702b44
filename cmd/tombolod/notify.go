package main

import (
	"fmt"
	"net"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
)

// tellWithin limits the wait while the service manager's socket is full. The wait delays the keeper's next heartbeat,
// which must come before lease.Silence has passed.
const tellWithin = lease.Silence / 2

// notifier sends sd_notify(3) datagrams to the socket of the service manager. A nil notifier, for a program without a
// service manager, does nothing.
type notifier struct {
	conn   *net.UnixConn
	within time.Duration
}

// newNotifier connects to the service manager's socket. It returns nil without an error if there is no service
// manager.
func newNotifier(getenv func(string) string) (*notifier, error) {
	path := getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil, nil
	}

	// Package net understands a name that begins with @ as an abstract socket, just as sd_notify(3) does.
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("NOTIFY_SOCKET: %w", err)
	}
	return &notifier{conn, tellWithin}, nil
}

// tell sends a state, such as "READY=1", to the service manager. It ignores errors: if a state is lost, the manager's
// own time limit expires.
func (n *notifier) tell(state string) {
	if n != nil {
		_ = n.conn.SetWriteDeadline(time.Now().Add(n.within))
		_, _ = n.conn.Write([]byte(state))
	}
}

func (n *notifier) close() {
	if n != nil {
		_ = n.conn.Close()
	}
}
