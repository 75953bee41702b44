package network

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/inspect"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/nft"
)

// NetworkReport is the same of a network's own parts.
type NetworkReport struct {
	Network     string   `json:"network"`
	Differences []string `json:"differences"`
}

// Inspection is what Inspect found.
type Inspection struct {
	Attachments []Report        `json:"attachments"`
	Networks    []NetworkReport `json:"networks,omitempty"` // those with differences
	// Stray is what the kernel has of ours and no record tells of.
	Stray []string `json:"stray,omitempty"`
	// Others is what another program has in the firewall's table: elements of owners and
	// networks that no record tells of. It is no difference.
	Others []string `json:"others,omitempty"`
	// Damaged are the records that cannot be read.
	Damaged []string `json:"damaged,omitempty"`
}

// Differs says whether anything is not as it should be.
func (in *Inspection) Differs() bool {
	return in != nil && (len(in.Networks)+len(in.Stray)+len(in.Damaged) > 0 ||
		slices.ContainsFunc(in.Attachments, func(r Report) bool { return len(r.Differences) > 0 }))
}

// Inspect compares all attachments on record with the kernel and with the pods'
// namespaces. It changes nothing and takes no lock: what comes and goes meanwhile may
// show as different.
func (n *Node) Inspect(ctx context.Context) (*Inspection, error) {
	if err := n.usable(ctx); err != nil {
		return nil, err
	}
	s, err := n.openKnown()
	if err != nil {
		return nil, err
	}
	defer s.Close()
	networks, err := s.Dir.Networks()
	if err != nil {
		return nil, fail.State(err)
	}
	in := &Inspection{Attachments: []Report{}}
	known := map[string]bool{}
	for _, name := range networks {
		if err := in.network(ctx, s, name, known); err != nil {
			return nil, err
		}
	}
	in.Stray, in.Others, err = inspect.Strays(ctx, s, known, networks)
	return in, err
}

func (in *Inspection) network(ctx context.Context, s *session.Session, name string, known map[string]bool) error {
	attachments, damaged, err := s.Dir.List(name)
	if err != nil {
		return fail.State(err)
	}
	for _, d := range damaged {
		in.Damaged = append(in.Damaged, d.Error())
	}
	var n nft.Network
	rec, err := s.Dir.LoadNetwork(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		rec = nil
	case err != nil:
		in.Damaged = append(in.Damaged, err.Error())
		rec = nil
	default:
		var diffs []string
		if n, diffs, err = inspect.Network(ctx, s, rec, attachments); err != nil {
			return err
		}
		if len(diffs) > 0 {
			in.Networks = append(in.Networks, NetworkReport{name, diffs})
		}
	}
	for _, a := range attachments {
		known[a.Hash()] = true
		report := Report{Attachment: attachmentOf(a)}
		switch {
		case a.State != state.Ready:
			report.Differences = []string{"its ADD has not come to its end"}
		case rec == nil:
			report.Differences = []string{"its network has no record"}
		default:
			if report.Differences, err = inspect.Attachment(ctx, s, n, a); err != nil {
				return err
			}
		}
		in.Attachments = append(in.Attachments, report)
	}
	return nil
}

// Summary says in a line how many things an inspection found.
func (in *Inspection) Summary() string {
	if in == nil {
		in = &Inspection{}
	}
	differing := 0
	for _, r := range in.Attachments {
		if len(r.Differences) > 0 {
			differing++
		}
	}
	parts := []string{fail.Count(len(in.Attachments), "attachment", "attachments")}
	for _, part := range []struct {
		n         int
		one, many string
	}{
		{differing, "of them differs", "of them differ"},
		{len(in.Networks), "network differs", "networks differ"},
		{len(in.Stray), "stray object", "stray objects"},
		{len(in.Damaged), "damaged record", "damaged records"},
	} {
		if part.n > 0 {
			parts = append(parts, fail.Count(part.n, part.one, part.many))
		}
	}
	return strings.Join(parts, ", ")
}
