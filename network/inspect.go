package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// NetworkReport lists the differences of one network's own parts.
type NetworkReport struct {
	Network     string               `json:"network"`
	Differences []tombolo.Difference `json:"differences"`
}

// Inspection is the result of Inspect.
type Inspection struct {
	Attachments []Report        `json:"attachments"`
	Networks    []NetworkReport `json:"networks,omitempty"` // only networks with differences
	// Uplinks lists the faults of NICs that were taken over.
	Uplinks []tombolo.Difference `json:"uplinks,omitempty"`
	// Stray lists our objects in the kernel that belong to no record.
	Stray []tombolo.Difference `json:"stray,omitempty"`
	// Others describes objects and settings that are no differences, but that may explain a problem. These are
	// objects of other programs in our tables, elements of unrecorded owners and networks, and settings of the host.
	// Chains of other tables that may drop pods' packets belong here too, and rules of other tables that set our bit
	// of the mark.
	Others []string `json:"others,omitempty"`
	// Damaged lists the records that cannot be read.
	Damaged []tombolo.Difference `json:"damaged,omitempty"`
}

// Differs reports whether there are any differences. It ignores changes inside pods.
func (report *Inspection) Differs() bool {
	return report != nil && (len(report.Networks)+len(report.Uplinks)+len(report.Stray)+len(report.Damaged) > 0 ||
		slices.ContainsFunc(report.Attachments, func(r Report) bool { return len(r.Differences) > 0 }))
}

// note adds a note to Others.
func (report *Inspection) note(format string, args ...any) {
	report.Others = append(report.Others, fmt.Sprintf(format, args...))
}

// Inspect compares all attachments on record with the kernel, inside the pods' namespaces too. It changes nothing and
// waits for no lock. So objects that are created or deleted at the same time may show as differences. It skips an
// attachment that another call works on.
func (n *Node) Inspect(ctx context.Context) (*Inspection, error) {
	s, err := n.openKnown()
	if err != nil {
		return nil, err
	}
	defer s.close()
	if err := s.inOwnNamespace(); err != nil {
		return nil, err
	}
	defer s.cacheBridges()()
	networks, err := n.cfg.Dir.Networks()
	if err != nil {
		return nil, stateError(err)
	}

	report := &Inspection{Attachments: []Report{}}
	host := &surroundings{}
	if err := host.read(ctx, s); err != nil {
		return nil, err
	}

	for _, name := range networks {
		if err := report.compareNetwork(ctx, s, name, host); err != nil {
			return nil, err
		}
	}

	if _, report.Uplinks, err = s.takeReports(ctx); err != nil {
		return nil, err
	}

	if len(report.Attachments) > 0 {
		publishes := slices.ContainsFunc(report.Attachments, func(r Report) bool {
			return len(r.Attachment.Ports) > 0 && !r.Attachment.rec.Unadmitted
		})
		remarks, err := s.foreignFirewall("").Remarks(ctx, publishes)
		if err != nil {
			return nil, err
		}

		cut, err := s.cutBridges(ctx, "")
		if err != nil {
			return nil, err
		}
		report.Others = slices.Concat(report.Others, remarks, cut)
	}

	all, err := s.inventory(ctx, "", nil)
	if err != nil {
		return nil, err
	}

	slices.Sort(report.Others)
	report.Stray, report.Others = strayDifferences(all.strays()), append(all.others, slices.Compact(report.Others)...)
	return report, nil
}

// recreateDifference returns a difference for which the remedy is a new attachment, since no repair is possible.
func recreateDifference(text string) []tombolo.Difference {
	return []tombolo.Difference{{Text: text, Remedy: tombolo.RemedyRecreate}}
}

// compareNetwork compares one network and its attachments with the kernel.
func (report *Inspection) compareNetwork(ctx context.Context, s *session, name string, host *surroundings) error {
	attachments, damaged, err := s.Dir.List(name)
	if err != nil {
		return stateError(err)
	}

	for _, d := range damaged {
		report.Damaged = append(report.Damaged, recreateDifference(d.Error())...)
	}

	rec, err := s.Dir.LoadNetwork(name)
	if err != nil {
		rec = nil
		if !errors.Is(err, fs.ErrNotExist) {
			report.Damaged = append(report.Damaged, recreateDifference(err.Error())...)
		}
	}

	if rec != nil {
		found, err := checkNetwork(ctx, s, rec, attachments)
		if err != nil {
			return err
		}

		n := &site{s: s, rec: rec, attachments: attachments, found: *found}
		if err := report.addSurroundings(ctx, host, n); err != nil {
			return err
		}
		if len(n.found.list) > 0 {
			report.Networks = append(report.Networks, NetworkReport{name, n.found.list})
		}
	}

	for _, a := range attachments {
		var diffs, inside []tombolo.Difference
		switch {
		case a.State != state.Ready:
			err := s.withLockedRecord(a.Network, a.Hash(), func(*state.Attachment) error { return nil })
			if !errors.Is(err, state.ErrBusy) { // ErrBusy means that a call is working on it
				diffs = recreateDifference("its ADD did not finish")
			}
		case rec == nil:
			diffs = recreateDifference("its network has no record")
		case a.NetNSCookie == 0: // Docker is still moving the interface: see Change.Moved
		default:
			p, err := s.find(ctx, rec, a)
			if err != nil {
				return err
			}

			err = p.look(ctx)
			if err == nil {
				p.want.Neighbours = neighbours(a, net.HardwareAddr(rec.HostMAC))
				inside, err = p.inside(ctx)
			}

			p.pod.Close()
			if err != nil {
				return err
			}

			diffs = p.found.list
		}

		report.Attachments = append(report.Attachments, Report{attachmentOf(a), diffs, inside})
	}

	return nil
}

// strayDifferences describes objects in the kernel that belong to attachments without a record. An attachment with a
// port may be a running pod. Only its Del removes it, or a garbage collection whose list of valid attachments lacks
// it.
func strayDifferences(list []*remains) []tombolo.Difference {
	found := &findings{}
	for _, r := range list {
		if r.hasOldElements() {
			found.advise(tombolo.RemedyRepair, "elements of endpoint %s of network %s are of addresses that it "+
				"does not have", r.hash, r.elementNetwork)
			continue
		}

		if r.portName != "" {
			found.advise(tombolo.RemedyRecreate, "port %s of network %s has no record", r.portName, r.network)
			continue
		}

		if r.elementNetwork != "" {
			found.advise(tombolo.RemedyRepair, "elements of endpoint %s of network %s have no record", r.hash,
				r.elementNetwork)
		}

		if r.ifb != "" {
			found.advise(tombolo.RemedyRepair, "link %s has no record", r.ifb)
		}
	}

	return found.list
}
