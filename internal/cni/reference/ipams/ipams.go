// Package ipams is the reference's plugins host-local, static and dhcp: IPAM plugins, which another
// plugin calls for the addresses of its pods.
package ipams

import (
	"context"
	"net/netip"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/cni/reference"
	"github.com/tombolo-cni/tombolo/ipam"
)

// lockWait is longer than any deadline: the reference waits as long as it takes.
const lockWait = time.Hour

// Run is host-local or static, by the name that the call has. As there, STATUS and GC do nothing,
// and neither does DEL of static.
func Run(ctx context.Context, c *reference.Call) (*current.Result, error) {
	if c.Verb == "STATUS" || c.Verb == "GC" || c.Verb == "DEL" && c.Name == "static" {
		return nil, nil
	}
	of, err := ipamconf.New(&ipamconf.Request{
		Type: c.Name, ByName: true, Unrecorded: c.Verb == "ADD", Strict: true,
		Network: c.Network, Args: c.Args, Stdin: c.Stdin, Warn: c.Warn,
		DefaultDataDir: ipam.DefaultDir, LockWait: lockWait,
	})
	if err != nil {
		return nil, err
	}
	owner := ipam.Owner{ContainerID: c.ContainerID, IfName: c.IfName}
	switch c.Verb {
	case "ADD":
		given, err := of.Add(ctx, owner)
		if err != nil {
			return nil, err
		}
		return of.Said().Result(given), nil
	case "DEL":
		return nil, of.Del(ctx, owner, nil)
	}
	held, err := held(c)
	if err != nil {
		return nil, err
	}
	return nil, of.Check(ctx, owner, held)
}

// held are the addresses that an earlier ADD is said to have given. host-local goes by what is
// reserved instead.
func held(c *reference.Call) ([]ipam.Address, error) {
	if c.Name != "static" {
		return nil, nil
	}
	prev, err := c.Prev()
	if err != nil {
		return nil, err
	}
	if prev == nil {
		return nil, reference.Errorf(types.ErrInvalidNetworkConfig, "CHECK needs prevResult: the result of the ADD that is to be checked")
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
