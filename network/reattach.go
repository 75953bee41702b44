package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/nft"
)

// reattach puts right what the pods that are there have in the kernel: their
// elements, their ports' membership and flags, and their limits.
func (s *session) reattach(ctx context.Context, rec *state.Network, attachments []*state.Attachment) error {
	for _, a := range attachments {
		if a.State != state.Ready && (!a.Guarded || !rec.Guard) {
			continue // its own ADD is at it, or never came to its end
		}
		l, err := s.br.Link(ctx, a.HostIf)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the pod is gone, and its DEL still to come
		}
		if err != nil {
			return err
		}
		if a.State != state.Ready {
			// Its ADD waits for its lease, and the pod has its interface already.
			if err := s.fw.Replace(ctx, endpoint.In(a, rec)); err != nil {
				return err
			}
			continue
		}
		if err := s.followLease(ctx, rec, a); err != nil {
			return err
		}
		// Before the port is on the bridge again: what it may send goes by this.
		if err := s.fw.Replace(ctx, endpoint.In(a, rec)); err != nil {
			return err
		}
		if err := s.enslave(ctx, a, l); err != nil {
			return err
		}
		if err := restoreLimits(ctx, a, l); err != nil {
			return err
		}
	}
	return nil
}

// enslave puts a pod's port back on its bridge, which may be another than that of
// its network by now, and gone.
func (s *session) enslave(ctx context.Context, a *state.Attachment, l *bridge.Link) error {
	br, err := s.br.Link(ctx, a.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	port := portOn(a, br)
	// Of an entry there is no knowing here.
	if br.Kind != "bridge" || isPort(l, br, &port) && !port.StaticFDB {
		return nil
	}
	port.BridgeIndex = br.Index
	return s.br.Enslave(ctx, port)
}

// mendOthers puts the rules and elements of the other networks right that have
// attachments. Those that have none are mended by their next ADD.
func (s *session) mendOthers(ctx context.Context, except string) error {
	others, damaged, err := s.dir.ListNetworks()
	if err != nil {
		return fail.State(err)
	}
	for _, d := range damaged {
		s.warn(d.Error())
	}
	var mended []nft.Network
	for _, o := range others {
		if o.Name == except {
			continue
		}
		attachments, _, err := s.dir.List(o.Name)
		if err != nil {
			return fail.State(err)
		}
		if len(attachments) == 0 {
			continue
		}
		n, err := s.restore(ctx, o, attachments)
		if err != nil {
			// Its own next ADD says so.
			s.warn(err.Error())
			continue
		}
		mended = append(mended, n)
	}
	return s.declareMended(ctx, mended)
}

// declareMended says that the sets of networks have all that belongs there.
func (s *session) declareMended(ctx context.Context, networks []nft.Network) error {
	for _, n := range networks {
		if _, err := s.fw.Ensure(ctx, n); err != nil {
			return fmt.Errorf("network %s: %w", n.Name, err)
		}
	}
	return nil
}

// restore brings a network back that is on record, and gives what it is to the firewall:
// see declareMended. After a failure, the network's own next ADD tries again: others may
// declare mended what all share.
func (s *session) restore(ctx context.Context, rec *state.Network, attachments []*state.Attachment) (nft.Network, error) {
	n, err := s.bringBack(ctx, rec, attachments)
	if err != nil {
		rec.ConfigHash = ""
		return n, errors.Join(fmt.Errorf("network %s: %w", rec.Name, err), s.dir.SaveNetwork(rec))
	}
	return n, nil
}

func (s *session) bringBack(ctx context.Context, rec *state.Network, attachments []*state.Attachment) (nft.Network, error) {
	if err := s.mendUplink(ctx, rec.Uplink); err != nil {
		return nft.Network{}, err
	}
	l, _, err := s.raise(ctx, rec, attachments, nil)
	if err != nil {
		return nft.Network{}, err
	}
	// Rules in the chains of others have new numbers.
	if err := s.dir.SaveNetwork(rec); err != nil {
		return nft.Network{}, fail.State(err)
	}
	return rules(rec, l), nil
}

// isPort says whether a link is a port of the bridge with the flags that it
// should have.
func isPort(l, br *bridge.Link, p *bridge.Port) bool {
	return l.Master == br.Index && l.Up && l.Port != nil &&
		l.Port.Hairpin == p.Hairpin && l.Port.Isolated == p.Isolated &&
		l.Port.ForwardGroups == p.ForwardGroups && l.ClosedToIP() && l.Alias == p.Alias
}

// portOf is the host's side of an attachment, from its record.
func portOf(a *state.Attachment) bridge.Port {
	on := func(v *bool) bool { return v != nil && *v }
	p := bridge.Port{
		Bridge: a.Bridge, Name: a.HostIf, Peer: a.IfName, MTU: a.MTU,
		Alias:   endpoint.AliasOf(a),
		Hairpin: on(a.Port.Hairpin), Isolated: on(a.Port.Isolated), ForwardGroups: true,
		Down: !a.Up,
	}
	lanPort(&p, a)
	p.MAC, _ = net.ParseMAC(a.HostMAC)
	p.PeerMAC, _ = net.ParseMAC(a.MAC)
	return p
}

// portOn is portOf, with what depends on the bridge that is there.
func portOn(a *state.Attachment, br *bridge.Link) bridge.Port {
	p := portOf(a)
	if p.PeerMAC != nil {
		keepTable(&p, a.Guarded, br)
	}
	return p
}

// portAsRecorded is the port of an attachment, on the bridge that it was attached to.
func (s *session) portAsRecorded(ctx context.Context, rec *state.Attachment) (bridge.Port, error) {
	br, err := s.br.Link(ctx, rec.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return portOf(rec), nil
	}
	if err != nil {
		return bridge.Port{}, err
	}
	return portOn(rec, br), nil
}
