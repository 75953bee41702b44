package addr

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sort"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
)

// protocolRA is the Protocol of an address that the kernel formed from a router advertisement (IFAPROT_KERNEL_RA,
// Linux 5.18).
const protocolRA = 2

// ErrNoRouter is the cause of an error if the link received no router advertisement.
var ErrNoRouter = errors.New("no router advertisement came")

// ErrNoPrefix is the cause of an error if the routers on a link advertised no prefix for addresses.
var ErrNoPrefix = errors.New("routers advertised no prefix to form an address from")

// Advertised holds the settings that a link received in router advertisements.
type Advertised struct {
	// Addresses are the usable addresses, at least one (RFC 4862, section 5.5), with their remaining lifetimes.
	// Deprecated ones come last. Addresses of the same kind are in the order of their creation.
	Addresses []Address
	// Servers are the name servers (RFC 8106, section 5.1), and Search the domains for short names (section 5.2), in
	// the order of the advertisement. Settings that the link received before Listen are missing.
	Servers []netip.Addr
	Search  []string
	// OtherConfig is set if the routers refer to a DHCPv6 server for further settings, such as name servers. These
	// are the flags O and M of RFC 4861, section 4.2.
	OtherConfig bool
}

// Advertised waits until a link has a usable address from a router advertisement (RFC 4861), and no such address is
// still in duplicate address detection. The kernel's settings, such as accept_ra, determine which advertisements
// count. Advertised lists the addresses over conn. Call Listen before the link accepts advertisements, or the Watch
// misses the name servers in the first advertisement.
//
// If ctx is done first, the error matches ctx's error and also ErrNoRouter or ErrNoPrefix. If another node has the
// only address, Advertised returns an error at once that matches ErrDuplicate.
func (w *Watch) Advertised(ctx context.Context, conn *Conn, link int) (*Advertised, error) {
	for {
		usable, pending, err := conn.slaacAddresses(context.WithoutCancel(ctx), link)
		if err != nil {
			return nil, err
		}

		isChanged, err := w.readAll(link, w.nl.Queued)
		switch {
		case err != nil:
			return nil, err
		case isChanged:
			continue
		case len(pending) > 0:
		case len(usable) > 0:
			flags, err := conn.routerFlags(link)
			return &Advertised{Addresses: usable, Servers: w.naming.servers, Search: w.naming.search,
				OtherConfig: flags&(linkRAManaged|linkRAOther) != 0}, err
		case w.duplicate != nil:
			return nil, &tombolo.OpError{Op: "form address", Object: w.duplicate.String(), Err: ErrDuplicate}
		}

		if _, err := w.readAll(link, func() ([]netlink.Message, error) { return w.nl.Next(ctx) }); err != nil {
			if ctx.Err() != nil {
				err = fmt.Errorf("%w: %w", w.explain(conn, link), err)
			}
			return nil, fmt.Errorf("wait for an address by router advertisement on link %d: %w", link, err)
		}
	}
}

// slaacAddresses returns the addresses of a link that the kernel formed from router advertisements. It returns the
// usable ones, deprecated ones last, and those that are still pending duplicate address detection.
func (c *Conn) slaacAddresses(ctx context.Context, link int) (usable, pending []Address, _ error) {
	list, err := c.List(ctx, Filter{Link: link, Family: unix.AF_INET6})
	if err != nil {
		return nil, nil, err
	}

	// The kernel lists the youngest address first, so reverse the list.
	for _, a := range slices.Backward(list) {
		switch {
		case a.Protocol != protocolRA || a.Flags&unix.IFA_F_DADFAILED != 0:
		case a.Flags&unix.IFA_F_TENTATIVE != 0:
			pending = append(pending, a)
		default:
			usable = append(usable, a)
		}
	}

	sort.SliceStable(usable, func(i, j int) bool {
		return usable[i].Flags&unix.IFA_F_DEPRECATED < usable[j].Flags&unix.IFA_F_DEPRECATED
	})
	return usable, pending, nil
}

// readAll calls next until it returns no announcement, and processes the announcements about a link. It returns true
// as soon as the link's addresses may have changed, or announcements were lost. The caller must then list the
// addresses.
func (w *Watch) readAll(link int, next func() ([]netlink.Message, error)) (bool, error) {
	for {
		messages, err := next()
		switch {
		case errors.Is(err, unix.ENOBUFS):
			return true, nil
		case err != nil || len(messages) == 0:
			return false, err
		}

		again := false
		for _, m := range messages {
			isAddress, err := w.handle(m, link)
			if err != nil {
				return false, err
			}
			again = again || isAddress
		}

		if again {
			return true, nil
		}
	}
}

// handle processes one announcement, and reports whether it is about an address of the link.
func (w *Watch) handle(m netlink.Message, link int) (bool, error) {
	switch m.Header.Type {
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		a, err := decode(m.Data)
		if err != nil || a.Link != link {
			return false, err
		}

		// The kernel deletes a duplicate address that it formed itself, so remember it for the error.
		if a.Protocol == protocolRA && a.Flags&unix.IFA_F_DADFAILED != 0 {
			w.duplicate = &a
		}
		return true, nil
	case unix.RTM_NEWNDUSEROPT:
		from, options, err := decodeUserOptions(m.Data)
		if err == nil && from == link {
			w.naming.update(options)
		}
		return false, err
	}

	return false, nil
}

// explain returns the reason why the link has no address from an advertisement.
func (w *Watch) explain(conn *Conn, link int) error {
	flags, err := conn.routerFlags(link)
	switch {
	case err != nil:
		return err
	case flags&linkRAReceived == 0:
		return ErrNoRouter
	case w.duplicate != nil:
		return &tombolo.OpError{Op: "form address", Object: w.duplicate.String(), Err: ErrDuplicate}
	}

	if flags&linkRAManaged != 0 {
		return fmt.Errorf("%w; they say that addresses are given by DHCPv6", ErrNoPrefix)
	}
	return ErrNoPrefix
}
