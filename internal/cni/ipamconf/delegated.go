package ipamconf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
)

// delegated runs a plugin of another project.
type delegated struct {
	*local
	plugin  *delegate.Plugin
	inOrder bool // addresses are reported as the plugin has them
	warn    func(string)
}

// self is this program, as the kernel knows it.
const self = "/proc/self/exe"

func newDelegated(r *Request) Allocator {
	plugin := r.Plugin
	plugin.Self = self
	return &delegated{local: r.local(), inOrder: r.ByName, warn: r.Warn, plugin: &plugin}
}

// slow is what a plugin is to a caller that has locks.
const slow = "a plugin"

// Bind returns d: a plugin looks after itself.
func (d *delegated) Bind(ipam.Node) ipam.Allocator { return d }

// Slow is true: nobody here knows how long a plugin takes.
func (d *delegated) Slow() bool { return true }

// Add runs the plugin, and where that fails runs it with DEL, as section 4 of
// the CNI specification 1.1.0 asks. Of the result, what is not an IPAM plugin's
// to say is dropped.
func (d *delegated) Add(ctx context.Context, _ ipam.Owner) (*ipam.Allocation, error) {
	lockorder.Slow(slow)
	result, err := d.plugin.Add(ctx)
	if err != nil {
		return nil, d.undo(ctx, err)
	}
	d.dns = result.DNS
	addresses, err := readAddresses(result)
	if err == nil {
		d.routes, err = Routes(result.Routes)
	}
	if err != nil {
		return nil, d.undo(ctx, err)
	}
	if d.inOrder {
		d.reported = slices.Clone(addresses)
	}
	slices.SortStableFunc(addresses, func(a, b ipam.Address) int { return cmp.Compare(a.Prefix.Addr().BitLen(), b.Prefix.Addr().BitLen()) })
	return d.given(addresses), nil
}

// readAddresses takes the addresses out of a plugin's result.
func readAddresses(result *current.Result) ([]ipam.Address, error) {
	var list []ipam.Address
	for i, ip := range result.IPs {
		prefix, ok := Prefix(ip.Address)
		if !ok {
			return nil, newError(types.ErrDecodingFailure, "the ipam's ips[%d] is no address with a prefix length: %s", i, ip.Address.String())
		}
		gateway, _ := netip.AddrFromSlice(ip.Gateway)
		gateway = gateway.Unmap()
		if gateway.IsValid() && gateway.BitLen() != prefix.Addr().BitLen() {
			return nil, newError(codeInvalidConfig, "the ipam's ips[%d]: the gateway %s is not of the family of %s", i, gateway, prefix)
		}
		list = append(list, ipam.Address{Prefix: prefix, Gateway: gateway})
	}
	return list, nil
}

// undo runs DEL after an ADD that failed with cause, also where ctx has ended.
// The cause stays the first error, so that its code is the one that is
// reported.
func (d *delegated) undo(ctx context.Context, cause error) error {
	wrapped := d.wrap(cause)
	if errors.Is(cause, delegate.ErrNotFound) || errors.Is(cause, delegate.ErrSelf) {
		return wrapped
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), network.UndoTimeout)
	defer cancel()
	if err := d.plugin.Del(ctx); err != nil {
		return errors.Join(wrapped, fmt.Errorf("undo the failed ADD: %w", d.wrap(err)))
	}
	return wrapped
}

// Del runs the plugin, which keeps its own books: the hint is of no use to it.
func (d *delegated) Del(ctx context.Context, owner ipam.Owner, _ []netip.Addr) error {
	lockorder.Slow(slow)
	of := *d.plugin
	if owner.ContainerID != of.ContainerID || owner.IfName != of.IfName {
		// GC, and an ADD that takes a dead pod down, are about other attachments than their own.
		of.ContainerID, of.IfName, of.NetNS, of.Args = owner.ContainerID, owner.IfName, "", ""
	}
	return d.wrap(d.unlessSelf(of.Del(ctx)))
}

// unlessSelf makes a warning of ErrSelf, for teardown: of this program no ADD has
// ever got an address, so there is none to give back.
func (d *delegated) unlessSelf(err error) error {
	if errors.Is(err, delegate.ErrSelf) {
		d.warn(d.wrap(err).Error())
		return nil
	}
	return err
}

// Check runs the plugin, which finds prevResult in the netconf.
func (d *delegated) Check(ctx context.Context, _ ipam.Owner, _ []ipam.Address) error {
	lockorder.Slow(slow)
	return d.wrap(d.plugin.Check(ctx))
}

// Collect runs the plugin, which finds the valid attachments in the netconf.
func (d *delegated) Collect(ctx context.Context, _ []ipam.Owner) error {
	lockorder.Slow(slow)
	return d.wrap(d.unlessSelf(d.plugin.GC(ctx)))
}

// Status runs the plugin. That it is missing is code 50; what it says itself
// keeps its code.
func (d *delegated) Status(ctx context.Context) error {
	lockorder.Slow(slow)
	err := d.wrap(d.plugin.Status(ctx))
	var own *types.Error
	if errors.As(err, &own) && (own.Code == CodePluginMissing || own.Code == CodePluginFailed) {
		return withCode(codeNotAvailable, err)
	}
	return err
}

// wrap gives an error that is not the plugin's own a code.
func (d *delegated) wrap(err error) error {
	code := CodePluginFailed
	switch {
	case err == nil, errors.As(err, new(*types.Error)):
		return err
	case errors.Is(err, delegate.ErrNotFound):
		code = CodePluginMissing
	case errors.Is(err, delegate.ErrSelf):
		code, err = codeInvalidConfig, fmt.Errorf("%w: name an IPAM plugin", err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		code = types.ErrTryAgainLater
	case errors.Is(err, delegate.ErrBadResult):
		code = types.ErrDecodingFailure
	}
	return withCode(code, fmt.Errorf("network %q: ipam.type: %w", d.network, err))
}
