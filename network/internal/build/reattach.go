package build

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/nft"
)

// followLease brings an attachment's record up to its lease: where the server gave the
// pod another address since its Add, the keeper has changed the pod's, and what else
// goes by the address follows here.
func followLease(ctx context.Context, s *session.Session, n *state.Network, a *state.Attachment) error {
	if a.IPAMType != endpoint.Leased || len(a.Addresses) == 0 {
		return nil
	}
	dir, err := lease.Open(a.DataDir)
	if err != nil {
		return err
	}
	rec, err := dir.Load(a.Hash())
	if err != nil || rec.State != lease.Bound || rec.Lease.Address == a.Addresses[0].Prefix {
		return nil // what is wrong with a lease is for Check to say
	}
	// A Del that has it takes the elements by the record of now.
	lock, err := s.Dir.LockAttachment(a.Network, a.Hash())
	if err != nil {
		return nil
	}
	defer lock.Close()
	old := endpoint.Of(a)
	moved := a.Addresses[0]
	moved.Prefix, moved.Gateway = rec.Lease.Address, netip.Addr{}
	if len(rec.Lease.Routers) > 0 {
		moved.Gateway = rec.Lease.Routers[0]
	}
	a.HostGateways = a.HostGateways.Moved(a.Addresses[0].Prefix, moved.Prefix)
	a.Addresses[0] = moved
	if err := s.Firewall.Move(ctx, old, endpoint.In(a, n)); err != nil {
		return err
	}
	if err := s.Dir.UpdateLocked(a); err != nil {
		return fail.State(err)
	}
	return nil
}

// restoreLimits puts a pod's limits back.
func restoreLimits(ctx context.Context, s *session.Session, rec *state.Attachment, port *bridge.Link) error {
	shape := recorded.Shape(rec)
	if shape.IsZero() {
		return nil
	}
	target := recorded.Target(rec)
	target.PortIndex = port.Index
	_, err := bandwidth.On(s.Links.Socket()).Ensure(ctx, target, shape)
	return err
}

// reattach puts right what the pods that are there have in the kernel: their
// elements, their ports' membership and flags, and their limits.
func reattach(ctx context.Context, s *session.Session, rec *state.Network, attachments []*state.Attachment) error {
	for _, a := range attachments {
		if a.State != state.Ready && (!a.Guarded || !rec.Guard) {
			continue // its own ADD is at it, or never came to its end
		}
		l, err := s.Links.Link(ctx, a.HostIf)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the pod is gone, and its DEL still to come
		}
		if err != nil {
			return err
		}
		if a.State != state.Ready {
			// Its ADD waits for its lease, and the pod has its interface already.
			if err := s.Firewall.Replace(ctx, endpoint.In(a, rec)); err != nil {
				return err
			}
			continue
		}
		if err := followLease(ctx, s, rec, a); err != nil {
			return err
		}
		// Before the port is on the bridge again: what it may send goes by this.
		if err := s.Firewall.Replace(ctx, endpoint.In(a, rec)); err != nil {
			return err
		}
		if err := enslave(ctx, s, a, l); err != nil {
			return err
		}
		if err := restoreLimits(ctx, s, a, l); err != nil {
			return err
		}
	}
	return nil
}

// enslave puts a pod's port back on its bridge, which may be another than that of
// its network by now, and gone.
func enslave(ctx context.Context, s *session.Session, a *state.Attachment, l *bridge.Link) error {
	br, err := s.Links.Link(ctx, a.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	port := recorded.PortOn(a, br)
	// Of an entry, and of VLANs, there is no knowing here.
	if br.Kind != "bridge" || recorded.PortFits(l, br, &port) && !port.StaticFDB && port.VLAN.IsZero() {
		return nil
	}
	port.BridgeIndex = br.Index
	return s.Links.Enslave(ctx, port)
}

// mendOthers puts the rules and elements of the other networks right that have
// attachments. Those that have none are mended by their next ADD.
func mendOthers(ctx context.Context, s *session.Session, except string) error {
	others, _, err := s.Dir.ListNetworks()
	if err != nil {
		return fail.State(err)
	}
	r := &repair{s: s}
	for _, o := range others {
		if o.Name == except {
			continue
		}
		if err := r.network(ctx, o); err != nil {
			s.Warn(err.Error()) // its own next ADD says so
		}
	}
	return declareMended(ctx, s, r.mended)
}

// declareMended says that the sets of networks have all that belongs there.
func declareMended(ctx context.Context, s *session.Session, networks []nft.Network) error {
	for _, n := range networks {
		if _, err := s.Firewall.Ensure(ctx, n); err != nil {
			return fmt.Errorf("network %s: %w", n.Name, err)
		}
	}
	return nil
}

// restore brings a network back that is on record, and gives what it is to the firewall:
// see declareMended. It says whether anything was missing that other networks have a part in.
// After a failure, the network's own next ADD tries again: others may declare mended what all
// share.
func restore(ctx context.Context, s *session.Session, rec *state.Network, attachments []*state.Attachment, w *Want) (nft.Network, bool, error) {
	n, changed, err := bringBack(ctx, s, rec, attachments, w)
	if err != nil {
		rec.ConfigHash = ""
		return n, changed, errors.Join(fmt.Errorf("network %s: %w", rec.Name, err), s.Dir.SaveNetwork(rec))
	}
	return n, changed, nil
}

func bringBack(ctx context.Context, s *session.Session, rec *state.Network, attachments []*state.Attachment, w *Want) (nft.Network, bool, error) {
	if rec.Uplink != "" {
		if err := s.Uplinks().Mend(ctx, rec.Uplink, nil); err != nil {
			return nft.Network{}, false, err
		}
	}
	l, _, changed, err := establish(ctx, s, rec, attachments, w)
	if err != nil {
		return nft.Network{}, true, err // how far it has come is not known
	}
	// Rules in the chains of others have new numbers.
	if err := s.Dir.SaveNetwork(rec); err != nil {
		return nft.Network{}, changed, fail.State(err)
	}
	return recorded.Rules(rec, l), changed, nil
}
