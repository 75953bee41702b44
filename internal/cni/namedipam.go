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

// lockWait is longer than any deadline: the reference waits as long as it takes.
const lockWait = time.Hour

// ipamPluginConf is the configuration of the reference's host-local or static, which another plugin calls for the
// addresses of its pods, with a configuration of its own.
type ipamPluginConf struct {
	Common
	IPAM Section `json:"ipam"`
}

func (*ipamPluginConf) problems() []error { return nil }

// complete passes over values that are not ours to judge: the other plugin may have a logLevel of its own.
func (f *ipamPluginConf) complete(c *call) {
	f.Common.complete(c)
	c.undecoded = slices.DeleteFunc(c.undecoded, func(err error) bool {
		var value *strict.ValueError
		return errors.As(err, &value) && !strings.Contains(value.Path, ".")
	})
}

// run does nothing in STATUS and GC, as there, and neither in DEL of static.
func (f *ipamPluginConf) run(ctx context.Context, c *call) (*current.Result, error) {
	if c.verb == "STATUS" || c.verb == "GC" || c.verb == "DEL" && c.Name == "static" {
		return nil, nil
	}
	of, err := newAllocator(&ipamRequest{
		Plugin: delegate.Plugin{Name: c.Name, Args: c.args}, Network: f.Name,
		Section: f.IPAM, Asked: f.RuntimeConfig.Asked, DefaultDataDir: ipam.DefaultDir,
		ByName: true, Unrecorded: c.verb == "ADD", Strict: true, Warn: c.log.warn, LockWait: lockWait,
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
		result := &current.Result{CNIVersion: current.ImplementedSpecVersion, DNS: of.dns}
		give(result, of.ordered(given.Addresses), given.Routes, nil)
		return result, nil
	case "DEL":
		return nil, of.Del(ctx, owner, nil)
	}
	var held []ipam.Address
	if c.Name == "static" { // host-local goes by what is reserved instead
		prev, err := f.resultToCheck()
		if err != nil {
			return nil, err
		}
		held = heldAddresses(prev)
	}
	return nil, of.Check(ctx, owner, held)
}
