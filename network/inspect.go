package network

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/inspect"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/nft"
)

// NetworkReport is the same of a network's own parts.
type NetworkReport struct {
	Network     string
	Differences []tombolo.Difference
}

// MarshalJSON gives each difference by its text and its remedy.
func (r NetworkReport) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Network     string       `json:"network"`
		Differences []difference `json:"differences"`
	}{r.Network, inWords(r.Differences)})
}

// difference is a tombolo.Difference as JSON has it.
type difference struct {
	Text   string         `json:"text"`
	Remedy tombolo.Remedy `json:"remedy,omitempty"`
}

func inWords(diffs []tombolo.Difference) []difference {
	var list []difference
	for _, d := range diffs {
		list = append(list, difference{d.String(), d.Remedy})
	}
	return list
}

// Inspection is what Inspect found.
type Inspection struct {
	Attachments []Report
	Networks    []NetworkReport // those with differences
	// Uplinks is what differs of takeovers that no network with differences is by.
	Uplinks []tombolo.Difference
	// Stray is what the kernel has of ours and no record tells of.
	Stray []tombolo.Difference
	// Others is what another program has in the firewall's table: elements of owners and
	// networks that no record tells of. It is no difference.
	Others []string
	// Damaged are the records that cannot be read.
	Damaged []tombolo.Difference
}

// MarshalJSON gives each difference by its text and its remedy.
func (in *Inspection) MarshalJSON() ([]byte, error) {
	if in == nil {
		in = &Inspection{}
	}
	return json.Marshal(struct {
		Attachments []Report        `json:"attachments"`
		Networks    []NetworkReport `json:"networks,omitempty"`
		Uplinks     []difference    `json:"uplinks,omitempty"`
		Stray       []difference    `json:"stray,omitempty"`
		Others      []string        `json:"others,omitempty"`
		Damaged     []difference    `json:"damaged,omitempty"`
	}{in.Attachments, in.Networks, inWords(in.Uplinks), inWords(in.Stray), in.Others, inWords(in.Damaged)})
}

// Differs says whether anything is not as it should be.
func (in *Inspection) Differs() bool {
	return in != nil && (len(in.Networks)+len(in.Uplinks)+len(in.Stray)+len(in.Damaged) > 0 ||
		slices.ContainsFunc(in.Attachments, func(r Report) bool { return len(r.Differences) > 0 }))
}

// Inspect compares all attachments on record with the kernel and with the pods'
// namespaces. It changes nothing and waits for no lock: what comes and goes meanwhile may
// show as different. An attachment that a call is at work on is not compared.
func (n *Node) Inspect(ctx context.Context) (*Inspection, error) {
	s, err := n.openKnown(ctx)
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
	if err := in.uplinks(ctx, s); err != nil {
		return nil, err
	}
	if err := in.others(ctx, s); err != nil {
		return nil, err
	}
	strays, err := inspect.FindStrays(ctx, s, known, networks)
	if err != nil {
		return nil, err
	}
	in.Stray, in.Others = strays.Differences(), strays.Others
	return in, nil
}

// uplinks compares the takeovers, but for what networks have said already.
func (in *Inspection) uplinks(ctx context.Context, s *session.Session) error {
	nics, err := s.Dir.Uplinks()
	if err != nil {
		return fail.State(err)
	}
	found := &inspect.Findings{}
	for _, nic := range nics {
		diffs, err := s.Uplinks().Taken(ctx, nic)
		if err != nil {
			return err
		}
		found.AddAll(diffs, tombolo.RemedyRepair)
	}
	in.Uplinks = slices.DeleteFunc(found.List, func(d tombolo.Difference) bool {
		return slices.ContainsFunc(in.Networks, func(r NetworkReport) bool { return slices.Contains(r.Differences, d) })
	})
	return nil
}

func (in *Inspection) network(ctx context.Context, s *session.Session, name string, known map[string]bool) error {
	attachments, damaged, err := s.Dir.List(name)
	if err != nil {
		return fail.State(err)
	}
	for _, d := range damaged {
		known[d.Hash] = true
		in.Damaged = append(in.Damaged, tombolo.Difference{Text: d.Error(), Remedy: tombolo.RemedyRecreate})
	}
	var n nft.Network
	rec, err := s.Dir.LoadNetwork(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		rec = nil
	case err != nil:
		in.Damaged = append(in.Damaged, tombolo.Difference{Text: err.Error(), Remedy: tombolo.RemedyRecreate})
		rec = nil
	default:
		var diffs []tombolo.Difference
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
		case a.State != state.Ready && underWay(s, a):
		case a.State != state.Ready:
			report.Differences = []tombolo.Difference{{Text: "its ADD did not finish", Remedy: tombolo.RemedyRecreate}}
		case rec == nil:
			report.Differences = []tombolo.Difference{{Text: "its network has no record", Remedy: tombolo.RemedyRecreate}}
		default:
			if report.Differences, err = inspect.Attachment(ctx, s, n, a); err != nil {
				return err
			}
		}
		in.Attachments = append(in.Attachments, report)
	}
	return nil
}

// others compares what attachments of other programs' have of ours.
func (in *Inspection) others(ctx context.Context, s *session.Session) error {
	list, damaged, err := s.Dir.ListOthers()
	if err != nil {
		return fail.State(err)
	}
	for _, d := range damaged {
		in.Damaged = append(in.Damaged, tombolo.Difference{Text: d.Error(), Remedy: tombolo.RemedyRecreate})
	}
	obstacles, err := inspect.OtherObstacles(ctx, s)
	if err != nil {
		return err
	}
	for _, a := range list {
		diffs, err := inspect.Other(ctx, s, a)
		if err != nil {
			return err
		}
		for _, o := range obstacles[a.Network] {
			diffs = append(diffs, tombolo.Difference{Text: o, Remedy: tombolo.RemedyConfigure})
		}
		delete(obstacles, a.Network)
		in.Attachments = append(in.Attachments, Report{Attachment: attachmentOf(a), Differences: diffs})
	}
	return nil
}

// underWay says that a call is at work on an attachment: it holds the lock of its record.
func underWay(s *session.Session, a *state.Attachment) bool {
	lock, err := s.Dir.LockAttachment(a.Network, a.Hash())
	if err == nil {
		_ = lock.Close()
	}
	return errors.Is(err, state.ErrBusy)
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
		{len(in.Uplinks), "difference of uplinks", "differences of uplinks"},
		{len(in.Stray), "stray object", "stray objects"},
		{len(in.Damaged), "damaged record", "damaged records"},
	} {
		if part.n > 0 {
			parts = append(parts, fail.Count(part.n, part.one, part.many))
		}
	}
	return strings.Join(parts, ", ")
}
