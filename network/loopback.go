package network

import (
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/loopback"
)

// openLoopback opens the way from the host's 127.0.0.1 to a network that is there but for
// it, under the exclusive lock. A network has its first host port time and again, so
// that does not take building all of it.
func (s *session) openLoopback(ctx context.Context, b *built) error {
	before := *b.shut
	if err := loopback.Open(ctx, s.dir, b.shut, b.bridge, s.warn); err != nil {
		return err
	}
	if b.shut.LoopbackKept == before.LoopbackKept && b.shut.LoopbackUnkept == before.LoopbackUnkept {
		return nil
	}
	if err := s.dir.SaveNetwork(b.shut); err != nil {
		return fail.State(err)
	}
	return nil
}

// closeLoopbackAfter is for when these attachments have gone. One without a record, or
// that was never ready, may have got as far as having ports; unknown is the bridge of one that
// does not tell.
func (s *session) closeLoopbackAfter(ctx context.Context, unknown string, gone ...*state.Attachment) error {
	known := map[string]bool{} // by bridge: that one did
	for _, rec := range gone {
		bridgeName := unknown
		if rec != nil && rec.Bridge != "" {
			bridgeName = rec.Bridge
		}
		ready := rec != nil && rec.State == state.Ready
		if ready && !endpoint.PublishesIPv4(rec) {
			continue
		}
		if bridgeName == "" {
			continue
		}
		known[bridgeName] = known[bridgeName] || ready
	}
	var errs []error
	for bridgeName, known := range known {
		errs = append(errs, s.closeLoopback(ctx, bridgeName, known))
	}
	return errors.Join(errs...)
}

// closeLoopback takes back what loopback.Open made for a bridge, if no pod needs it any
// more. known says that one behind the bridge did. With others there it takes a listing
// of theirs in the firewall; only with none the exclusive lock.
func (s *session) closeLoopback(ctx context.Context, bridgeName string, known bool) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	needed := func() (bool, error) {
		l, err := s.br.Link(ctx, bridgeName)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !l.RouteLocalnet {
			return true, nil
		}
		if err != nil {
			return false, err
		}
		return s.fw.HasPorts(ctx, bridgeName)
	}
	work := func() error {
		// Their elements may have been flushed.
		if used, err := loopback.Published(s.dir, bridgeName, s.warn); used || err != nil {
			return err
		}
		return loopback.Shut(ctx, s.br, bridgeName, known)
	}
	if s.lock.Mode() == state.Shared {
		return s.lock.Ensure(ctx, needed, work)
	}
	if is, err := needed(); is || err != nil {
		return err
	}
	return work()
}
