package nft

import (
	"bytes"
	"context"
	"strconv"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/diff"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Check compares the firewall with the intended rules of a network, and returns the differences. Ensure repairs them.
// Check does not look at elements of endpoints: see CheckEndpoint.
//
// Check recognizes chains and rules by their comments. It does not notice a changed rule that kept its comment.
func (c *Conn) Check(ctx context.Context, n Network) ([]tombolo.Difference, error) {
	want, err := c.ruleset(&n)
	if err != nil {
		return nil, err
	}

	var diffs []tombolo.Difference
	err = nftnl.Retry(ctx, func() error {
		have, err := c.tables.Read(want)
		if err != nil {
			return err
		}
		if diffs = want.Differences(have); len(diffs) == 0 {
			return nil
		}

		// The answers to Read's requests may mix two generations of nf_tables. So retry if nf_tables changed in
		// between.
		return nftnl.Unchanged(c.tables.Conn, have.Generation)
	})

	return diffs, err
}

// CheckEndpoint compares the firewall with the intended elements of an endpoint, and returns the differences. Replace
// repairs them. Additional elements are no difference, unless they make the guard permit more than it should.
func (c *Conn) CheckEndpoint(ctx context.Context, ep Endpoint) ([]tombolo.Difference, error) {
	if err := ep.check(); err != nil {
		return nil, err
	}

	want := ep.elements()
	have, err := c.lookup(ctx, append(want, ep.leftovers()...)...)
	if err != nil {
		return nil, err
	}

	var list diff.List
	comment := ep.comment()
	for i, el := range want {
		object := c.setOf(el.Set)
		if have[i] == nil {
			list.Add(object, "element", el.KeyText(), "")
			continue
		}
		if !bytes.Equal(have[i].Data, el.Data) {
			list.Add(object, "data of element "+el.KeyText(), el.DataText(), have[i].DataText())
		} else {
			list.Add(object, "owner of element "+el.KeyText(), strconv.Quote(comment), strconv.Quote(have[i].Comment))
		}
	}

	for _, el := range have[len(want):] {
		if el != nil && el.Comment == comment {
			list.Add(c.setOf(el.Set), "element", "", el.KeyText())
		}
	}

	return list, nil
}

// setOf returns the name of a set for the Object field of a Difference.
func (c *Conn) setOf(at ruleset.Place) string { return c.tables.Name.Label("set", at).String() }
