package cni

import (
	"context"
	"errors"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/network"
)

// status carries out STATUS: whether an ADD could succeed now. It changes
// nothing.
func (c *call) status(ctx context.Context, conf *NetConf) error {
	node, err := c.open(conf)
	if err != nil {
		return unavailable(err)
	}
	s := conf.settings()
	s.Subnets = ipamconf.Subnets(c.stdin)
	var leases *network.Lease
	if conf.ipamType() == ipamconf.TypeDHCP {
		dhcp, err := conf.dhcp()
		if err != nil {
			return err
		}
		leases = &network.Lease{KeeperOptional: dhcp.KeeperOptional()}
	} else if _, err := c.allocatorOf(conf, &s); err != nil {
		return err
	}
	return unavailable(node.Ready(ctx, &s.Network, leases))
}

// unavailable gives an error the code that STATUS has for it, unless it has one of its own.
func unavailable(err error) error {
	if err == nil || errors.As(err, new(*types.Error)) || errors.Is(err, network.ErrConflict) {
		return err
	}
	return newError(codeNotAvailable, "%v", err)
}
