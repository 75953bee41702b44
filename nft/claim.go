package nft

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
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
// then taken away by whoever removes the last of them or comes across it.

// claimComment is the comment of claims, which belong to no endpoint.
const claimComment = ownerPrefix + "claim"

// claim is what an entry for a port on one address shares with others of the port.
func (e element) claim() (element, bool) {
	for _, f := range families() {
		if e.set == inInet(f.hostAddrs) && len(e.key) == int(f.addrLen)+2*slot {
			return claimTo(f, e.key[f.addrLen:]), true
		}
	}
	return element{}, false
}

// hasClaims says that some of several elements share a claim with others.
func hasClaims(elements []element) bool {
	return slices.ContainsFunc(elements, func(el element) bool { _, ok := el.claim(); return ok })
}

func claimTo(f family, port []byte) element {
	return element{set: inInet(claimsSet), key: key(number8(f.proto), port)}
}

// rival is what must not be there where the entry of a published port is.
func (e element) rival() (element, bool) {
	for _, f := range families() {
		switch {
		case e.set == inInet(f.hostAddrs) && len(e.key) == int(f.addrLen)+2*slot:
			return element{set: inInet(f.hostPorts), key: e.key[f.addrLen:], data: e.data}, true
		case e.set == inInet(f.hostPorts):
			return claimTo(f, e.key), true
		}
	}
	return element{}, false
}

// rivals are those of several, each once.
func rivals(elements []element) []element {
	var list []element
	for _, el := range elements {
		if r, ok := el.rival(); ok && !slices.ContainsFunc(list, r.equal) {
			list = append(list, r)
		}
	}
	return list
}

// addEndpoint appends what adds elements of one endpoint, whose rivals are not there.
func (t *transaction) addEndpoint(elements []element, comment string) {
	for _, el := range elements {
		t.addOwned(el, comment)
	}
}

// refuseRival appends what is refused if the same transaction has added, or left, a
// rival of an element.
func (t *transaction) refuseRival(el element, comment string) {
	if rival, ok := el.rival(); ok {
		t.newElement(rival, comment)
		t.delElement(rival)
	}
}

// addOwned appends what adds one element.
func (t *transaction) addOwned(el element, comment string) {
	if claim, ok := el.claim(); ok {
		t.shareElement(claim, claimComment)
	}
	t.newElement(el, comment)
}

// heldBy gives those entries that a claim stands for.
func (c *Conn) heldBy(claims []elementState) ([]elementState, error) {
	if len(claims) == 0 {
		return nil, nil
	}
	all, err := c.elementsOf(hostAddrPlaces())
	return slices.DeleteFunc(all, func(el elementState) bool {
		claim, ok := el.claim()
		return !ok || !slices.ContainsFunc(claims, func(c elementState) bool { return c.equal(claim) })
	}), err
}

// isHeld says that one of several entries stands behind a claim.
func (e elementState) isHeld(entries []elementState) bool {
	return slices.ContainsFunc(entries, func(el elementState) bool {
		claim, ok := el.claim()
		return ok && claim.equal(e.element)
	})
}

func hostAddrPlaces() []place { return []place{inInet(hostAddrs4Map), inInet(hostAddrs6Map)} }

// unclaimed gives those claims that should stand for entries of several elements, and are
// not there: somebody emptied their set.
func (c *Conn) unclaimed(elements []element) ([]element, error) {
	var claims []element
	for _, el := range elements {
		if claim, ok := el.claim(); ok && !slices.ContainsFunc(claims, claim.equal) {
			claims = append(claims, claim)
		}
	}
	have, err := c.lookup(claims)
	if err != nil {
		return nil, err
	}
	var missing []element
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
	held              []elementState
	claims, abandoned []elementState
}

// findRivals looks up the rivals of elements.
func (c *Conn) findRivals(elements []element) (*found, error) {
	f := new(found)
	have, err := c.lookup(rivals(elements))
	if err != nil {
		return nil, err
	}
	for _, el := range have {
		switch {
		case el == nil:
		case el.set.name == claimsSet && el.comment == claimComment:
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
		if !claim.isHeld(holders) {
			f.abandoned = append(f.abandoned, claim)
		}
	}
	return f, nil
}

// sweepClaims takes away the abandoned claims.
func (c *Conn) sweepClaims(ctx context.Context) error {
	return nftnl.Retry(ctx, func() error {
		generation, err := c.settle()
		if err != nil {
			return err
		}
		claims, err := c.elementsOfSet(inInet(claimsSet))
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
		t := c.table.begin(&generation)
		for _, claim := range claims {
			if claim.comment == claimComment && !claim.isHeld(held) {
				t.delElement(claim.element)
			}
		}
		return c.commitEndpoints(t)
	})
}

// delRivals appends what takes rivals away, but for those that are wanted as well:
// these then conflict.
func (t *transaction) delRivals(rivals *found, wanted []element) {
	var stay []elementState
	for _, el := range rivals.held {
		if slices.ContainsFunc(wanted, el.equal) {
			stay = append(stay, el)
			continue
		}
		t.delElement(el.element)
	}
	for _, claim := range rivals.claims {
		if !claim.isHeld(stay) {
			t.delElement(claim.element)
		}
	}
}

// portOf names the published port that an entry is for, as it was asked for; "" for
// elements of other sets.
func (ep *Endpoint) portOf(el element) string {
	return ep.portWhere(func(mine element) bool { return mine.equal(el) })
}

// portAgainst names the port of the endpoint's that another's entry excludes.
func (ep *Endpoint) portAgainst(theirs element) string {
	claim, _ := theirs.claim()
	return ep.portWhere(func(mine element) bool {
		rival, _ := mine.rival()
		return rival.equal(theirs) || rival.equal(claim)
	})
}

func (ep *Endpoint) portWhere(match func(element) bool) string {
	for _, p := range ep.Ports {
		for _, a := range ep.firstAddrs() {
			if pub, ok := p.on(a); ok && match(pub.element()) {
				return p.String()
			}
		}
	}
	return ""
}
