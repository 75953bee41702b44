package nft

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// A port on all addresses and the same port on one address exclude each other, and
// are entries of two maps. The kernel refuses a key that is there, and knows nothing
// of one that must not be there elsewhere: so that is looked up, and the transaction
// is of the generation that was looked at. (One that adds the other key, exclusively,
// and deletes it again would do without looking; but the kernel frees what was deleted
// after a grace period, and closing the connection then waits for some 10 ms.)
//
// That does for a port on one address, whose rival has one key. The rivals of one on
// all addresses have many: so the first of them leaves a claim to the port, which
// any number of them share, and which is one key. A claim may outlive them, and is
// then taken away by the call that removes the last of them or comes across it.

// claim is what an entry for a port on one address shares with others of the port.
func claimOf(e ruleset.Element) (ruleset.Element, bool) {
	for _, f := range ruleset.Families() {
		if e.Set == ruleset.InInet(f.HostAddrs) && len(e.Key) == int(f.AddrLen)+2*ruleset.Slot {
			return claimTo(f, e.Key[f.AddrLen:]), true
		}
	}
	return ruleset.Element{}, false
}

// hasClaims says that some of several elements share a claim with others.
func hasClaims(elements []ruleset.Element) bool {
	return slices.ContainsFunc(elements, func(el ruleset.Element) bool { _, ok := claimOf(el); return ok })
}

func claimTo(f ruleset.Family, port []byte) ruleset.Element {
	return ruleset.Element{Set: ruleset.InInet(ruleset.ClaimsSet), Key: ruleset.Key(ruleset.Number8(f.Proto), port)}
}

// rival is what must not be there where the entry of a published port is.
func rivalOf(e ruleset.Element) (ruleset.Element, bool) {
	for _, f := range ruleset.Families() {
		switch {
		case e.Set == ruleset.InInet(f.HostAddrs) && len(e.Key) == int(f.AddrLen)+2*ruleset.Slot:
			return ruleset.Element{Set: ruleset.InInet(f.HostPorts), Key: e.Key[f.AddrLen:], Data: e.Data}, true
		case e.Set == ruleset.InInet(f.HostPorts):
			return claimTo(f, e.Key), true
		}
	}
	return ruleset.Element{}, false
}

// rivals are those of several, each once.
func rivals(elements []ruleset.Element) []ruleset.Element {
	var list []ruleset.Element
	for _, el := range elements {
		if r, ok := rivalOf(el); ok && !slices.ContainsFunc(list, r.Equal) {
			list = append(list, r)
		}
	}
	return list
}

// addEndpoint appends what adds elements of one endpoint, whose rivals are not there.
func addEndpoint(t *ruleset.Transaction, elements []ruleset.Element, comment string) {
	for _, el := range elements {
		addOwned(t, el, comment)
	}
}

// refuseRival appends what is refused if the same transaction has added, or left, a
// rival of an element.
func refuseRival(t *ruleset.Transaction, el ruleset.Element, comment string) {
	if rival, ok := rivalOf(el); ok {
		t.NewElement(rival, comment)
		t.DelElement(rival)
	}
}

// addOwned appends what adds one element.
func addOwned(t *ruleset.Transaction, el ruleset.Element, comment string) {
	if claim, ok := claimOf(el); ok {
		t.ShareElement(claim, ruleset.ClaimComment)
	}
	t.NewElement(el, comment)
}

// heldBy gives those entries that a claim stands for.
func (c *Conn) heldBy(claims []ruleset.ElementState) ([]ruleset.ElementState, error) {
	if len(claims) == 0 {
		return nil, nil
	}
	all, err := c.tables.ElementsOf(hostAddrPlaces())
	return slices.DeleteFunc(all, func(el ruleset.ElementState) bool {
		claim, ok := claimOf(el.Element)
		return !ok || !slices.ContainsFunc(claims, func(c ruleset.ElementState) bool { return c.Equal(claim) })
	}), err
}

// isHeld says that one of several entries stands behind a claim.
func isHeld(e ruleset.ElementState, entries []ruleset.ElementState) bool {
	return slices.ContainsFunc(entries, func(el ruleset.ElementState) bool {
		claim, ok := claimOf(el.Element)
		return ok && claim.Equal(e.Element)
	})
}

func hostAddrPlaces() []ruleset.Place {
	return []ruleset.Place{ruleset.InInet(ruleset.HostAddrs4Map), ruleset.InInet(ruleset.HostAddrs6Map)}
}

// unclaimed gives those claims that should stand for entries of several elements, and are
// not there: somebody emptied their set.
func (c *Conn) unclaimed(elements []ruleset.Element) ([]ruleset.Element, error) {
	var claims []ruleset.Element
	for _, el := range elements {
		if claim, ok := claimOf(el); ok && !slices.ContainsFunc(claims, claim.Equal) {
			claims = append(claims, claim)
		}
	}
	have, err := c.tables.Lookup(claims)
	if err != nil {
		return nil, err
	}
	var missing []ruleset.Element
	for i, claim := range claims {
		if have[i] == nil {
			missing = append(missing, claim)
		}
	}
	return missing, nil
}

// found are the rivals that there are: entries, and claims, of which those are
// abandoned that no entry stands behind any more.
type found struct {
	held              []ruleset.ElementState
	claims, abandoned []ruleset.ElementState
}

// findRivals looks up the rivals of elements.
func (c *Conn) findRivals(elements []ruleset.Element) (*found, error) {
	f := new(found)
	have, err := c.tables.Lookup(rivals(elements))
	if err != nil {
		return nil, err
	}
	for _, el := range have {
		switch {
		case el == nil:
		case el.Set.Name == ruleset.ClaimsSet && el.Comment == ruleset.ClaimComment:
			f.claims = append(f.claims, *el)
		default:
			f.held = append(f.held, *el)
		}
	}
	holders, err := c.heldBy(f.claims)
	if err != nil {
		return nil, err
	}
	f.held = append(f.held, holders...)
	for _, claim := range f.claims {
		if !isHeld(claim, holders) {
			f.abandoned = append(f.abandoned, claim)
		}
	}
	return f, nil
}

// sweepClaims takes away the abandoned claims.
func (c *Conn) sweepClaims(ctx context.Context) error {
	return nftnl.Retry(ctx, func() error {
		generation, err := c.tables.SeenGeneration()
		if err != nil {
			return err
		}
		claims, err := c.tables.ElementsOfSet(ruleset.InInet(ruleset.ClaimsSet))
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		}
		held, err := c.heldBy(claims)
		if err != nil {
			return err
		}
		t := c.tables.Begin(&generation)
		for _, claim := range claims {
			if claim.Comment == ruleset.ClaimComment && !isHeld(claim, held) {
				t.DelElement(claim.Element)
			}
		}
		return c.commitEndpoints(t)
	})
}

// delRivals appends what takes rivals away, but for those that are wanted as well:
// these then conflict.
func delRivals(t *ruleset.Transaction, rivals *found, wanted []ruleset.Element) {
	var stay []ruleset.ElementState
	for _, el := range rivals.held {
		if slices.ContainsFunc(wanted, el.Equal) {
			stay = append(stay, el)
			continue
		}
		t.DelElement(el.Element)
	}
	for _, claim := range rivals.claims {
		if !isHeld(claim, stay) {
			t.DelElement(claim.Element)
		}
	}
}

// portOf names the published port that an entry is for, as it was asked for; "" for
// elements of other sets.
func (ep *Endpoint) portOf(el ruleset.Element) string {
	return ep.portWhere(func(mine ruleset.Element) bool { return mine.Equal(el) })
}

// portAgainst names the port of the endpoint's that another's entry excludes.
func (ep *Endpoint) portAgainst(theirs ruleset.Element) string {
	claim, _ := claimOf(theirs)
	return ep.portWhere(func(mine ruleset.Element) bool {
		rival, _ := rivalOf(mine)
		return rival.Equal(theirs) || rival.Equal(claim)
	})
}

func (ep *Endpoint) portWhere(match func(ruleset.Element) bool) string {
	for _, p := range ep.Ports {
		for _, a := range ep.firstAddrs() {
			if pub, ok := p.on(a); ok && match(pub.element()) {
				return p.String()
			}
		}
	}
	return ""
}
