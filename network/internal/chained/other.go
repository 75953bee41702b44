package chained

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/network/internal/teardown"
)

// Find completes what is known of an interface that another program made: its end on the host, if it
// has one, and the link by which the host reaches it. What is on record of one of the same name that was
// another is taken down.
func (at Attachment) Find(ctx context.Context, s *session.Session) error {
	a := at.Other
	if err := find(ctx, s, a); err != nil {
		return err
	}
	dir := s.Dir.Others()
	lock, err := dir.LockAttachment(at.Network, at.Hash)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fail.State(err)
	}
	defer lock.Close()
	rec, err := dir.Load(at.Network, at.Hash)
	if err == nil && rec.HostIf == a.HostIf && rec.Bridge == a.Bridge && rec.NetNSCookie == a.NetNSCookie && slices.Equal(rec.Addresses, a.Addresses) {
		return nil
	}
	if err != nil {
		s.Warn(err.Error())
		rec = a
	}
	return teardown.Other(ctx, s, rec)
}

func find(ctx context.Context, s *session.Session, a *state.Attachment) error {
	pod, err := netns.Open(a.NetNS)
	if err != nil {
		return err
	}
	defer pod.Close()
	if a.NetNSCookie, err = pod.Cookie(); err != nil {
		return err
	}
	conn, err := nl.Dial(unix.NETLINK_ROUTE, &nl.Config{NetNS: pod})
	if err != nil {
		return err
	}
	defer conn.Close()
	var in link.Link
	var b nl.Batch
	link.Get(&b, a.IfName, 0, &in)
	if err := conn.Execute(&b); err != nil {
		return err
	}
	a.MAC, a.MTU = in.MAC.String(), in.MTU
	if in.Kind == "veth" && in.Elsewhere {
		// An index of a third namespace may be that of another link here.
		l, err := s.Links.LinkByIndex(ctx, in.Lower)
		if err == nil && l.Kind == "veth" && l.Peer == in.Index {
			a.HostIf, a.MTU = l.Name, l.MTU
		} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for _, address := range endpoint.Addresses(a) {
		r, err := s.Links.Routes().Get(address)
		if err != nil || r.Type != unix.RTN_UNICAST {
			continue // the next address may have a route; this may be the host's own, or all machines'
		}
		l, err := s.Links.LinkByIndex(ctx, r.Link)
		if err != nil {
			return err
		}
		a.Bridge = l.Name
		return nil
	}
	return nil
}
