package uplink

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// DialThrough is Dial with what is between it and the kernel.
func DialThrough(ns *netns.NS, through func(nl.Transport) nl.Transport) (*Conn, error) {
	own, err := reopen(ns)
	if err != nil {
		return nil, err
	}
	t, err := nl.Open(unix.NETLINK_ROUTE, own)
	if err != nil {
		return nil, errors.Join(err, own.Close())
	}
	return over(own, nl.New(through(t))), nil
}

type (
	Link     = link.Link
	Snapshot = snapshot
	StepName = stepName
)

const (
	StepPort      = stepPort
	StepRoutes    = stepRoutes
	StepRelease   = stepRelease
	StepSettle    = stepSettle
	StepBridge    = stepBridge
	StepAddresses = stepAddresses
)

// Plan is the plan of a takeover, from what was found.
func Plan(s *Snapshot, u Uplink) (*Steps, error) {
	if err := u.validate(); err != nil {
		return nil, err
	}
	return plan(s, u)
}

// Snapshot looks at a NIC and at a bridge.
func (c *Conn) Snapshot(ctx context.Context, nic, bridge string) (*Snapshot, error) {
	return c.snapshot(ctx, nic, bridge)
}

// PlanRestore is the plan of the way back.
func PlanRestore(s *Snapshot, rec *Record) *Steps { return planRestore(s, rec) }
