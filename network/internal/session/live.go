package session

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

// IFBs lists whose links for egress there are, by the links' names.
func (s *Session) IFBs(ctx context.Context) (map[string]endpoint.Mark, error) {
	ifbs, err := bandwidth.On(s.Links.Socket()).IFBs(ctx)
	if err != nil {
		return nil, err
	}
	found := map[string]endpoint.Mark{}
	for _, ifb := range ifbs {
		if a, ok := endpoint.ParseAlias(ifb.Alias); ok {
			found[ifb.Name] = a
		}
	}
	return found, nil
}

// IPAMNode is what an allocator of a network is told of the node, for an attachment whose hash
// is known: the zero Owner is for all.
func (s *Session) IPAMNode(network string, own ipam.Owner, hash string) ipam.Node {
	return ipam.Node{
		Epoch: ipam.Epoch{Token: s.Epoch.Token(), Started: s.Dir.Begun(s.Epoch)},
		Live:  func(ctx context.Context) ([]ipam.Live, error) { return s.live(ctx, network) },
		Hash: func(o ipam.Owner) string {
			if hash != "" && o == own {
				return hash
			}
			return ident.Hash(network, o.ContainerID, o.IfName)
		},
		InUse: func(hash string) bool {
			_, err := s.Dir.Load(network, hash)
			return !errors.Is(err, fs.ErrNotExist)
		},
		Warn: s.Warn,
	}
}

// Renamed says whether an attachment's port is there by another name: its alias stays.
func (s *Session) Renamed(ctx context.Context, hash string) (bool, error) {
	links, err := s.Links.Veths(ctx)
	return slices.ContainsFunc(links, func(l bridge.Link) bool {
		return l.Name != "veth"+hash && strings.HasPrefix(l.Alias, endpoint.AliasOwner(hash))
	}), err
}

// live lists the addresses that pods of a network have in the kernel, by the aliases of their ports.
func (s *Session) live(ctx context.Context, network string) ([]ipam.Live, error) {
	links, err := s.Links.Veths(ctx)
	var list []ipam.Live
	for i := range links {
		a, ok := endpoint.ParseAlias(links[i].Alias)
		if !ok || a.Network != endpoint.NetworkToken(network) {
			continue
		}
		for _, ip := range a.Addresses {
			list = append(list, ipam.Live{Hash: a.Hash, Addr: ip})
		}
	}
	return list, err
}

// Unused says that nothing on the node needs what a network has: it has no attachments, and no
// uplink of the host is taken over for it.
func (s *Session) Unused(rec *state.Network, attachments []*state.Attachment) (bool, error) {
	if len(attachments) > 0 {
		return false, nil
	}
	if rec.Uplink == "" {
		return true, nil
	}
	taken, err := s.Uplinks().IsTaken(rec.Uplink)
	return !taken, err
}

// IsDeserted says whether a network's bridge is gone and no pod is left: nerdctl and podman delete
// the bridge with the network, without a word to the plugins, and give its subnet to the next one.
func (s *Session) IsDeserted(ctx context.Context, o *state.Network) (bool, error) {
	if o.Uplink != "" {
		return false, nil
	}
	if _, err := s.Links.Link(ctx, o.Bridge); !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	attachments, err := s.Attachments(o.Name)
	return len(attachments) == 0, err
}

// Died says that the pod whose attachment is on record is gone: the record can be read, and
// names a port that is not there any more.
func (s *Session) Died(ctx context.Context, network, hash string) bool {
	if _, err := s.Dir.Load(network, hash); err != nil {
		return false
	}
	_, err := s.Links.Link(ctx, "veth"+hash)
	return errors.Is(err, fs.ErrNotExist)
}
