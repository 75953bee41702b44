package uplink

import (
	"context"

	"github.com/tombolo-cni/tombolo/internal/link"
)

type (
	Link     = link.Info
	Snapshot = snapshot
)

// PlanOf is the plan of a takeover, from what was found.
func PlanOf(s *Snapshot, u Uplink) (*Plan, error) {
	if err := u.validate(); err != nil {
		return nil, err
	}
	return plan(s, u)
}

// Snapshot looks at a NIC and at a bridge.
func (c *Conn) Snapshot(ctx context.Context, nic, bridge string) (*Snapshot, error) {
	return c.snapshot(ctx, nic, bridge)
}

// PlanRestore lists the actions of the way back.
func PlanRestore(s *Snapshot, rec *Record) string { return actions(restoreSteps(), moveBack(s, rec)) }
