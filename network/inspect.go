package network

import (
	"context"
	"encoding/json"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/inspect"
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
	// Others is what another program has in the firewall's table, elements of owners and
	// networks that no record tells of, and by which chains of others what pods send may be dropped. It is no
	// difference.
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
	all, err := inspect.All(ctx, s)
	if err != nil {
		return nil, err
	}
	in := &Inspection{Attachments: []Report{}, Uplinks: all.Uplinks, Stray: all.Strays.Differences(), Others: slices.Concat(all.Strays.Others, all.Notes), Damaged: all.Damaged}
	for _, a := range all.Attachments {
		in.Attachments = append(in.Attachments, Report{attachmentOf(a.Record), a.Differences})
	}
	for _, r := range all.Networks {
		in.Networks = append(in.Networks, NetworkReport(r))
	}
	return in, nil
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
