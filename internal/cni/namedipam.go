package cni

import (
	"context"
	"net/netip"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/ipam"
)

// lockWait is longer than any deadline: the reference waits as long as it takes.
const lockWait = time.Hour

// ipamPlugin is the reference's host-local or static, which another plugin calls for the addresses of its pods. As
// there, STATUS and GC do nothing, and neither does DEL of static.
func (c *call) ipamPlugin(ctx context.Context, conf *NetConf) (*current.Result, error) {
	if c.verb == "STATUS" || c.verb == "GC" || c.verb == "DEL" && c.Name == "static" {
		return nil, nil
	}
	of, err := ipamconf.New(&ipamconf.Request{
		Type: c.Name, DataDir: conf.dataDir(), ByName: true, Unrecorded: c.verb == "ADD", Strict: true,
		Network: c.network, Args: c.args, Stdin: c.stdin, Warn: c.log.warn,
		DefaultDataDir: ipam.DefaultDir, LockWait: lockWait,
	})
	if err != nil {
		return nil, err
	}
	owner := ipam.Owner{ContainerID: c.containerID, IfName: c.ifName}
	switch c.verb {
	case "ADD":
		given, err := of.Add(ctx, owner)
		if err != nil {
			return nil, err
		}
		result := &current.Result{CNIVersion: current.ImplementedSpecVersion, DNS: of.DNS()}
		ipamconf.Give(result, of.Ordered(given.Addresses), given.Routes, nil)
		return result, nil
	case "DEL":
		return nil, of.Del(ctx, owner, nil)
	}
	held, err := c.held(conf)
	if err != nil {
		return nil, err
	}
	return nil, of.Check(ctx, owner, held)
}

// held are the addresses that an earlier ADD is said to have given. host-local goes by what is
// reserved instead.
func (c *call) held(conf *NetConf) ([]ipam.Address, error) {
	if c.Name != "static" {
		return nil, nil
	}
	prev, err := parsePrevResult(conf, c.cniVersion)
	if err != nil {
		return nil, err
	}
	if prev == nil {
		return nil, newError(codeInvalidConfig, "CHECK needs prevResult: the result of the ADD that is to be checked")
	}
	var list []ipam.Address
	for _, ip := range prev.IPs {
		if p, ok := ipamconf.Prefix(ip.Address); ok {
			gateway, _ := netip.AddrFromSlice(ip.Gateway)
			list = append(list, ipam.Address{Prefix: p, Gateway: gateway.Unmap()})
		}
	}
	return list, nil
}
