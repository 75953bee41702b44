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

// DefaultMark is the mark bit of a Config without Mark. The packet marks of NetBird, kube-proxy, portmap, netavark,
// Calico, Tailscale, mwan3 and AWS's CNI do not use it.
const DefaultMark = nftnl.DefaultMark

// Config holds the parameters of Dial. The zero value, and nil, mean the caller's own namespace and DefaultMark.
type Config struct {
	// NetNS is the namespace of the firewall. If nil, it is the namespace of the calling thread. It may be closed
	// after Dial.
	NetNS *netns.NS
	// Mark is the bit (or bits) of a packet's mark which means that a pod may have the packet forwarded. 0 means
	// DefaultMark. All programs that share a namespace must use the same one, since it is part of the rules, and
	// Ensure replaces rules with another mark.
	Mark uint32
	// Table is the name of the tables. Programs that must see each other's pods share it. If empty, it is "tombolo",
	// the name of the plugin's tables. It has at most 32 letters, digits, "_", "." and "-", and begins with a letter.
	// Another table needs another Mark, since each table clears its Mark from its bridges' packets before it looks at
	// them.
	Table string
}

// Conn builds and reads the firewall of one network namespace. Several goroutines, and several processes, may call
// its methods at once. Errors of the kernel are a *tombolo.OpError, or wrap one.
type Conn struct {
	tables ruleset.Tables
	mark   uint32
	seen   nftnl.Seen // the networks that were found ready
	err    error      // the error of opening it, if any
}

// Dial opens a connection. It needs CAP_SYS_ADMIN if cfg names a namespace. All operations need CAP_NET_ADMIN in the
// user namespace that owns the network namespace.
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

// Close closes the connection. Shortly after a program deleted an object, the kernel makes Close wait until the
// memory is freed, for an RCU grace period (some 10 ms). So call it after another call that takes as long, such as
// deleting a link.
func (c *Conn) Close() error {
	return c.tables.Conn.Close()
}

// Probe returns nil if the kernel has nf_tables and permits the caller to use it. The error matches
// errors.ErrUnsupported if nf_tables is missing, and fs.ErrPermission without CAP_NET_ADMIN.
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

// Socket returns the connection, for use by other packages (foreign.On). c still owns it.
func (c *Conn) Socket() tombolo.Socket {
	return nftnl.Socket{Conn: c.tables.Conn, Seen: &c.seen}
}

// retry calls try until it returns something other than a lost race.
func (c *Conn) retry(ctx context.Context, try func() error) error {
	if c.err != nil {
		return c.err
	}
	return nftnl.Retry(ctx, try)
}

// change commits the transaction that fill writes from what it reads. It starts again if another program changes
// nf_tables in between.
func (c *Conn) change(ctx context.Context, commit, fill func(*ruleset.Transaction) error) error {
	return c.retry(ctx, func() error {
		generation, err := nftnl.SeenGeneration(c.tables.Conn)
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

// commit commits a transaction of any kind.
func (c *Conn) commit(t *ruleset.Transaction) error { return explainBusy(t.Commit(c.tables.Conn)) }

// elements returns all elements of our sets.
func (c *Conn) elements(ctx context.Context) (all []ruleset.ElementState, _ error) {
	err := c.retry(ctx, func() (err error) {
		all, err = c.tables.Elements()
		return err
	})
	return all, err
}

// lookup returns elements by their keys; those that do not exist are nil.
func (c *Conn) lookup(ctx context.Context, elements ...ruleset.Element) (have []*ruleset.ElementState, _ error) {
	err := c.retry(ctx, func() (err error) {
		have, err = c.tables.Lookup(elements)
		return err
	})
	return have, err
}

// commitEndpoints commits a transaction that changes only elements of endpoints.
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
		c.seen.Drop() // the remembered state is outdated
	}

	return err
}
