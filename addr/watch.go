package addr

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// ErrDuplicate is the cause of an error about an IPv6 address that another node of
// the network answered for (RFC 4862, section 5.4).
var ErrDuplicate = errors.New("another node of the network has the address")

// Watch hears when IPv6 addresses become usable. The kernel adds one at once, but
// leaves it to a worker to join its solicited-node group and to make its local
// route: until that is done, milliseconds later on a busy machine even with NoDAD,
// nobody can reach the address, and who asks for it tries again a second later.
// With duplicate address detection it takes a second or two.
type Watch struct{ nl *nl.Watch }

// Listen starts to hear, in the namespace of cfg. Start before the addresses are
// added.
func Listen(cfg *Config) (*Watch, error) {
	if cfg == nil {
		cfg = &Config{}
	}
	w, err := nl.Subscribe(unix.NETLINK_ROUTE, &nl.Config{NetNS: cfg.NetNS}, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return nil, err
	}
	return &Watch{nl: w}, nil
}

// Close stops to hear.
func (w *Watch) Close() error { return w.nl.Close() }

// Settled waits until all the addresses of a link are usable, and does not heed
// IPv4 ones, which always are. conn is asked where announcements were lost. The
// error matches ErrDuplicate where duplicate address detection found another node,
// and is that of ctx when it is done.
func (w *Watch) Settled(ctx context.Context, conn *Conn, link int, addrs ...netip.Addr) error {
	pending := slices.DeleteFunc(slices.Clone(addrs), netip.Addr.Is4)
	for len(pending) > 0 {
		heard, err := w.heard(ctx, conn, link)
		if err != nil {
			return fmt.Errorf("wait until %s is usable: %w", pending[0], err)
		}
		for _, a := range heard {
			if a.Link != link || a.Flags&Tentative != 0 && a.Flags&DADFailed == 0 {
				continue
			}
			i := slices.Index(pending, a.Prefix.Addr())
			if i < 0 {
				continue
			}
			if a.Flags&DADFailed != 0 {
				return &tombolo.OpError{Op: "add address", Object: a.String(), Err: ErrDuplicate}
			}
			pending = slices.Delete(pending, i, i+1)
		}
	}
	return nil
}

// heard gives the addresses that were announced next, or, where announcements
// were lost, all there are.
func (w *Watch) heard(ctx context.Context, conn *Conn, link int) ([]Address, error) {
	messages, err := w.nl.Next(ctx)
	if errors.Is(err, unix.ENOBUFS) {
		return conn.List(Filter{Link: link, Family: unix.AF_INET6})
	}
	if err != nil {
		return nil, err
	}
	var list []Address
	for _, m := range messages {
		if m.Type != unix.RTM_NEWADDR {
			continue
		}
		a, err := decode(m.Data)
		if err != nil {
			return nil, err
		}
		list = append(list, a)
	}
	return list, nil
}
