package chained

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/elements"
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
	onHost, err := in.RestsHere(conn)
	if err != nil {
		return err
	}
	if onHost && in.Kind == "veth" {
		l, err := s.Links.LinkByIndex(ctx, in.Lower)
		if err == nil {
			a.HostIf, a.MTU = l.Name, l.MTU
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for _, address := range endpoint.Addresses(a) {
		r, err := s.Links.Routes().Get(address)
		if err == nil && r.Type == unix.RTN_LOCAL {
			a.Bridge = "" // the host itself would answer, or send, in the pod's place
			return nil
		}
		if err != nil || r.Type != unix.RTN_UNICAST || a.Bridge != "" {
			continue // the next address may have a route; this may be that of all machines
		}
		l, err := s.Links.LinkByIndex(ctx, r.Link)
		if err != nil {
			return err
		}
		a.Bridge = l.Name
	}
	return nil
}

// refuseOthers refuses an attachment of another program's that has an address of another pod: a DHCP server, for one,
// may give it any. What the host leads to by that is the pod of ours that has it.
func (at Attachment) refuseOthers(ctx context.Context, s *session.Session, a *state.Attachment) error {
	if !a.Other {
		return nil
	}
	entry := &elements.Entry{Session: s, Hash: at.Hash, ContainerID: a.ContainerID}
	for _, own := range endpoint.Addresses(a) {
		held, err := s.Firewall.AddressOwner(ctx, a.Bridge, own)
		if err != nil {
			return err
		}
		if held == nil || held.Owner == "" {
			continue
		}
		// One of another program's that died may have no link by which that could be seen.
		rec, err := s.Dir.Load(held.Network, string(held.Owner))
		if err != nil || rec.ContainerID == a.ContainerID {
			continue
		}
		if stale, err := entry.IsStale(ctx, held); err != nil || !stale {
			return errors.Join(err, fmt.Errorf("interface %s of container %s has an address of another pod's: %w", a.IfName, a.ContainerID, held))
		}
	}
	return nil
}
