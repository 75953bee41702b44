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

// DefaultMark is the mark bit of a Config that names none. It is outside the bits of packet marks that NetBird,
// kube-proxy, portmap, netavark, Calico, Tailscale, mwan3 and AWS's CNI use.
const DefaultMark = nftnl.DefaultMark

// Config says how to open a Conn. The zero value, and nil, mean the caller's own
// namespace and DefaultMark.
type Config struct {
	// NetNS is the namespace whose firewall is meant; nil is that of the calling
	// thread. It may be closed after Dial.
	NetNS *netns.NS
	// Mark is the bit (or bits) of a packet's mark which say that a pod may have
	// it forwarded; 0 is DefaultMark. All programs that share a namespace must agree on it:
	// it is part of the rules, and Ensure replaces rules that have another.
	Mark uint32
	// Table is the name of the tables, which those share that are to see each other's pods;
	// empty is "tombolo", which are the plugin's. It is made of letters, digits, "_", "." and "-", begins with a letter
	// and has 32 of them at most. One of another name needs a Mark of its own, since each table
	// clears its Mark from its bridges' packets before it looks at them.
	Table string
}

// Conn builds and reads the firewall of one network namespace. Its methods may be
// called from several goroutines, and from any number of processes at once. Errors
// of the kernel are *tombolo.OpError, or wrap one.
type Conn struct {
	tables ruleset.Tables
	mark   uint32
	seen   nftnl.Seen // which networks were ready
	err    error      // of what it was opened with
}

// Dial opens a connection. It needs CAP_SYS_ADMIN where cfg names a namespace;
// everything that is done over it needs CAP_NET_ADMIN in the user namespace that
// owns the network namespace.
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

// On works over a connection that is there already, and that Close closes. The Config's NetNS
// says nothing. It is for the packages of this module and for their tests, which put a fake
// kernel there.
func On(s tombolo.Socket, cfg *Config) *Conn { return on(nl.Of(s), cfg) }

func on(conn *nl.Conn, cfg *Config) *Conn {
	if cfg == nil {
		cfg = &Config{}
	}
	return &Conn{
		tables: ruleset.Tables{Conn: conn, Name: ruleset.TableName(cmp.Or(cfg.Table, nftnl.DefaultTable))}, mark: cmp.Or(cfg.Mark, DefaultMark),
		err: nftnl.CheckTable(cfg.Table, cfg.Mark),
	}
}

// Close closes the connection. If a program has just deleted something, the kernel makes it wait until that is
// freed, for an RCU grace period (some 10 ms): so it is best called after another call that takes as long, such as
// deleting a link.
func (c *Conn) Close() error {
	return c.tables.Conn.Close()
}

// Probe says whether the firewall can be worked with at all: nil if the kernel has
// nf_tables and lets the caller use it. The error matches errors.ErrUnsupported
// where nf_tables is missing, and fs.ErrPermission without CAP_NET_ADMIN.
func (c *Conn) Probe(ctx context.Context) error {
	_, err := nftnl.Generation(c.tables.Conn)
	if nftnl.IsMissing(err) {
		return &tombolo.OpError{Op: "use nf_tables", Err: fmt.Errorf(
			"%w: this kernel has no nf_tables; load the module of that name, or use a kernel with CONFIG_NF_TABLES and CONFIG_NF_TABLES_INET",
			errors.ErrUnsupported)}
	}
	return err
}

// Socket is the connection, for other packages to work over (foreign.On). It stays with c.
func (c *Conn) Socket() tombolo.Socket {
	return nftnl.Socket{Conn: c.tables.Conn, Seen: &c.seen}
}

// retry calls try until it returns something else than a lost race.
func (c *Conn) retry(ctx context.Context, try func() error) error {
	if c.err != nil {
		return c.err
	}
	return nftnl.Retry(ctx, try)
}

// elements lists all elements of our sets.
func (c *Conn) elements(ctx context.Context) (all []ruleset.ElementState, _ error) {
	err := c.retry(ctx, func() (err error) {
		all, err = c.tables.Elements()
		return err
	})
	return all, err
}

// lookup gets elements by their keys; those that are not there are nil.
func (c *Conn) lookup(ctx context.Context, elements ...ruleset.Element) (have []*ruleset.ElementState, _ error) {
	err := c.retry(ctx, func() (err error) {
		have, err = c.tables.Lookup(elements)
		return err
	})
	return have, err
}

// commitEndpoints is commit for what changes nothing but elements of endpoints.
func (c *Conn) commitEndpoints(t *ruleset.Transaction) error {
	if t.Empty() {
		return nil
	}
	err := t.Commit(c.tables.Conn)
	switch {
	case t.Generation == nil:
	case err == nil:
		c.seen.Follow(*t.Generation)
	case errors.Is(err, unix.ERESTART):
		c.seen.Drop() // what it says is over
	}
	return err
}
