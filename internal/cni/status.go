package cni

import (
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

// status carries out STATUS: whether an ADD could succeed now. It changes
// nothing, and does not take the lock, since runtimes ask every few seconds.
func (c *call) status(ctx context.Context, conf *NetConf) error {
	if err := c.probe(ctx, conf.settings()); err != nil {
		return err
	}
	if err := c.ipv6Status(conf.settings()); err != nil {
		return err
	}
	if err := c.uplinkStatus(ctx, conf.settings()); err != nil {
		return err
	}
	dir, err := state.Open(conf.settings().StateDir)
	if err != nil {
		return newError(codeNotAvailable, "%v", err)
	}
	if err := refuseContested(dir); err != nil {
		return err
	}
	if conf.ipamType() == ipamDHCP {
		return c.keeperStatus(conf)
	}
	h := &host{call: c, settings: conf.settings(), dir: dir}
	h.epoch, err = dir.Epoch()
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, state.ErrStale) && !errors.Is(err, state.ErrDamaged) {
		return newError(codeNotAvailable, "%v", err)
	}
	allocator, err := ipamconf.New(h.ipamRequest(true))
	if err != nil {
		return err
	}
	return allocator.Bind(h.ipamNode()).Status(ctx)
}

// probe asks for the facilities of the kernel that an ADD needs.
func (c *call) probe(ctx context.Context, s settings) error {
	own, err := netns.Current()
	if err != nil {
		return newError(codeNotAvailable, "%v", err)
	}
	own.Close()
	br, err := c.DialBridge()
	if err == nil {
		defer br.Close()
		err = br.Probe()
	}
	if err != nil {
		return newError(codeNotAvailable, "%v", err)
	}
	fw, err := c.DialNFT(&nft.Config{Mark: s.Mark})
	if err == nil {
		defer fw.Close()
		err = fw.Probe()
	}
	if err != nil {
		return newError(codeNotAvailable, "%v", err)
	}
	if orDefault(s.NFCall, s.GatewayMode) {
		if err := bridge.ProbeNetfilter(); err != nil {
			remedy := "set bridgeNFCall to false, if no service and no policy concerns pods of one node"
			if s.DefaultRoute == defaultRouteHost {
				remedy = `set defaultRoute to "router" and bridgeNFCall to false: through the host, a firewall that drops what conntrack calls invalid stops every connection`
			}
			return newError(codeNotAvailable, "bridgeNFCall: %v; or %s", err, remedy)
		}
	}
	return unavailable(refuseObstacles(ctx, s.Mark, c.podPath(s)))
}

// podPath is how pods' packets go, as far as is known: another firewall may let pass the subnets
// of those that there are, and not the bridge.
func (c *call) podPath(s settings) nft.Path {
	path := nft.Path{Bridge: s.Bridge}
	if dir, err := state.Open(s.StateDir); err == nil {
		if rec, err := dir.LoadNetwork(c.network); err == nil && rec.Bridge == s.Bridge {
			path.Prefixes = rec.Subnets
		}
	}
	return path
}

// keeperStatus says whether leases would be renewed.
func (c *call) keeperStatus(conf *NetConf) error {
	dhcp, err := conf.dhcp()
	if err != nil {
		return err
	}
	dir, err := lease.Open(conf.settings().LeaseDir)
	if err != nil {
		return newError(codeInvalidConfig, "%v", err)
	}
	return unavailable((&leasing{conf: dhcp, dir: dir}).refuseUnkept())
}

// unavailable gives an error of ADD the code that STATUS has for it.
func unavailable(err error) error {
	if err == nil {
		return nil
	}
	return newError(codeNotAvailable, "%v", err)
}
