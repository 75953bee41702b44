package nft

import (
	"bytes"
	"context"
	"strconv"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Check compares the firewall with the needs of a network, and returns the differences. Ensure repairs them. Elements
// of endpoints are not checked: see CheckEndpoint.
//
// Check recognizes rules and chains by their comments. It does not notice a rule that someone replaced while keeping
// the comment.
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

		// The answers to several requests may differ in time.
		return nftnl.Unchanged(c.tables.Conn, have.Generation)
	})

	return diffs, err
}

// CheckEndpoint compares the firewall with the needs of an endpoint, and returns the differences. Replace repairs
// them. Additional elements are no difference, unless they make the guard allow more than it should.
func (c *Conn) CheckEndpoint(ctx context.Context, ep Endpoint) ([]tombolo.Difference, error) {
	if err := ep.check(); err != nil {
		return nil, err
	}

	want := ep.elements()
	have, err := c.lookup(ctx, append(want, ep.leftovers()...)...)
	if err != nil {
		return nil, err
	}

	var list []tombolo.Difference
	comment := ownerComment(ep.Owner, ruleset.NetworkKey(ep.Network))
	for i, el := range want {
		object := c.setOf(el.Set)
		switch {
		case have[i] == nil:
			list = append(list, tombolo.Difference{Object: object, What: "element", Want: el.KeyText()})
		case !bytes.Equal(have[i].Data, el.Data):
			list = append(list, tombolo.Difference{
				Object: object, What: "data of element " + el.KeyText(),
				Want: el.DataText(), Have: have[i].DataText(),
			})
		case have[i].Comment != comment:
			list = append(list, tombolo.Difference{
				Object: object, What: "owner of element " + el.KeyText(),
				Want: strconv.Quote(comment), Have: strconv.Quote(have[i].Comment),
			})
		}
	}

	for _, el := range have[len(want):] {
		if el != nil && el.Comment == comment {
			list = append(list, tombolo.Difference{Object: c.setOf(el.Set), What: "element", Have: el.KeyText()})
		}
	}

	return list, nil
}

// setOf returns a set's name for differences.
func (c *Conn) setOf(at ruleset.Place) string { return c.tables.Name.Label("set", at).String() }
