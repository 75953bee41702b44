package cni

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/ipam"
)

// lockWait is the maximum time to wait for the lock on the reservations. It is long because the reference plugin
// waits without a limit. The call's deadline usually ends the wait earlier.
const lockWait = time.Hour

// ipamPluginConf is the configuration of the reference plugins host-local and static. A plugin of another project runs
// this program under such a name to get addresses for its pods, and passes its own configuration.
type ipamPluginConf struct {
	Common
	IPAM Section `json:"ipam"`
}

func (*ipamPluginConf) problems() []error { return nil }

// complete calls Common.complete. It then drops errors about invalid values of top-level fields, such as logLevel,
// since these fields belong to the calling plugin.
func (f *ipamPluginConf) complete(c *call) {
	f.Common.complete(c)
	c.undecoded = slices.DeleteFunc(c.undecoded, func(err error) bool {
		var found *strict.Error
		return errors.As(err, &found) && found.Kind == strict.Value && !strings.Contains(found.Path, ".")
	})
}

// run runs one verb. Like the reference plugins, it does nothing for STATUS and GC, and for a DEL of static.
func (f *ipamPluginConf) run(ctx context.Context, c *call) (*current.Result, error) {
	if c.verb == "STATUS" || c.verb == "GC" || c.verb == "DEL" && c.Name == "static" {
		return nil, nil
	}

	alloc, err := newAllocator(&ipamRequest{
		Plugin: delegate.Plugin{Name: c.Name, Args: c.args}, Network: f.Name,
		Section: f.IPAM, RequestedAddresses: f.RuntimeConfig.RequestedAddresses, DefaultDataDir: ipam.DefaultDir,
		ByName: true, Unrecorded: c.verb == "ADD", Strict: true, Warn: c.log.warn, LockWait: lockWait,
	})
	if err != nil {
		return nil, err
	}

	owner := ipam.Owner{ContainerID: c.containerID, IfName: c.ifName}
	switch {
	case c.verb == "ADD":
		assigned := &ipam.Allocation{Addresses: alloc.given, Routes: alloc.routes}
		if alloc.Allocator != nil {
			assigned, err = alloc.Add(ctx, owner)
		}
		if err != nil {
			return nil, err
		}
		result := &current.Result{CNIVersion: current.ImplementedSpecVersion, DNS: alloc.dns}
		addIPAM(result, alloc.ordered(assigned.Addresses), assigned.Routes, nil)
		return result, nil
	case c.verb == "DEL":
		return nil, alloc.Del(ctx, owner, nil)
	case alloc.Allocator != nil:
		return nil, alloc.Check(ctx, owner, nil)
	}

	prev, err := f.resultToCheck()
	if err == nil {
		err = alloc.checkGiven(resultAddresses(prev))
	}
	return nil, err
}
