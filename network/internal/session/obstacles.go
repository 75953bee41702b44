package session

import (
	"context"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// Obstacles lists what stops pods of a network, or may stop them, and is out of reach, or left to its owner.
func (s *Session) Obstacles(ctx context.Context, rec *state.Network) ([]foreign.Obstacle, error) {
	c := foreign.On(s.Firewall.Socket(), &foreign.Config{Mark: uint32(rec.Mark), AdminChain: rec.AdminChain})
	return c.Obstacles(ctx, foreign.Path{Bridge: rec.GatewayLink(), Prefixes: rec.Subnets})
}
