package nft

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// DefaultMark is the mark bit if Config.Mark is 0. NetBird, kube-proxy, portmap, netavark, Calico, Tailscale, mwan3
// and AWS's CNI do not use this bit.
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
	tables   ruleset.Tables
	mark     uint32
	verified nftnl.Verified // the networks that were found ready
	err      error          // the error of Dial or On, if any
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
	return on(conn, cfg), nil
}

// On returns a Conn over an open socket, which Close closes. It ignores the Config's NetNS. Dial is for programs; On
// lets a test answer in the kernel's place.
func On(s tombolo.Socket, cfg *Config) *Conn { return on(nl.Of(s), cfg) }

func on(conn *nl.Conn, cfg *Config) *Conn {
	if cfg == nil {
		cfg = &Config{}
	}
	return &Conn{
		tables: ruleset.Tables{Conn: conn,
			Name: ruleset.TableName(cmp.Or(cfg.Table, nftnl.DefaultTable))}, mark: cmp.Or(cfg.Mark, DefaultMark),
		err: nftnl.CheckTable(cfg.Table, cfg.Mark),
	}
}

// Close closes the connection. Shortly after a program deleted nf_tables objects, Close blocks until the kernel has
// freed their memory, for an RCU grace period (some 10 ms). So call Close after another call that takes as long, such
// as deleting a link.
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

// retry calls the function try. If try fails because another program changed nf_tables at the same time, retry calls
// it again, until ctx ends. If c.err is not nil, retry returns this error instead.
func (c *Conn) retry(ctx context.Context, try func() error) error {
	if c.err != nil {
		return c.err
	}
	return nftnl.Retry(ctx, try)
}

// change calls fill to write a transaction, and then commits the transaction. If another program changes nf_tables
// before the commit, change tries again with a new transaction.
func (c *Conn) change(ctx context.Context, commit, fill func(*ruleset.Transaction) error) error {
	return c.retry(ctx, func() error {
		generation, err := nftnl.VisibleGeneration(c.tables.Conn)
		if err != nil {
			return err
		}
		t := c.tables.Begin(&generation)
		if err := fill(t); err != nil {
			return err
		}
		return commit(t)
	})
}

// commit commits a transaction of any kind, and explains the error EBUSY.
func (c *Conn) commit(t *ruleset.Transaction) error { return explainBusy(t.Commit(c.tables.Conn)) }

// elements returns all elements of all sets in our tables. See ruleset.Tables.Elements.
func (c *Conn) elements(ctx context.Context) (all []ruleset.ElementState, _ error) {
	err := c.retry(ctx, func() (err error) {
		all, err = c.tables.Elements()
		return err
	})
	return all, err
}

// lookup looks up elements by their keys. The result has the same order. An entry is nil if the element does not
// exist.
func (c *Conn) lookup(ctx context.Context, elements ...ruleset.Element) (have []*ruleset.ElementState, _ error) {
	err := c.retry(ctx, func() (err error) {
		have, err = c.tables.Lookup(elements)
		return err
	})
	return have, err
}

// commitEndpoints commits a transaction that changes only elements of endpoints, unless it is empty. Networks that
// Ready found complete before such a transaction are still complete afterwards.
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
