// Package conntrack lists and deletes flows: what the kernel remembers of packets
// that it has tracked, and the address translation that it goes on applying to them.
//
//	n, err := conn.Flush(ctx, conntrack.Of(netip.MustParseAddr("10.22.0.5")))
//
// NAT rules see the first packet of a flow only. A client that keeps sending
// datagrams from one port keeps its flow alive, and with it whatever was decided when
// it began.
//
// The kernel walks its whole table for each question, which all namespaces share: some
// 9 ms for the usual 262,144 buckets. What it sends costs 2.5 µs a flow.
//
// It needs CAP_NET_ADMIN in the user namespace that owns the network namespace, and
// Linux 6.1 or later with nf_conntrack_netlink (CONFIG_NF_CT_NETLINK). The messages
// are those of include/uapi/linux/netfilter/nfnetlink_conntrack.h.
package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Question says which flows are meant: those that fulfil all of its conditions.
type Question struct {
	// Family is unix.AF_INET or unix.AF_INET6.
	Family uint8
	// Proto is an IP protocol number (unix.IPPROTO_UDP); 0 is any.
	Proto uint8
	// Port is the one that the flow's first sender sends to, of TCP or UDP; 0 is any. It needs a Proto.
	Port uint16
	// Where is asked of flows that match otherwise.
	Where func(*Flow) bool
}

// Of asks for the flows that an address takes part in: those that it began, whatever
// they were masqueraded to, and those that lead to it. It is for an address whose pod
// is gone, before another pod gets it.
func Of(a netip.Addr) Question {
	return Question{Family: nl.FamilyOf(a), Where: func(f *Flow) bool { return f.Orig.Src.Addr() == a || f.Reply.Src.Addr() == a }}
}

// Conn lists and deletes the flows of one network namespace. Its methods may be
// called from several goroutines. Errors of the kernel are *tombolo.OpError, or wrap
// one.
type Conn struct{ nl *nl.Conn }

// Dial opens a connection to a namespace; nil is that of the calling thread.
func Dial(ns *netns.NS) (*Conn, error) {
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, ns)
	if err != nil {
		return nil, err
	}
	return &Conn{nl: conn}, nil
}

// Usable is nil if the connection is open; otherwise the error matches tombolo.ErrInvalid.
func (c *Conn) Usable() error { return c.nl.Usable() }

// Close closes the connection.
func (c *Conn) Close() error { return c.nl.Close() }

// List gives the flows that questions are about, in the kernel's order. A flow that begins or ends meanwhile may be
// in the list or not.
//
// The errors match errors.ErrUnsupported where the kernel has no ctnetlink,
// fs.ErrPermission without CAP_NET_ADMIN, and tombolo.ErrInterrupted where the kernel
// said so of each of many tries.
func (c *Conn) List(ctx context.Context, questions ...Question) ([]Flow, error) {
	if len(questions) == 0 {
		return nil, nil
	}
	if count, err := c.count(); err != nil || count == 0 {
		return nil, err
	}
	var list []Flow
	for _, q := range questions {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		m, err := q.message()
		err = c.nl.List("list flows", m, err, func(m netlink.Message) error {
			flow, err := decode(m.Data)
			if err == nil && q.Where(&flow) {
				list = append(list, flow)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return list, nil
}

// count gives the number of flows in the namespace, which the kernel keeps at hand.
func (c *Conn) count() (count uint32, _ error) {
	var b nl.Batch
	m, err := encode(messageStats, unix.AF_UNSPEC, nil)
	b.AddGet("count flows", nil, m, err, func(m netlink.Message) (err error) {
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

// Flush deletes the flows that questions are about, and says how many it deleted. Those that end by themselves
// meanwhile are not counted, and no error. A flow that began meanwhile with the same tuple stays.
//
// The next packet of such a client begins a flow anew, under the rules as they are
// then: so change the rules first.
func (c *Conn) Flush(ctx context.Context, questions ...Question) (deleted int, _ error) {
	list, err := c.List(ctx, questions...)
	if err != nil {
		return 0, err
	}
	// Acknowledgements must fit into the socket's buffer, which not everyone may enlarge.
	const atOnce = 128
	for len(list) > 0 {
		n := min(atOnce, len(list))
		if err := c.delete(list[:n], &deleted); err != nil {
			return deleted, err
		}
		list = list[n:]
	}
	return deleted, nil
}

func (c *Conn) delete(list []Flow, deleted *int) error {
	var b nl.Batch
	for i := range list {
		m, err := list[i].deleteMessage()
		b.Add("delete flow", &list[i], m, err)
	}
	err := c.nl.Execute(&b)
	for i := range list {
		switch of := b.Err(i); {
		case of == nil:
			*deleted++
		case !errors.Is(of, unix.ENOENT): // gone, or another with the same tuple
			return of
		default:
			err = nil
		}
	}
	return err
}
