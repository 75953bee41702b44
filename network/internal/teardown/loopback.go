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
	var had, perhaps []string
	for _, rec := range gone {
		switch {
		case rec == nil || rec.Bridge == "":
			perhaps = append(perhaps, unknown.Bridge, unknown.GatewayLink)
		case rec.State != state.Ready:
			perhaps = append(perhaps, rec.Bridge, rec.GatewayLink())
		case endpoint.PublishesIPv4(rec):
			had = append(had, rec.Bridge, rec.GatewayLink())
		}
	}
	return errors.Join(CloseLoopback(ctx, s, true, had...), CloseLoopback(ctx, s, false, perhaps...))
}

// CloseLoopback takes back what loopback.Open made for a bridge, and for the host's link in a VLAN, if no pod needs
// it any more. known says that a pod behind it had ports. While other pods are there, it takes one listing of the
// firewall, and only without any the exclusive lock.
func CloseLoopback(ctx context.Context, s *session.Session, known bool, links ...string) error {
	slices.Sort(links)
	var errs []error
	for _, name := range slices.Compact(links) {
		if name != "" {
			errs = append(errs, closeLoopback(ctx, s, known, name))
		}
	}
	return errors.Join(errs...)
}

func closeLoopback(ctx context.Context, s *session.Session, known bool, name string) error {
	if err := s.Enter(ctx); err != nil {
		return err
	}
	needed := func() (bool, error) {
		l, err := s.Links.Link(ctx, name)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !l.RouteLocalnet {
			return true, nil
		}
		if err != nil {
			return false, err
		}
		return s.Firewall.HasPorts(ctx, name)
	}
	return s.Ensure(ctx, needed, func() error {
		// Their elements may have been flushed.
		if used, err := loopback.Published(s.Dir, name, s.Warn); used || err != nil {
			return err
		}
		return loopback.Shut(ctx, s.Links, name, known)
	})
}
