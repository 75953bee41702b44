package network

import (
	"context"

	"github.com/tombolo-cni/tombolo/network/internal/fail"
)

// Networks lists the names of the networks that are on record.
func (n *Node) Networks(ctx context.Context) ([]string, error) {
	if err := n.usable(ctx); err != nil {
		return nil, err
	}
	names, err := n.dir.Networks()
	if err != nil {
		return nil, fail.State(err)
	}
	return names, nil
}

// Attachments lists a network's attachments that are on record; those whose record cannot be
// read are for Inspect to name.
func (n *Node) Attachments(ctx context.Context, network string) ([]*Attachment, error) {
	if err := n.usable(ctx, network); err != nil {
		return nil, err
	}
	records, _, err := n.dir.List(network)
	if err != nil {
		return nil, fail.State(err)
	}
	list := make([]*Attachment, len(records))
	for i, rec := range records {
		list[i] = attachmentOf(rec)
	}
	return list, nil
}

// HasRules says whether the firewall has rules in a network's name, on record or not, or rules in
// no network's: Remove deletes them.
func (n *Node) HasRules(ctx context.Context, network string) (bool, error) {
	s, err := n.openKnown(ctx, network)
	if err != nil {
		return false, err
	}
	defer s.Close()
	return s.Firewall.HasNetwork(ctx, network)
}
