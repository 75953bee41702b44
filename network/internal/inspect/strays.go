package inspect

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Strays is what the kernel has of attachments that no record tells of.
type Strays struct {
	// Ports are in words those whose port is there, by their hashes, and so is a pod: only its Del, or
	// a garbage collection that does not name it, takes it down.
	Ports map[string]string
	// Elements and IFBs belong to no port, and to nobody: by their hashes.
	Elements map[string]string // the network
	IFBs     map[string]string // the link's name
	// Others are another program's elements, in words.
	Others []string
}

// FindStrays looks for them. known are the hashes of the records there are, and networks the
// names of all networks on record.
func FindStrays(ctx context.Context, s *session.Session, known map[string]bool, networks []string) (*Strays, error) {
	links, err := s.Links.Veths(ctx)
	if err != nil {
		return nil, err
	}
	f := &Strays{Ports: map[string]string{}, Elements: map[string]string{}, IFBs: map[string]string{}}
	for i := range links {
		if a, ok := endpoint.ParseAlias(links[i].Alias); ok && !known[a.Hash] {
			f.Ports[a.Hash] = "port " + links[i].Name + " of network " + a.Network + " has no record"
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
		case ident.IsHash(hash) && (slices.Contains(networks, e.Network) || strings.Contains(e.Network, "/")):
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

// Differences are the strays in words, by their hashes.
func (f *Strays) Differences() []tombolo.Difference {
	found := &Findings{}
	for _, hash := range slices.Sorted(maps.Keys(f.Ports)) {
		found.Advise(tombolo.RemedyRecreate, "%s", f.Ports[hash])
	}
	for _, hash := range slices.Sorted(maps.Keys(f.Elements)) {
		found.Advise(tombolo.RemedyRepair, "elements of endpoint %s of network %s have no record", hash, f.Elements[hash])
	}
	for _, hash := range slices.Sorted(maps.Keys(f.IFBs)) {
		found.Advise(tombolo.RemedyRepair, "link %s has no record", f.IFBs[hash])
	}
	return found.List
}
