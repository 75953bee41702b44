package teardown

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/loopback"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// closeLoopbackAfter is for when these attachments have gone. One without a record, or
// that was never ready, may have got as far as having ports; unknown is of one that does not
// tell.
func closeLoopbackAfter(ctx context.Context, s *session.Session, unknown Known, gone ...*state.Attachment) error {
	known := map[string]bool{} // by bridge: that one did
	for _, rec := range gone {
		names := []string{unknown.Bridge, unknown.GatewayLink}
		if rec != nil && rec.Bridge != "" {
			names = []string{rec.Bridge, rec.GatewayLink()}
		}
		ready := rec != nil && rec.State == state.Ready
		if ready && !endpoint.PublishesIPv4(rec) {
			continue
		}
		for _, name := range names {
			if name != "" {
				known[name] = known[name] || ready
			}
		}
	}
	var errs []error
	for bridgeName, known := range known {
		errs = append(errs, CloseLoopback(ctx, s, bridgeName, known))
	}
	return errors.Join(errs...)
}

// CloseLoopback takes back what loopback.Open made for a bridge, if no pod needs it any more. route_localnet
// stays where pods of the reference's plugins need it. known says that a pod behind the bridge had such ports.
// While other pods are there, it takes one listing of the firewall, and only without any the exclusive lock.
func CloseLoopback(ctx context.Context, s *session.Session, bridgeName string, known bool) error {
	return closeLoopback(ctx, s, bridgeName, known, false)
}

// closeLoopback is CloseLoopback, with half also of what a killed call has left half made.
func closeLoopback(ctx context.Context, s *session.Session, bridgeName string, known, half bool) error {
	if err := s.Enter(ctx); err != nil {
		return err
	}
	needed := func() (bool, error) {
		l, err := s.Links.Link(ctx, bridgeName)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !l.RouteLocalnet && !half {
			return true, nil
		}
		if err != nil {
			return false, err
		}
		return s.Firewall.HasPorts(ctx, bridgeName)
	}
	work := func() error {
		// Their elements may have been flushed.
		if used, err := loopback.Published(s.Dir, bridgeName, s.Warn); used || err != nil {
			return err
		}
		shut := loopback.Shut
		if leads, err := publishedByReference(ctx, s, bridgeName); err != nil {
			return err
		} else if leads {
			shut = loopback.Leave
		}
		return shut(ctx, s.Links, bridgeName, known)
	}
	return s.Ensure(ctx, needed, work)
}

// publishedByReference says whether ports of the reference's plugin portmap lead from 127.0.0.1 to pods in the
// subnets of a bridge. The plugin has set route_localnet for them too, and does not look again.
func publishedByReference(ctx context.Context, s *session.Session, bridgeName string) (bool, error) {
	pods, err := s.Foreign("").ReferencePublished(ctx)
	if err != nil || len(pods) == 0 {
		return false, err
	}
	l, err := s.Links.Link(ctx, bridgeName)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	gateways, err := s.Links.Addresses().List(addr.Filter{Link: l.Index, Family: unix.AF_INET})
	return slices.ContainsFunc(gateways, func(gw addr.Address) bool {
		return slices.ContainsFunc(pods, gw.Prefix.Overlaps)
	}), err
}
