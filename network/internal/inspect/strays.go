package inspect

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Strays is what the kernel has of attachments that no record tells of.
type Strays struct {
	// Ports are those whose port is there, by their hashes, and so is a pod: only its Del, or
	// a garbage collection that does not name it, takes it down.
	Ports map[string]endpoint.Mark
	// Elements and IFBs belong to no port, and to nobody: by their hashes.
	Elements map[string]string // the network
	IFBs     map[string]string // the link's name
	// Bridges are those that somebody renamed, and in whose place there is another one.
	Bridges []StrayBridge
	// Others are another program's elements, in words.
	Others []string

	names map[string]string // of ports
}

// StrayBridge is a bridge that was a network's.
type StrayBridge struct {
	recorded.RenamedBridge
	Foreign string // a port that is no pod's on record; empty for none
}

// FindStrays looks for them. known are the hashes of the records there are, and networks the
// names of all networks on record.
func FindStrays(ctx context.Context, s *session.Session, known map[string]bool, networks []string) (*Strays, error) {
	links, err := s.Links.Veths(ctx)
	if err != nil {
		return nil, err
	}
	f := &Strays{Ports: map[string]endpoint.Mark{}, Elements: map[string]string{}, IFBs: map[string]string{}, names: map[string]string{}}
	if err := f.findBridges(ctx, s, known); err != nil {
		return nil, err
	}
	for i := range links {
		if a, ok := endpoint.ParseAlias(links[i].Alias); ok && !known[a.Hash] {
			f.Ports[a.Hash], f.names[a.Hash] = a, links[i].Name
		}
	}
	endpoints, err := s.Firewall.Endpoints(ctx, "")
	if err != nil {
		return nil, err
	}
	for _, e := range endpoints {
		hash := string(e.Owner)
		_, has := f.Ports[hash]
		switch {
		case known[hash] || has:
		// The name of a network is cut where it is too long for a comment.
		case state.IsHash(hash) && (slices.Contains(networks, e.Network) || strings.Contains(e.Network, "/")):
			f.Elements[hash] = e.Network
		default:
			f.Others = append(f.Others, "elements of endpoint "+hash+" of network "+e.Network+" are another program's: no record tells of either")
		}
	}
	ifbs, err := s.IFBs(ctx)
	if err != nil {
		return nil, err
	}
	for name, a := range ifbs {
		if _, has := f.Ports[a.Hash]; !has && !known[a.Hash] {
			f.IFBs[a.Hash] = name
		}
	}
	return f, nil
}

// findBridges looks for bridges. One in whose place there is none gets its name back: see build.
func (f *Strays) findBridges(ctx context.Context, s *session.Session, known map[string]bool) error {
	records, _, err := s.Dir.ListNetworks()
	if err != nil || len(records) == 0 {
		return err
	}
	renamed, err := recorded.Renamed(ctx, s.Links, records)
	if err != nil {
		return err
	}
	for _, l := range renamed {
		if _, err := s.Links.Link(ctx, l.Was); errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return err
		}
		ports, err := s.Links.Ports(ctx, l.Index)
		if err != nil {
			return err
		}
		stray := StrayBridge{RenamedBridge: l}
		for _, p := range ports {
			if a, ok := endpoint.ParseAlias(p.Alias); !ok || !known[a.Hash] {
				stray.Foreign = p.Name
			}
		}
		f.Bridges = append(f.Bridges, stray)
	}
	return nil
}

// Differences are the strays in words, by their hashes.
func (f *Strays) Differences() []tombolo.Difference {
	found := &Findings{}
	for _, l := range f.Bridges {
		remedy, rest := tombolo.RemedyRepair, ""
		if l.Foreign != "" {
			remedy, rest = tombolo.RemedyConfigure, ", and has another port: take off "+l.Foreign+", and then run tombolo repair"
		}
		found.Advise(remedy, "bridge %s was renamed from %s, which is there anew%s", l.Name, l.Was, rest)
	}
	for _, hash := range slices.Sorted(maps.Keys(f.names)) {
		found.Advise(tombolo.RemedyRecreate, "port %s of network %s has no record", f.names[hash], f.Ports[hash].Network)
	}
	for _, hash := range slices.Sorted(maps.Keys(f.Elements)) {
		found.Advise(tombolo.RemedyRepair, "elements of endpoint %s of network %s have no record", hash, f.Elements[hash])
	}
	for _, hash := range slices.Sorted(maps.Keys(f.IFBs)) {
		found.Advise(tombolo.RemedyRepair, "link %s has no record", f.IFBs[hash])
	}
	return found.List
}
