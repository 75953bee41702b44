package conntrack

import (
	"context"
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Config says how to open a Conn. The zero value, and nil, mean the caller's own
// namespace.
type Config struct {
	// NetNS is the namespace whose flows are meant; nil is that of the calling
	// thread. It may be closed after Dial.
	NetNS *netns.NS
}

// Conn lists and deletes the flows of one network namespace. Its methods may be
// called from several goroutines. Errors of the kernel are *tombolo.OpError, or wrap
// one.
type Conn struct {
	nl     *nl.Conn
	shared bool
}

// Dial opens a connection of its own. It needs CAP_SYS_ADMIN where cfg names a
// namespace.
func Dial(cfg *Config) (*Conn, error) {
	var c nl.Config
	if cfg != nil {
		c.NetNS = cfg.NetNS
	}
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, &c)
	if err != nil {
		return nil, err
	}
	return &Conn{nl: conn}, nil
}

// On makes a Conn over a connection of NETLINK_NETFILTER that is open already and
// that stays with its owner: Close does nothing then.
func On(conn *nl.Conn) *Conn { return &Conn{nl: conn, shared: true} }

// Usable is nil if the connection is open; otherwise the error matches tombolo.ErrInvalid.
func (c *Conn) Usable() error { return c.nl.Usable() }

// Close closes the connection, unless it is another's.
func (c *Conn) Close() error {
	if c.shared {
		return nil
	}
	return c.nl.Close()
}

// List gives the flows that match any of the filters, in the kernel's
// order. A flow that begins or ends meanwhile may be in the list or not. It goes on
// past errors and joins them, and gives what could be listed nevertheless.
//
// The errors match errors.ErrUnsupported where the kernel has no ctnetlink,
// fs.ErrPermission without CAP_NET_ADMIN, and tombolo.ErrInterrupted where the kernel
// said so of each of many tries.
func (c *Conn) List(ctx context.Context, filters ...Filter) ([]Flow, error) {
	var errs []error
	var narrow []Filter // each of one family
	for i := range filters {
		of, err := filters[i].split()
		if err != nil {
			errs = append(errs, &tombolo.OpError{Op: "list flows", Object: filters[i].String(), Err: err})
		}
		narrow = append(narrow, of...)
	}
	if len(narrow) == 0 {
		return nil, errors.Join(errs...)
	}
	if count, err := c.count(); err != nil || count == 0 {
		return nil, errors.Join(append(errs, err)...)
	}
	var list []Flow
	for _, q := range plan(narrow) {
		if err := ctx.Err(); err != nil {
			errs = append(errs, err)
			break
		}
		part, err := c.ask(&q)
		if err != nil {
			errs = append(errs, err)
		}
		list = append(list, part...)
	}
	return list, errors.Join(errs...)
}

// count gives the number of flows in the namespace, which the kernel keeps at hand.
func (c *Conn) count() (uint32, error) {
	var count uint32
	var b nl.Batch
	m, err := encode(messageStats, 0, unix.AF_UNSPEC, nil)
	b.AddGet("count flows", nil, m, err, func(m netlink.Message) error {
		var err error
		count, err = decodeStats(m.Data)
		return err
	})
	err = c.nl.Execute(&b)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		// nfnetlink knows no such subsystem, and could not load it.
		return 0, &tombolo.OpError{Op: "count flows", Err: fmt.Errorf(
			"%w: this kernel has no ctnetlink; load the module nf_conntrack_netlink, or use a kernel with CONFIG_NF_CT_NETLINK",
			errors.ErrUnsupported)}
	}
	return count, err
}

// ask puts a question to the kernel, or where it refuses it, asks for all flows of
// the family.
func (c *Conn) ask(q *question) ([]Flow, error) {
	m, err := q.message()
	list, err := c.dump(q, m, err)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		m, err = encode(messageGet, 0, q.common.Family, nil)
		list, err = c.dump(q, m, err)
	}
	return list, err
}

func (c *Conn) dump(q *question, ask netlink.Message, err error) ([]Flow, error) {
	var list []Flow
	err = c.nl.List("list flows "+q.String(), ask, err, func(m netlink.Message) error {
		if m.Header.Type != messageNew {
			return nil
		}
		flow, err := decode(m.Data)
		if err == nil && q.matches(&flow) {
			list = append(list, flow)
		}
		return err
	})
	return list, err
}

// Flush deletes the flows that match any of the filters, and says how many it
// deleted. Those that end by themselves meanwhile are not counted, and no error. It
// goes on past errors and joins them; those of List are among them.
//
// Give it all filters at once: the kernel walks its whole table for each question,
// see Filter.
//
// The next packet of such a client begins a flow anew, under the rules as they are
// then: so change the rules first. A packet which is within the kernel at the time
// may still confirm its flow under the old ones, some microseconds later.
func (c *Conn) Flush(ctx context.Context, filters ...Filter) (deleted int, _ error) {
	list, err := c.List(ctx, filters...)
	deleted, failed := c.delete(ctx, list)
	return deleted, errors.Join(err, failed)
}

// deletesAtOnce is how many requests go into one datagram: their acknowledgements
// must fit into the socket's buffer, which not everyone may enlarge.
const deletesAtOnce = 128

func (c *Conn) delete(ctx context.Context, list []Flow) (int, error) {
	deleted, failed := 0, 0
	var first error
	for len(list) > 0 && ctx.Err() == nil {
		part := list[:min(deletesAtOnce, len(list))]
		list = list[len(part):]
		n, bad, err := c.deleteAtOnce(part)
		deleted += n
		failed += bad
		if first == nil {
			first = err
		}
	}
	if failed > 1 {
		// They are alike: one tells what the operator has to know.
		first = fmt.Errorf("%d flows could not be deleted, of which the first: %w", failed, first)
	}
	return deleted, errors.Join(first, ctx.Err())
}

// deleteAtOnce gives how many of the flows were deleted, how many could not be, and
// the first of the errors.
func (c *Conn) deleteAtOnce(list []Flow) (deleted, failed int, _ error) {
	var b nl.Batch
	for i := range list {
		m, err := list[i].deleteMessage()
		b.Add("delete flow", &list[i], m, err)
	}
	err := c.nl.Execute(&b)
	var first error
	for i := range list {
		switch err := b.Err(i); {
		case err == nil:
			deleted++
		case !errors.Is(err, unix.ENOENT): // gone, or another with the same tuple
			failed++
			if first == nil {
				first = err
			}
		}
	}
	if err != nil && deleted == len(list) {
		return 0, len(list), err // none of it was sent
	}
	return deleted, failed, first
}
