package sockdiag

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Config says how to open a Conn. The zero value, and nil, mean the caller's own
// namespace.
type Config struct {
	// NetNS is the namespace whose sockets are meant; nil is that of the calling
	// thread. It may be closed after Dial.
	NetNS *netns.NS
}

// Conn looks at the sockets of one network namespace. Its methods may be called from
// several goroutines. Errors of the kernel are *tombolo.OpError, or wrap one.
type Conn struct {
	nl *nl.Conn // nil where the kernel has no NETLINK_SOCK_DIAG
}

// Dial opens a connection.
func Dial(cfg *Config) (*Conn, error) {
	var c nl.Config
	if cfg != nil {
		c.NetNS = cfg.NetNS
	}
	conn, err := nl.Dial(unix.NETLINK_SOCK_DIAG, &c)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return &Conn{}, nil
	}
	if err != nil {
		return nil, err
	}
	return &Conn{nl: conn}, nil
}

// Close closes the connection.
func (c *Conn) Close() error {
	if c.nl == nil {
		return nil
	}
	return c.nl.Close()
}

// Listeners gives the sockets that take any of what is wanted (Socket.Takes), each
// once, sorted by protocol, address and port. It asks once for each protocol and
// address family, whatever the number of ports.
func (c *Conn) Listeners(ctx context.Context, wants []Want) ([]Socket, error) {
	questions, err := ask(wants)
	if err != nil {
		return nil, &tombolo.OpError{Op: "list sockets", Err: err}
	}
	var list []Socket
	for _, q := range questions {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		part, err := c.answer(&q)
		if err != nil {
			return nil, err
		}
		for _, s := range part {
			if slices.ContainsFunc(wants, s.Takes) {
				at, _ := slices.BinarySearchFunc(list, s, compareSockets)
				list = slices.Insert(list, at, s)
			}
		}
	}
	return list, nil
}

func compareSockets(a, b Socket) int {
	return cmp.Or(cmp.Compare(a.Proto, b.Proto), a.Local.Compare(b.Local), cmp.Compare(a.Inode, b.Inode))
}

// answer gives the sockets that a question is about, and maybe others. A kernel without
// NETLINK_SOCK_DIAG, or without its module for the protocol, shows none.
func (c *Conn) answer(q *question) ([]Socket, error) {
	if c.nl == nil {
		return nil, nil
	}
	list, err := c.list(q, decodeReceiver)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	return list, err
}

func (c *Conn) list(q *question, decode func(proto uint8, b []byte) ([]Socket, error)) ([]Socket, error) {
	var list []Socket
	ask, err := q.message()
	err = c.nl.List("list "+q.String(), ask, err, func(m netlink.Message) error {
		if m.Header.Type != unix.SOCK_DIAG_BY_FAMILY {
			return nil
		}
		sockets, err := decode(q.proto, m.Data)
		list = append(list, sockets...)
		return err
	})
	return list, err
}
