package cni

import (
	"context"
	"errors"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/network"
)

// status carries out STATUS: whether an ADD could succeed now. It changes
// nothing.
func (c *call) status(ctx context.Context, node *network.Node, conf *NetConf) error {
	s := conf.settings()
	leases, err := c.allocator(conf, &s)
	if err != nil {
		return err
	}
	if leases != nil {
		s.Allocator = nil
	}
	err = node.Ready(ctx, &s, leases)
	// Without a code of its own, it has that of STATUS.
	if err == nil || errors.As(err, new(*types.Error)) || errors.Is(err, network.ErrConflict) {
		return err
	}
	return newError(codeNotAvailable, "%v", err)
}
