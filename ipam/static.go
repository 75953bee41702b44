package ipam

import (
	"context"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
)

// Static gives the same addresses to whatever asks. Nothing is reserved: whether they are
// free is up to the program that names them.
type Static []Address

// Bind returns s: it need not know the node.
func (s Static) Bind(Node) Allocator { return s }

// Slow is false.
func (Static) Slow() bool { return false }

// Add returns the addresses, or tombolo.ErrInvalid where there is none or one is no address.
func (s Static) Add(ctx context.Context, _ Owner) (*Allocation, error) {
	if err := needContext(ctx, "give static addresses"); err != nil {
		return nil, err
	}
	if len(s) == 0 {
		return nil, newError(tombolo.ErrInvalid, "give static addresses: %s: there is none", tombolo.ErrInvalid)
	}
	for _, a := range s {
		if !a.Prefix.IsValid() || a.Prefix.Addr().Zone() != "" || a.Gateway.Zone() != "" {
			return nil, newError(tombolo.ErrInvalid, "give static addresses: %s: %s", tombolo.ErrInvalid, a)
		}
	}
	return &Allocation{Addresses: ipv4First(s)}, nil
}

// Del has nothing to release.
func (s Static) Del(ctx context.Context, _ Owner, _ []netip.Addr) error {
	return needContext(ctx, "release static addresses")
}

// Check fails where one of the addresses is not held, with the same gateway if it has one.
func (s Static) Check(ctx context.Context, _ Owner, held []Address) error {
	if err := needContext(ctx, "check static addresses"); err != nil {
		return err
	}
	for _, a := range s {
		if !slices.ContainsFunc(held, a.isHeldAs) {
			return newError(ErrNotReserved, "the attachment has no address %s", a)
		}
	}
	return nil
}

// isHeldAs compares the address, and the gateway if a names one.
func (a Address) isHeldAs(held Address) bool {
	return held.Prefix.Addr() == a.Prefix.Addr() && (!a.Gateway.IsValid() || held.Gateway.Unmap() == a.Gateway.Unmap())
}

// Collect has nothing to release.
func (s Static) Collect(ctx context.Context, _ []Owner) error {
	return needContext(ctx, "collect static addresses")
}

// Status is always good.
func (s Static) Status(ctx context.Context) error {
	return needContext(ctx, "status of static addresses")
}
