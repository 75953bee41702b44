package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/loopback"
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
	networks, err := s.dir.Networks()
	if err != nil {
		return nil, fail.State(err)
	}
	in := &Inspection{Attachments: []Report{}}
	known := map[string]bool{}
	for _, name := range networks {
		if err := s.inspectNetwork(ctx, in, name, known); err != nil {
			return nil, err
		}
	}
	in.Stray, err = s.strays(ctx, known)
	return in, err
}

func (s *session) inspectNetwork(ctx context.Context, in *Inspection, name string, known map[string]bool) error {
	attachments, damaged, err := s.dir.List(name)
	if err != nil {
		return fail.State(err)
	}
	for _, d := range damaged {
		in.Damaged = append(in.Damaged, d.Error())
	}
	var n nft.Network
	rec, err := s.dir.LoadNetwork(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		rec = nil
	case err != nil:
		in.Damaged = append(in.Damaged, err.Error())
		rec = nil
	default:
		var diffs []string
		if n, diffs, err = s.networkDifferences(ctx, rec, attachments); err != nil {
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
			if report.Differences, err = s.attachmentDifferences(ctx, n, a); err != nil {
				return err
			}
		}
		in.Attachments = append(in.Attachments, report)
	}
	return nil
}

// networkDifferences finds what of a network's own parts is not as its record has
// it. It gives the rules that were compared, too.
func (s *session) networkDifferences(ctx context.Context, rec *state.Network, attachments []*state.Attachment) (nft.Network, []string, error) {
	found := &findings{}
	l, err := s.bridgeDifferences(ctx, rec, found)
	if err != nil {
		return nft.Network{}, nil, err
	}
	n := rules(rec, l)
	err = joinSteps(
		func() error { return s.gatewayDifferences(ctx, rec, l, found) },
		func() error {
			if !loopback.Uses(rec, attachments) {
				return nil
			}
			return loopbackDifferences(ctx, rec, l, found)
		},
		func() error {
			diffs, err := s.fw.Check(ctx, n, nil)
			found.addAll(diffs)
			return err
		},
		func() error {
			diffs, err := s.fw.CheckAdmission(ctx)
			found.addAll(diffs)
			return err
		},
		func() error {
			obstacles, err := nft.Obstacles(ctx, &nft.Config{Mark: uint32(rec.Mark)}, nft.Path{Bridge: rec.Bridge, Prefixes: rec.Subnets})
			for _, o := range obstacles {
				found.add("%s", o)
			}
			return err
		},
	)
	return n, found.texts(), err
}

// attachmentDifferences finds what of an attachment is not as its record has it.
func (s *session) attachmentDifferences(ctx context.Context, n nft.Network, rec *state.Attachment) ([]string, error) {
	found := &findings{}
	pod, err := netns.Open(rec.NetNS)
	if err != nil {
		found.add("its namespace is gone: %v", err)
	} else {
		defer pod.Close()
		port, err := s.portAsRecorded(ctx, rec)
		if err != nil {
			return nil, err
		}
		port.Addresses = lasting(rec)
		diffs, err := s.br.Check(ctx, pod, port)
		if err != nil {
			return nil, err
		}
		found.addAll(diffs)
	}
	ep := endpoint.Of(rec)
	ep.Masquerade = ep.Masquerade && n.Masquerade
	diffs, err := s.fw.CheckEndpoint(ctx, ep)
	if err != nil {
		return nil, err
	}
	found.addAll(diffs)
	if rec.IPAMType == endpoint.Leased {
		if err := leaseDifferences(rec, false, found); err != nil {
			return nil, err
		}
	}
	if err := limitDifferences(ctx, rec, found); err != nil {
		return nil, err
	}
	return found.texts(), nil
}

// bridgeDifferences finds those of the bridge, and gives its state: an empty one
// where there is none.
func (s *session) bridgeDifferences(ctx context.Context, rec *state.Network, found *findings) (*bridge.Link, error) {
	diffs, err := s.br.CheckBridge(ctx, bridge.Bridge{
		Name: rec.Bridge, MTU: bridgeMTU(rec), Promiscuous: rec.Promiscuous, NFCall: rec.NFCall,
	})
	if err != nil {
		return nil, err
	}
	found.addAll(diffs)
	if rec.NFCall != nil && *rec.NFCall {
		if err := bridge.ProbeNetfilter(); err != nil {
			found.add("%v", err)
		}
	}
	if diffs, err = lanDifferences(rec); err == nil {
		found.addAll(diffs)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err // but for a bridge that is not there, which is said
	}
	taken, err := s.uplinks().Differences(ctx, rec.Uplink, rec.Bridge)
	if err != nil {
		return nil, err
	}
	for _, text := range taken {
		found.add("%s", text)
	}
	l, err := s.br.Link(ctx, rec.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return &bridge.Link{Name: rec.Bridge}, nil
	}
	if err == nil && learnedLimit(l) != 0 {
		found.add("bridge %s: fdb_max_learned is 0, so that one pod can have it learn MACs without end", rec.Bridge)
	}
	return l, err
}

// limitDifferences finds those of an attachment's limits.
func limitDifferences(ctx context.Context, rec *state.Attachment, found *findings) error {
	if shapeOf(rec).IsZero() {
		return nil
	}
	conn, err := bandwidth.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	diffs, err := conn.Check(ctx, targetOf(rec), shapeOf(rec))
	found.addAll(diffs)
	return err
}

// strays finds what the kernel has of attachments without a record.
func (s *session) strays(ctx context.Context, known map[string]bool) ([]string, error) {
	var list []string
	links, err := s.br.Veths(ctx)
	if err != nil {
		return nil, err
	}
	for i := range links {
		if a, ok := endpoint.ParseAlias(links[i].Alias); ok && !known[a.Hash] {
			list = append(list, fmt.Sprintf("port %s of network %s has no record", links[i].Name, a.Network))
		}
	}
	endpoints, err := s.fw.Endpoints(ctx, "")
	if err != nil {
		return nil, err
	}
	for _, e := range endpoints {
		if !known[string(e.Owner)] {
			list = append(list, fmt.Sprintf("elements of endpoint %s of network %s have no record", e.Owner, e.Network))
		}
	}
	ifbs, err := listIFBs(ctx)
	if err != nil {
		return nil, err
	}
	for name, a := range ifbs {
		if !known[a.Hash] {
			list = append(list, fmt.Sprintf("link %s has no record", name))
		}
	}
	slices.Sort(list)
	return list, nil
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
