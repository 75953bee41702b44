package foreign

import (
	"cmp"
	"context"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Config says how to open a Conn. The zero value, and nil, mean the caller's own
// namespace, and what package nft's Config means by none.
type Config struct {
	// NetNS is the namespace whose firewalls are meant; nil is that of the calling
	// thread. It may be closed after Dial.
	NetNS *netns.NS
	// Mark and Table are those of package nft's Config.
	Mark  uint32
	Table string
	// AdminChain is a chain of the operator's that iptables is to call before all others that see what is
	// forwarded; empty is none. It is made where it is not there, and FORWARD is.
	AdminChain string
}

// Conn looks at the firewalls of others, and has one rule in some. Its methods may be
// called from several goroutines, and from any number of processes at once. Errors of the
// kernel are *tombolo.OpError, or wrap one.
type Conn struct {
	nl     *nl.Conn
	seen   *nftnl.Seen
	shared bool
	mark   uint32
	table  string
	admin  string
	link   string // of Obstacles: that pods' packets come in by
	err    error  // of what it was opened with
}

// Dial opens a connection. It needs CAP_SYS_ADMIN where cfg names a namespace;
// everything that is done over it needs CAP_NET_ADMIN in the user namespace that
// owns the network namespace.
func Dial(cfg *Config) (*Conn, error) {
	if cfg == nil {
		cfg = &Config{}
	}
	if err := cfg.check(); err != nil {
		return nil, err
	}
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, &nl.Config{NetNS: cfg.NetNS})
	if err != nil {
		return nil, err
	}
	c := On(conn, cfg)
	c.shared = false
	return c, nil
}

// On works over a connection that is open already, and that stays with its owner: Close does
// nothing then. That of package nft's Conn (its Socket) brings along what was seen over it,
// so that Ready costs less. The Config's NetNS says nothing.
func On(s tombolo.Socket, cfg *Config) *Conn {
	if cfg == nil {
		cfg = &Config{}
	}
	socket := nftnl.Of(s)
	return &Conn{
		nl: socket.Conn, seen: socket.Seen, shared: true,
		mark: cmp.Or(cfg.Mark, nftnl.DefaultMark), table: cmp.Or(cfg.Table, nftnl.DefaultTable),
		admin: cfg.AdminChain, err: cfg.check(),
	}
}

func (cfg *Config) check() error {
	if err := nftnl.CheckTable(cfg.Table, cfg.Mark); err != nil {
		return err
	}
	return checkAdmin(cfg.AdminChain)
}

// Close closes the connection, unless it is another's.
func (c *Conn) Close() error {
	if c == nil {
		return c.usable(context.Background())
	}
	if c.shared {
		return nil
	}
	return c.nl.Close()
}

// usable refuses a Conn or a context that nothing can be done with.
func (c *Conn) usable(ctx context.Context) error {
	if c == nil {
		return nftnl.Usable(ctx, nil)
	}
	if c.err != nil {
		return c.err
	}
	return nftnl.Usable(ctx, c.nl)
}
