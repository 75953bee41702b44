package nft

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/diff"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// DefaultMark is the mark bit if Config.Mark is 0. NetBird, kube-proxy, portmap, netavark, Calico, Tailscale, mwan3
// and AWS's CNI do not use this bit of a packet's mark. NetBird uses the bit in marks of connections (0x1bd10).
const DefaultMark = nftnl.DefaultMark

// Config holds the parameters of Dial. A nil Config and a zero field mean the defaults.
type Config struct {
	// NetNS is the network namespace of the firewall. If nil, Dial uses the namespace of the calling thread. The
	// caller may close NetNS after Dial.
	NetNS *netns.NS
	// Mark is the bit, or the bits, of the packet mark that the firewall sets on packets that may be forwarded. 0
	// means DefaultMark. All programs that use the same table must use the same Mark, since the mark is part of the
	// rules. Ensure replaces rules with another mark.
	Mark uint32
	// Table is the name of the nf_tables tables. Programs that need to see each other's pods use the same Table. If
	// empty, it is "tombolo", which Tombolo's plugin uses. It has at most 32 letters, digits, "_", "." and "-", and
	// begins with a letter. Each Table needs its own Mark: a table's rules first clear its mark on all packets of its
	// bridges, even if another table has set it.
	Table string
}

// Conn manages the firewall of one network namespace. Several goroutines and several processes may use it at the same
// time. Errors from the kernel are, or wrap, a *tombolo.OpError.
type Conn struct {
	tables ruleset.Tables
	mark   uint32
	// verified records which rulesets Ready, here and of foreign.Conn, found complete in a generation of nf_tables.
	verified nftnl.Verified
	err      error // an invalid Config passed to On; all methods that send requests, except Probe, return it
}

// Dial opens a netlink connection to nf_tables. It needs CAP_SYS_ADMIN if cfg.NetNS is set. All methods need
// CAP_NET_ADMIN in the user namespace that owns the network namespace.
func Dial(cfg *Config) (*Conn, error) {
	if cfg == nil {
		cfg = &Config{}
	}

	if err := nftnl.CheckTable(cfg.Table, cfg.Mark); err != nil {
		return nil, err
	}

	conn, err := nl.Dial(unix.NETLINK_NETFILTER, cfg.NetNS)
	if err != nil {
		return nil, err
	}
	return On(conn, cfg), nil
}

// On returns a Conn that sends its requests through the open socket s, and whose Close closes s. It ignores
// cfg.NetNS. If cfg is invalid, all methods except Probe, Socket and Close return an error. Tests use On to answer
// in the kernel's place.
func On(s tombolo.Socket, cfg *Config) *Conn {
	if cfg == nil {
		cfg = &Config{}
	}
	return &Conn{
		tables: ruleset.Tables{Conn: nl.Of(s),
			Name: ruleset.TableName(cmp.Or(cfg.Table, nftnl.DefaultTable))}, mark: cmp.Or(cfg.Mark, DefaultMark),
		err: nftnl.CheckTable(cfg.Table, cfg.Mark),
	}
}

// Close closes the connection. Shortly after a program deleted nf_tables objects, Close blocks until the kernel has
// freed their memory, for an RCU grace period (some 10 ms). If a slow call, such as deleting a link, comes before
// Close, the wait is mostly over by then.
func (c *Conn) Close() error {
	return c.tables.Conn.Close()
}

// Probe returns nil if the kernel has nf_tables and permits the caller to use it. If nf_tables is missing, the error
// matches errors.ErrUnsupported. Without CAP_NET_ADMIN, it matches fs.ErrPermission.
func (c *Conn) Probe(ctx context.Context) error {
	_, err := nftnl.Generation(c.tables.Conn)
	if nftnl.IsMissing(err) {
		return &tombolo.OpError{Op: "use nf_tables", Err: fmt.Errorf(
			"%w: this kernel has no nf_tables; load the module of that name, or use a kernel with CONFIG_NF_TABLES "+
				"and CONFIG_NF_TABLES_INET",
			errors.ErrUnsupported)}
	}
	return err
}

// Socket returns the connection for use by other packages, such as foreign.On. The Conn c still owns the connection.
func (c *Conn) Socket() tombolo.Socket {
	return nftnl.SharedSocket{Conn: c.tables.Conn, Verified: &c.verified}
}

// retry calls the function try. If try fails because another program changed nf_tables at the same time, retry calls it
// again, as nftnl.Retry does. If c.err is not nil, retry returns this error instead.
func (c *Conn) retry(ctx context.Context, try func() error) error {
	if c.err != nil {
		return c.err
	}
	return nftnl.Retry(ctx, try)
}

// change calls fill to write a transaction, and then commit to commit it. If another program changes nf_tables before
// the commit, change tries again with a new transaction, as nftnl.Retry does.
func (c *Conn) change(ctx context.Context, commit, fill func(*ruleset.Transaction) error) error {
	return c.retry(ctx, func() error {
		generation, err := nftnl.VisibleGeneration(c.tables.Conn)
		if err != nil {
			return err
		}
		t := c.tables.Name.Begin(&generation)
		if err := fill(t); err != nil {
			return err
		}
		return commit(t)
	})
}

// commit commits a transaction that may change any object, not only elements of endpoints. It explains the error EBUSY.
func (c *Conn) commit(t *ruleset.Transaction) error { return explainBusy(t.Commit(c.tables.Conn)) }

// retried calls the function try as Conn.retry does, and returns its last result.
func retried[T any](ctx context.Context, c *Conn, try func() (T, error)) (result T, _ error) {
	err := c.retry(ctx, func() (err error) {
		result, err = try()
		return err
	})
	return result, err
}

// elements returns the elements of all our sets, without sentinels. See ruleset.Tables.Elements.
func (c *Conn) elements(ctx context.Context) ([]ruleset.Element, error) {
	return retried(ctx, c, c.tables.Elements)
}

// lookup looks up elements by their keys, and returns them in the same order. For an element that does not exist, the
// result contains nil.
func (c *Conn) lookup(ctx context.Context, elements ...ruleset.Element) ([]*ruleset.Element, error) {
	return retried(ctx, c, func() ([]*ruleset.Element, error) { return c.tables.Lookup(elements) })
}

// commitEndpoints commits a transaction that changes only elements of endpoints or of the host, or does nothing if it
// is empty. Networks that were complete then stay complete. So after a transaction that is tied to a generation,
// commitEndpoints moves the record c.verified from that generation to the next one. If the kernel refuses the
// transaction as outdated, commitEndpoints empties c.verified.
func (c *Conn) commitEndpoints(t *ruleset.Transaction) error {
	if t.Empty() {
		return nil
	}

	err := t.Commit(c.tables.Conn)
	switch {
	case t.Generation == nil:
	case err == nil:
		c.verified.Follow(*t.Generation)
	case errors.Is(err, unix.ERESTART):
		c.verified.Drop() // the remembered state is outdated
	}

	return err
}

// Ensure creates the firewall of a network, or repairs it. In one transaction, it adds missing tables, sets, chains
// and rules, and replaces different ones. It keeps the elements of sets that it need not create again, and does not
// change other networks. changed reports whether anything was missing or different. Several programs may call Ensure
// at the same time.
//
// Elements of endpoints of all networks are missing if Ensure creates a set again, or if another program has emptied or
// reloaded one. In these cases, Ensure calls Replace for the endpoints in back. So back must contain all endpoints that
// the caller knows, of all networks. If Ensure is interrupted before it has added these endpoints, the network stays
// incomplete for Ready and Check. Only CheckEndpoint notices missing endpoints that are not in back.
//
// The first Ensure also creates the rules that all networks share. A different Config.Mark changes these rules for
// all networks.
func (c *Conn) Ensure(ctx context.Context, n Network, back ...Endpoint) (changed bool, _ error) {
	changed, emptied, err := c.ensure(ctx, n, len(back) == 0)
	if err != nil || !emptied || len(back) == 0 {
		return changed, err
	}

	if err := c.Replace(ctx, back...); err != nil {
		return changed, err
	}

	if _, _, err := c.ensure(ctx, n, true); err != nil {
		return changed, err
	}

	// Another program may have emptied a set in the meantime, so restore the endpoints again.
	return changed, c.Replace(ctx, back...)
}

// Prepare works like Ensure, but adds no sentinels (marker elements, see the package comment), neither to new sets
// nor to sets that another program emptied or loaded. So Ready stays false for every network that uses such a set,
// until Ensure is called. Prepare is for callers that restore more than endpoints, or several networks that share
// sets. If such a caller is interrupted, Ready still returns false for the next caller. If only sentinels are
// missing, changed is true too.
func (c *Conn) Prepare(ctx context.Context, n Network) (changed bool, _ error) {
	changed, _, err := c.ensure(ctx, n, false)
	return changed, err
}

// ensure implements Ensure (with sentinels) and Prepare (without). changed reports whether anything was missing or
// different. emptied reports whether elements of endpoints may be missing, because ensure created a set, or because
// another program emptied a set or loaded an older copy of it.
func (c *Conn) ensure(ctx context.Context, n Network, sentinels bool) (changed, emptied bool, _ error) {
	want, err := c.ruleset(&n)
	if err != nil {
		return false, false, err
	}

	err = nftnl.Retry(ctx, func() error {
		have, err := c.tables.Read(want)
		if err != nil {
			return err
		}

		p := ruleset.Plan(want, have)
		differs, lost := !p.IsEmpty(), len(p.Sets)+len(p.Unmarked) > 0
		if !sentinels {
			p.Unmarked = nil
		}

		if !p.IsEmpty() {
			if err := p.Transaction(have, sentinels).Commit(c.tables.Conn); err != nil {
				return explainKernel(explainBusy(err))
			}
		}

		changed, emptied = differs, lost
		return nil
	})

	return changed, emptied, err
}

// Ready reports whether the network is complete, so that the caller does not need Ensure. It is cheap enough to be
// called for each new pod. Ready checks that the tables and chains exist, are active and hooked in, and were created
// for this network and mark by this version. It also checks the number of rules in each chain, the elements that
// describe the bridge, and the sentinel of each set. After another program emptied a set or loaded an older copy, its
// sentinel is missing or different. Ready does not notice rules that were replaced (see Check), or missing elements of
// endpoints (see CheckEndpoint).
func (c *Conn) Ready(ctx context.Context, n Network) (bool, error) {
	want, err := c.ruleset(&n)
	if err = errors.Join(ctx.Err(), err); err != nil {
		return false, err
	}

	if !c.verified.IsOn() {
		return c.isComplete(want)
	}

	generation, err := nftnl.Generation(c.tables.Conn)
	if err != nil {
		return false, err
	}

	sum := want.Sum()
	if c.verified.Covers(generation, sum) {
		return true, nil
	}

	// Wait until the changes of this generation are visible. The following answers then belong to this generation or
	// to a later one.
	settled := nftnl.Unchanged(c.tables.Conn, generation)
	if settled != nil && !nftnl.IsOvertaken(settled) {
		return false, settled
	}

	complete, err := c.isComplete(want)
	if complete && settled == nil {
		c.verified.Add(generation, sum)
	}

	return complete, err
}

// isComplete implements Ready, without the record c.verified.
func (c *Conn) isComplete(want *ruleset.Ruleset) (bool, error) {
	have, err := c.tables.Outline(want)
	if err != nil {
		return false, err
	}
	changes := ruleset.Plan(want, have)
	return changes.IsEmpty(), nil
}

// explainKernel explains the error "not found" of Ensure's transaction. The transaction names only objects of nf_tables
// that exist or that it creates. So the error means that the kernel lacks an nf_tables module. Kernels before 6.16
// return it too if a link of a Share does not exist.
func explainKernel(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf(
			"the kernel lacks a part of nf_tables, or could not load it (CONFIG_NFT_FIB_INET, CONFIG_NFT_NAT, "+
				"CONFIG_NFT_MASQ and CONFIG_NFT_CT are needed, and CONFIG_NF_TABLES_NETDEV, CONFIG_NFT_FWD_NETDEV "+
				"and CONFIG_NFT_DUP_NETDEV for a shared NIC): %w", err)
	}
	return err
}

// explainBusy adds an explanation to the EBUSY that the kernel returns if a rule still uses a chain or set.
func explainBusy(err error) error {
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("a rule that is not ours refers to it (see: nft list ruleset): %w", err)
	}
	return err
}

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
// repairs them. Additional elements are no difference, except elements that a guarded endpoint needed only earlier (see
// Replace).
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
