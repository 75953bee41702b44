package cni

import (
	"context"
	"errors"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/network"
)

// status carries out STATUS: whether an ADD could succeed now. It changes
// nothing.
func (c *call) status(ctx context.Context, conf *NetConf) error {
	node, err := c.open(c.allocators(conf))
	if err != nil {
		return unavailable(err)
	}
	s := conf.settings()
	leases, err := c.allocator(conf, &s)
	if err != nil {
		return err
	}
	if leases != nil {
		s.Allocator = nil
	}
	return unavailable(node.Ready(ctx, &s, leases))
}

// unavailable gives an error the code that STATUS has for it, unless it has one of its own.
func unavailable(err error) error {
	if err == nil || errors.As(err, new(*types.Error)) || errors.Is(err, network.ErrConflict) {
		return err
	}
	return newError(codeNotAvailable, "%v", err)
}
