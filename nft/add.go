package nft

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Add adds an endpoint's elements to the sets of the firewall, in one transaction.
//
// If one of the elements already exists, Add returns a *ConflictError, which matches fs.ErrExist. It returns this error
// too if a new published port and an existing one exclude each other. A port published on all addresses and the same
// port on one address of the family exclude each other. Replace can take over the conflicting elements. If the table or
// a set is missing, the error matches fs.ErrNotExist, and Ensure can repair it. If Add returns an error, it has added
// nothing.
func (c *Conn) Add(ctx context.Context, ep Endpoint) error {
	if err := ep.check(); err != nil {
		return err
	}

	elements := ep.elements()
	return c.retry(ctx, func() error {
		// Tie the transaction to the generation of nf_tables that this Conn last knew. Without one, read the generation
		// only for ports, which need it (see publishedPorts). Every change of nf_tables begins a new generation. After
		// a later change, the kernel refuses the transaction, commitEndpoints forgets the old generation, and c.retry
		// tries again.
		generation := c.verified.Generation()
		if len(ep.Ports) > 0 && generation == nil {
			visible, err := nftnl.VisibleGeneration(c.tables.Conn)
			if err != nil {
				return err
			}
			generation = &visible
		}

		excluding, err := c.findExcluding(elements)
		if err != nil {
			return explainMissing(err)
		}

		err = fs.ErrExist
		if len(excluding) == 0 {
			t := c.tables.Name.Begin(generation)
			for _, el := range elements {
				t.NewElement(el)
			}
			err = c.commitEndpoints(t)
		}

		if errors.Is(err, fs.ErrExist) {
			err = c.findConflict(&ep, elements)
		}

		return explainMissing(err)
	})
}

// findConflict looks for an existing element that conflicts with the endpoint's elements, and returns a
// *ConflictError for it. If no such element exists any more, it returns nftnl.ErrOvertaken, so that the caller tries
// again.
func (c *Conn) findConflict(ep *Endpoint, elements []ruleset.Element) error {
	have, err := c.tables.Lookup(elements)
	if err != nil {
		return err
	}

	excluding, err := c.findExcluding(elements)
	if err != nil {
		return err
	}

	for _, el := range append(have, excluding...) {
		if el != nil {
			return newConflict(c.tables.Name, *el, ep.portOf(*el))
		}
	}

	return nftnl.ErrOvertaken // the element is gone again, so try again
}

// explainMissing adds the text "the network's firewall is not (or no longer) set up" to an error that matches
// fs.ErrNotExist. It returns other errors unchanged.
func explainMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the network's firewall is not (or no longer) set up: %w", err)
	}
	return err
}

// Replace adds the elements of endpoints even if they conflict with existing elements. It keeps elements that are
// already correct. It takes over elements of other owners, and deletes published ports that exclude new ones. In the
// same transaction, it deletes elements that a guarded endpoint needed only earlier: while it had no address, another
// value of SLAAC or another Guard. To delete former addresses, use Move. Each endpoint is added completely or not at
// all. After an error, endpoints before the failed one may have been added.
//
// Use Replace only for endpoints that the caller knows to be current. Examples are a new pod that conflicts with a
// stale element, and endpoints to restore after Ensure created a set again. The error matches fs.ErrNotExist if the
// table or a set is missing.
func (c *Conn) Replace(ctx context.Context, eps ...Endpoint) error {
	for i := range eps {
		if err := eps[i].check(); err != nil {
			return err
		}
	}

	var group, gone []ruleset.Element
	for i := range eps {
		group, gone = append(group, eps[i].elements()...), append(gone, eps[i].leftovers()...)

		if len(group) < ruleset.GroupSize && i < len(eps)-1 {
			continue
		}

		if err := c.replace(ctx, group, gone, nil); err != nil {
			return explainMissing(err)
		}
		group, gone = group[:0], gone[:0]
	}

	return nil
}

// replace adds the elements in group. It keeps elements that exist with the same comment and data. It deletes other
// existing elements with the same keys, and published ports that exclude new ones (ruleset.Element.Excludes). It also
// deletes the elements in gone that exist with the same comment. No element may be in both group and gone. If two
// elements in group exclude each other, replace returns a *ConflictError.
//
// If refuse is not nil, replace first calls it with a list of existing elements. For each element in group, the list
// has the existing element with the same key, or nil if there is none. At its end, the list has the published ports
// that exclude new ones. If refuse returns an error, replace changes nothing.
func (c *Conn) replace(ctx context.Context, group, gone []ruleset.Element,
	refuse func(is []*ruleset.Element) error) error {
	if i := slices.IndexFunc(group, publishedBy(group).exclude); i >= 0 {
		return newConflict(c.tables.Name, group[i], "")
	}

	return c.change(ctx, c.commitEndpoints, func(t *ruleset.Transaction) error {
		have, err := c.tables.Lookup(slices.Concat(group, gone))
		if err != nil {
			return err
		}

		excluding, err := c.findExcluding(group)
		if err != nil {
			return err
		}

		if refuse != nil {
			if err := refuse(slices.Concat(have[:len(group)], excluding)); err != nil {
				return err
			}
		}

		// An excluding element may be in gone too, so delete each element only once. The kernel refuses the
		// transaction if a new element has the same key as another element of the group.
		settled := map[string]bool{}
		remove := func(el ruleset.Element) {
			if id := el.ID(); !settled[id] {
				settled[id] = true
				t.DelElement(el)
			}
		}
		for _, el := range excluding {
			remove(*el)
		}

		for i, el := range have[len(group):] {
			if el != nil && el.Comment == gone[i].Comment {
				remove(*el)
			}
		}

		for i, want := range group {
			switch {
			case have[i] == nil:
			case have[i].Comment == want.Comment && bytes.Equal(have[i].Data, want.Data):
				settled[want.ID()] = true
				continue
			default:
				remove(want)
			}
			t.NewElement(want)
		}

		return nil
	})
}

// Move changes an endpoint from old to next in one transaction, for example when a new lease changes its address. Every
// packet meets either the old elements or the new ones, except one that another CPU is handling at that moment. So a
// guarded port is neither unprotected nor blocked in between, and a published port always leads to one of the
// addresses.
//
// old and next must have the same Owner and Network. Move adds the elements of next in the same way as Replace. It
// deletes elements that only old has in the same way as Remove: only if they exist and belong to the owner. So Move can
// be repeated, and old may have elements that do not exist. Existing connections keep their address.
//
// If the table or a set is missing, the error matches fs.ErrNotExist, and Move has changed nothing. Ensure can repair
// this.
func (c *Conn) Move(ctx context.Context, old, next Endpoint) error {
	return c.move(ctx, old, next, nil)
}

// Update works like Move, but never takes over elements of other owners. If another owner has an element of next, or
// a published port that excludes one of next's, Update returns a *ConflictError and changes nothing. Elements of the
// same owner are no conflict. For example, Add can guard a pod before its veth pair exists, and Update can add its
// host ports later. The pod stays guarded throughout.
func (c *Conn) Update(ctx context.Context, old, next Endpoint) error {
	comment := next.comment()
	return c.move(ctx, old, next, func(is []*ruleset.Element) error {
		for _, el := range is {
			if el != nil && el.Comment != comment {
				return newConflict(c.tables.Name, *el, next.portOf(*el))
			}
		}
		return nil
	})
}

// move implements Move and Update. Before any change, replace calls refuse with the existing elements that have keys of
// next, or exclude its ports. If refuse returns an error, move changes nothing. If refuse is nil, move takes over
// elements of other owners.
func (c *Conn) move(ctx context.Context, old, next Endpoint, refuse func(is []*ruleset.Element) error) error {
	for _, ep := range []*Endpoint{&old, &next} {
		if err := ep.check(); err != nil {
			return err
		}
	}

	if old.Owner != next.Owner || old.Network != next.Network {
		return invalid("endpoint %s of network %s cannot become %s of %s", old.Owner, old.Network, next.Owner,
			next.Network)
	}

	group := next.elements()
	var gone []ruleset.Element
	known := make(map[string]bool, len(group))
	for i := range group {
		known[group[i].ID()] = true
	}

	for _, el := range append(old.traces(), next.leftovers()...) {
		if id := el.ID(); !known[id] {
			known[id] = true
			gone = append(gone, el)
		}
	}

	return explainMissing(c.replace(ctx, group, gone, refuse))
}

// A port on all addresses and the same port on one address exclude each other. They are keys of two different maps.
// The kernel refuses a key that already exists in the same map, but does not compare different maps. So this package
// looks up the excluding key in the other map, and then ties the transaction to the nf_tables generation of that
// lookup.

// publishedPorts records the host ports that elements publish. The key is the port from Element.HostPort. The first
// bool is true if an element publishes the port on all addresses, and the second one if on one address.
type publishedPorts map[string][2]bool

func publishedBy(elements []ruleset.Element) publishedPorts {
	list := publishedPorts{}
	for _, el := range elements {
		if port, onAll := el.HostPort(); port != "" {
			is := list[port]
			list[port] = [2]bool{is[0] || onAll, is[1] || !onAll}
		}
	}
	return list
}

// exclude reports whether one of the recorded ports excludes the element el.
func (list publishedPorts) exclude(el ruleset.Element) bool {
	port, onAll := el.HostPort()
	return onAll && list[port][1] || !onAll && list[port][0]
}

// findExcluding returns the existing elements that publish the same host port as one of the given elements, if one
// of the two publishes it on all addresses and the other on a single address.
func (c *Conn) findExcluding(elements []ruleset.Element) ([]*ruleset.Element, error) {
	var onAll []ruleset.Element
	var onOne []ruleset.Place // maps of host ports on one address
	requested := publishedBy(elements)
	for _, f := range ruleset.Families() {
		one, done := ruleset.InInet(f.HostAddrs), map[string]bool{}
		for _, el := range elements {
			switch el.Set {
			case one:
				all := ruleset.Element{Set: ruleset.InInet(f.HostPorts), Key: el.Key[f.AddrLen:]}
				if !done[string(all.Key)] {
					done[string(all.Key)] = true
					onAll = append(onAll, all)
				}
			case ruleset.InInet(f.HostPorts):
				onOne = append(onOne, one)
			}
		}
	}

	have, err := c.tables.Lookup(onAll)
	if err != nil {
		return nil, err
	}

	excluding := slices.DeleteFunc(have, func(el *ruleset.Element) bool { return el == nil })
	all, err := c.tables.ElementsOf(slices.Compact(onOne))
	for i := range all {
		if requested.exclude(all[i]) {
			excluding = append(excluding, &all[i])
		}
	}

	return excluding, err
}

// portOf returns the text of the endpoint's port (Port.String) that the element publishes or excludes. For any other
// element, it returns "".
func (ep *Endpoint) portOf(el ruleset.Element) string {
	for _, p := range ep.Ports {
		for _, a := range ep.firstAddrs() {
			one := Endpoint{Ports: []Port{p}}
			ports, _ := one.singles(a)
			if slices.ContainsFunc(ports, func(p Port) bool {
				own := p.element(ruleset.FamilyOf(a), a)
				return el.Equal(own) || el.Excludes(own)
			}) {
				return p.String()
			}
		}
	}

	return ""
}

// ConflictError reports that an element of an endpoint already exists, or that an existing published port excludes
// one of the endpoint's ports (see Conn.Add). It matches fs.ErrExist.
type ConflictError struct {
	// Element is the existing element in nft's syntax, such as "inet tombolo pods4 { cbr0 . 10.22.0.5 }".
	Element string
	// Owner and Network identify the endpoint that has the element. Owner may be the same as in the failed call. Both
	// are empty if another program added the element.
	Owner   Owner
	Network string
	// Comment is the comment of the existing element.
	Comment string
	// Port is the requested published port, as Port.String prints it, if the conflict is about a port. Element may
	// name a different address: a port on all addresses excludes the same port on one address.
	Port string
}

// Error returns a message that names the element and its owner.
func (e *ConflictError) Error() string {
	owner := fmt.Sprintf("endpoint %s of network %s", e.Owner, e.Network)
	if e.Owner == "" {
		owner = fmt.Sprintf("another program (comment %q)", e.Comment)
	}
	if e.Port != "" {
		return fmt.Sprintf("publish port %s: element %s stands in its way, and belongs to %s", e.Port, e.Element, owner)
	}
	return fmt.Sprintf("add element %s: it belongs to %s", e.Element, owner)
}

// Is reports whether target is fs.ErrExist or EEXIST.
func (e *ConflictError) Is(target error) bool { return target == fs.ErrExist || target == unix.EEXIST }

// newConflict returns the error about the existing element el. port is the text of the port to be published, or "".
func newConflict(name ruleset.TableName, el ruleset.Element, port string) *ConflictError {
	owner, network, _ := ownerOf(&el)
	return &ConflictError{
		Element: fmt.Sprintf("%s %s { %s }", name.Of(el.Set.Family), el.Set.Name, el.KeyText()),
		Owner:   owner, Network: network, Comment: el.Comment, Port: port,
	}
}
