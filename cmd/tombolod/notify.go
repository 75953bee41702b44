package main

import (
	"fmt"
	"net"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
)

// tellWithin is how long a manager may leave its socket full. Leases are renewed without
// one, too: a keeper that waits longer would miss a heartbeat.
const tellWithin = lease.Silence / 2

// notifier speaks sd_notify(3): datagrams to the socket that the service manager names.
// A nil one, for a program without such a manager, does nothing.
type notifier struct {
	conn   *net.UnixConn
	within time.Duration
}

// newNotifier returns nil where no service manager listens.
func newNotifier(getenv func(string) string) (*notifier, error) {
	path := getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil, nil
	}
	// A name that begins with @ is an abstract one, as package net has it too.
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("NOTIFY_SOCKET: %w", err)
	}
	return &notifier{conn, tellWithin}, nil
}

// tell sends a state. If it does not arrive, the manager notices by its time-outs.
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
