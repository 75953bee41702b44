package session

import (
	"context"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// Obstacles lists what stops pods of a network and is out of reach, or left to its owner. If out names a link,
// it is about what they send by that one.
func Obstacles(ctx context.Context, dir *state.Dir, rec *state.Network, out string) ([]foreign.Obstacle, error) {
	networks, _, err := dir.ListNetworks()
	if err != nil {
		return nil, fail.State(err)
	}
	path := foreign.Path{Bridge: rec.GatewayLink(), Prefixes: rec.Subnets, Out: out}
	for _, o := range networks {
		if len(o.Gateways) > 0 && o.Uplink == "" {
			path.Others = append(path.Others, o.GatewayLink())
		}
	}
	return foreign.Obstacles(ctx, &foreign.Config{Mark: uint32(rec.Mark)}, path)
}
