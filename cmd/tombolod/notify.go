package main

import (
	"fmt"
	"net"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
)

// tellWithin is how long the manager's socket may be full. A longer wait would delay the keeper's heartbeat, and
// leases need no manager.
const tellWithin = lease.Silence / 2

// notifier sends sd_notify(3) datagrams to the socket of the service manager. A nil notifier, of a program without
// such a manager, does nothing.
type notifier struct {
	conn   *net.UnixConn
	within time.Duration
}

// newNotifier returns nil if there is no service manager.
func newNotifier(getenv func(string) string) (*notifier, error) {
	path := getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil, nil
	}

	// A name that begins with @ is an abstract socket, in package net too.
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("NOTIFY_SOCKET: %w", err)
	}
	return &notifier{conn, tellWithin}, nil
}

// tell sends a state. If it gets lost, the manager's time-outs notice.
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
