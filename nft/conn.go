package nft

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// DefaultMark is the mark bit of a Config that names none. It is outside the bits
// that kube-proxy, portmap, Calico, Cilium and Tailscale use.
const DefaultMark = nftnl.DefaultMark

// Config says how to open a Conn. The zero value, and nil, mean the caller's own
// namespace and DefaultMark.
type Config struct {
	// NetNS is the namespace whose firewall is meant; nil is that of the calling
	// thread. It may be closed after Dial.
	NetNS *netns.NS
	// Mark is the bit (or bits) of a packet's mark which say that a pod may have
	// it forwarded; 0 is DefaultMark. All who share a namespace must agree on it:
	// it is part of the rules, and Ensure replaces rules that have another.
	Mark uint32
}

// Conn builds and reads the firewall of one network namespace. Its methods may be
// called from several goroutines, and from any number of processes at once. Errors
// of the kernel are *tombolo.OpError, or wrap one.
type Conn struct {
	nl   *nl.Conn
	mark uint32
	seal nftnl.Seen
}

// Dial opens a connection. It needs CAP_SYS_ADMIN where cfg names a namespace;
// everything that is done over it needs CAP_NET_ADMIN in the user namespace that
// owns the network namespace.
func Dial(cfg *Config) (*Conn, error) {
	if cfg == nil {
		cfg = &Config{}
	}
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, &nl.Config{NetNS: cfg.NetNS})
	if err != nil {
		return nil, err
	}
	return on(conn, cfg.Mark), nil
}

// On works over a connection that is there already, and that Close closes; 0 is
// DefaultMark. It is for the packages of this module and for their tests, which put a
// fake kernel there.
func On(s tombolo.Socket, mark uint32) *Conn { return on(nl.Of(s), mark) }

func on(conn *nl.Conn, mark uint32) *Conn {
	if mark == 0 {
		mark = DefaultMark
	}
	return &Conn{nl: conn, mark: mark}
}

// Close closes the connection. If anyone has just deleted something, the kernel
// makes it wait until that is freed, for an RCU grace period (some 10 ms): so it is
// best done after whatever else takes as long, such as deleting a link.
func (c *Conn) Close() error {
	if c == nil {
		return c.usable(context.Background())
	}
	return c.nl.Close()
}

// Probe says whether the firewall can be worked with at all: nil if the kernel has
// nf_tables and lets the caller use it. The error matches errors.ErrUnsupported
// where nf_tables is missing, and fs.ErrPermission without CAP_NET_ADMIN.
func (c *Conn) Probe() error {
	if err := c.usable(context.Background()); err != nil {
		return err
	}

	_, err := c.generation()
	if nftnl.IsMissing(err) {
		return &tombolo.OpError{Op: "use nf_tables", Err: fmt.Errorf(
			"%w: this kernel has no nf_tables; load the module of that name, or use a kernel with CONFIG_NF_TABLES and CONFIG_NF_TABLES_INET",
			errors.ErrUnsupported)}
	}
	return err
}

// Socket is the connection, for other packages to work over (foreign.On). It stays with c.
func (c *Conn) Socket() tombolo.Socket {
	if c == nil {
		return nil
	}
	return nftnl.Socket{Conn: c.nl, Seen: &c.seal}
}

// usable refuses a Conn or a context that nothing can be done with.
func (c *Conn) usable(ctx context.Context) error {
	if c == nil {
		return nftnl.Usable(ctx, nil)
	}
	return nftnl.Usable(ctx, c.nl)
}
