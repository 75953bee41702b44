package teardown

import (
	"context"
	"errors"
	"io/fs"
	"slices"

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

// CloseLoopback takes back what loopback.Open made for a bridge, if no pod needs it any more. known says that a
// pod behind the bridge had such ports. While other pods are there, it takes one listing of the firewall, and only
// without any the exclusive lock.
func CloseLoopback(ctx context.Context, s *session.Session, bridgeName string, known bool) error {
	if err := s.Enter(ctx); err != nil {
		return err
	}
	needed := func() (bool, error) {
		l, err := s.Links.Link(ctx, bridgeName)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !l.RouteLocalnet {
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
		return loopback.Shut(ctx, s.Links, bridgeName, known)
	}
	return s.Ensure(ctx, needed, work)
}

// Unpublished takes back what the way from 127.0.0.1 to an attachment's ports needed, unless other pods need it. For
// a pod in a VLAN that is of two links: of the host's in the VLAN, and of the bridge.
func Unpublished(ctx context.Context, s *session.Session, rec *state.Attachment) error {
	return closeLoopbackAfter(ctx, s, Known{}, rec)
}

// NotPublished is Unpublished for an attachment whose record has no ports, where a killed call may have left some
// of it.
func NotPublished(ctx context.Context, s *session.Session, rec *state.Attachment) error {
	var errs []error
	for _, name := range slices.Compact([]string{rec.Bridge, rec.GatewayLink()}) {
		if name != "" {
			errs = append(errs, CloseLoopback(ctx, s, name, false))
		}
	}
	return errors.Join(errs...)
}
