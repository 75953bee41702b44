package cni

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
)

// delegatedIPAM is an allocator that gets addresses from another project's IPAM plugin, by running it.
type delegatedIPAM struct {
	*ipamSection
	request *ipamRequest
}

// Bind returns d, since d uses nothing of the node.
func (d *delegatedIPAM) Bind(ipam.Node) ipam.Allocator { return d }

// Slow returns true, since a plugin may take long.
func (d *delegatedIPAM) Slow() bool { return true }

// runVerb runs the plugin with a verb other than ADD.
func (d *delegatedIPAM) runVerb(ctx context.Context, plugin *delegate.Plugin, verb string) error {
	lockorder.Slow("a plugin")
	return d.wrap(plugin.Run(ctx, verb))
}

// Add runs the plugin with ADD, and stores the routes and DNS settings of its result in the ipamSection. After an error
// it calls undo, as section 4 of the CNI specification 1.1.0 recommends. It ignores parts of the result that an IPAM
// plugin must not set.
func (d *delegatedIPAM) Add(ctx context.Context, _ ipam.Owner) (*ipam.Allocation, error) {
	lockorder.Slow("a plugin")
	result, err := d.request.Plugin.Add(ctx)
	if err == nil {
		d.dns = result.DNS
		d.routes, err = routesOf(result.Routes)
	}

	if err != nil {
		return nil, d.undo(ctx, d.wrap(err))
	}

	addresses := resultAddresses(result)
	if d.request.ByName {
		d.reported = slices.Clone(addresses)
	}

	return &ipam.Allocation{Addresses: addresses}, nil
}

// undo runs the plugin with DEL after an ADD that failed with cause, even if ctx has ended. If the plugin did not run
// at all, undo only returns cause. It returns cause as the first error, so that the runtime gets cause's code.
func (d *delegatedIPAM) undo(ctx context.Context, cause error) error {
	if errors.Is(cause, delegate.ErrNotFound) || errors.Is(cause, delegate.ErrSelf) {
		return cause
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), network.UndoTimeout)
	defer cancel()
	if err := d.runVerb(ctx, &d.request.Plugin, "DEL"); err != nil {
		return errors.Join(cause, fmt.Errorf("undo the failed ADD: %w", err))
	}
	return cause
}

// Del runs the plugin with DEL. It ignores the list of addresses, since the plugin has its own records.
func (d *delegatedIPAM) Del(ctx context.Context, owner ipam.Owner, _ []netip.Addr) error {
	plugin := d.request.Plugin
	if owner.ContainerID != plugin.ContainerID || owner.IfName != plugin.IfName {
		// The owner is not the call's attachment: a GC runs, or an ADD that takes down a dead pod. So the owner's
		// namespace and CNI_ARGS are unknown.
		plugin.ContainerID, plugin.IfName, plugin.NetNS, plugin.Args = owner.ContainerID, owner.IfName, "", ""
	}
	return d.warnIfSelf(d.runVerb(ctx, &plugin, "DEL"))
}

// warnIfSelf logs delegate.ErrSelf as a warning and returns nil, for verbs that release addresses. The error means that
// ipam.type names Tombolo itself. So no ADD has got an address from it, and there is none to release. It returns other
// errors unchanged.
func (d *delegatedIPAM) warnIfSelf(err error) error {
	if errors.Is(err, delegate.ErrSelf) {
		d.request.Warn(err.Error())
		return nil
	}
	return err
}

// Check runs the plugin with CHECK. The plugin finds prevResult in the configuration.
func (d *delegatedIPAM) Check(ctx context.Context, _ ipam.Owner, _ []ipam.Address) error {
	return d.runVerb(ctx, &d.request.Plugin, "CHECK")
}

// Collect runs the plugin with GC. The plugin finds the valid attachments in the configuration.
func (d *delegatedIPAM) Collect(ctx context.Context, _ []ipam.Owner) error {
	return d.warnIfSelf(d.runVerb(ctx, &d.request.Plugin, "GC"))
}

// Status runs the plugin with STATUS. The error has code 50 if the plugin is missing, or ends without an error object.
// An error object of the plugin has its own code.
func (d *delegatedIPAM) Status(ctx context.Context) error {
	err := d.runVerb(ctx, &d.request.Plugin, "STATUS")
	var own *types.Error
	if errors.As(err, &own) && (own.Code == codePluginMissing || own.Code == codePluginFailed) {
		return withCode(codeNotAvailable, err)
	}
	return err
}

// wrap adds the network's name and a code to an error. It returns nil, and an error object that the plugin printed,
// unchanged.
func (d *delegatedIPAM) wrap(err error) error {
	code := codePluginFailed
	switch {
	case err == nil, errors.As(err, new(*types.Error)):
		return err
	case errors.Is(err, delegate.ErrNotFound):
		code = codePluginMissing
	case errors.Is(err, delegate.ErrSelf):
		code, err = codeInvalidConfig, fmt.Errorf("%w: name an IPAM plugin", err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		code = types.ErrTryAgainLater
	case errors.Is(err, delegate.ErrBadResult):
		code = types.ErrDecodingFailure
	}

	return withCode(code, fmt.Errorf("network %q: ipam.type: %w", d.network, err))
}
