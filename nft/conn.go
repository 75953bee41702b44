package nft

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// DefaultMark is the mark bit of a Config that names none. It is outside the bits
// that kube-proxy, portmap, Calico, Cilium and Tailscale use.
const DefaultMark = 0x1000

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
	seal sealKeeper
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
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		// nfnetlink knows no such subsystem, and could not load it.
		return &tombolo.OpError{Op: "use nf_tables", Err: fmt.Errorf(
			"%w: this kernel has no nf_tables; load the module of that name, or use a kernel with CONFIG_NF_TABLES and CONFIG_NF_TABLES_INET",
			errors.ErrUnsupported)}
	}
	return err
}

// tries bounds how often something is read, decided on and refused because the
// firewall had changed in between. Each refusal means that somebody else got on.
const tries = 200

// retry calls try until it returns something else than a lost race.
func retry(ctx context.Context, try func() error) error {
	var err error
	for i := range tries {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err = try(); !isOvertaken(err) {
			return err
		}
		if i >= 8 {
			// Out of step with whoever else tries.
			time.Sleep(rand.N(time.Millisecond))
		}
	}
	return fmt.Errorf("gave up after %d tries, each overtaken by another change of the firewall: %w", tries, err)
}

// errOvertaken says that what was found is no longer there, or the reverse.
var errOvertaken = errors.New("overtaken by another change")

func isOvertaken(err error) bool {
	return errors.Is(err, errOvertaken) ||
		errors.Is(err, unix.ERESTART) || // a transaction with an old generation
		errors.Is(err, tombolo.ErrInterrupted)
}

// usable refuses a Conn or a context that nothing can be done with.
func (c *Conn) usable(ctx context.Context) error {
	switch {
	case c == nil:
		return (*nl.Conn)(nil).Usable()
	case ctx == nil:
		return nl.NoContext()
	}
	err := c.nl.Usable()
	if err != nil && ctx.Err() != nil {
		// What is over is over, whatever it would have been done by.
		err = errors.Join(ctx.Err(), err)
	}
	return err
}
