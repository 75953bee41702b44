package addr

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"sort"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// ErrDuplicate is the cause of the error when duplicate address detection (RFC 4862, section 5.4) finds an IPv6 address
// at another node of the network.
var ErrDuplicate = errors.New("another node of the network has the address")

// Watch receives the kernel's announcements that IPv6 addresses become usable. The kernel adds an address at once,
// but a worker later joins the address's solicited-node group and adds its local route. For these few milliseconds no
// other host can reach the address. Duplicate address detection takes a second or two longer. A Watch also receives
// settings from router advertisements.
type Watch struct {
	nl *nl.Watch

	naming    nameService
	duplicate *Address // the last address from an advertisement for which detection found another owner; nil if none
}

// Listen opens a Watch in the network namespace ns; nil means the calling thread's namespace. Call Listen before
// adding the addresses.
func Listen(ns *netns.NS) (*Watch, error) {
	// Subscribe to both groups with one socket. The kernel announces name servers while it processes an advertisement,
	// and an address only when the address becomes usable.
	w, err := nl.Subscribe(unix.NETLINK_ROUTE, ns, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_ND_USEROPT)
	if err != nil {
		return nil, err
	}
	return &Watch{nl: w}, nil
}

// Close closes the Watch. Calls in progress and all later calls, including another Close, return an error that matches
// tombolo.ErrInvalid.
func (w *Watch) Close() error {
	return w.nl.Close()
}

// Wait waits until all the given addresses of a link are usable. It does not wait for IPv4 addresses. If no
// announcement comes within 250 ms, Wait reads the addresses over conn.
//
// If another node has one of the addresses, the error matches ErrDuplicate. If an address disappears before it is
// usable, the error matches fs.ErrNotExist: another program deleted the address or its link, or set the link down. If
// ctx is done first, the error matches ctx's error.
func (w *Watch) Wait(ctx context.Context, conn *Conn, link int, addrs ...netip.Addr) error {
	pending := slices.DeleteFunc(slices.Clone(addrs), netip.Addr.Is4)
	for len(pending) > 0 {
		addresses, err := w.awaitAnnounced(ctx, conn, link, pending)
		if err != nil {
			return fmt.Errorf("wait until %s is usable: %w", pending[0], err)
		}

		for _, a := range addresses {
			i := slices.Index(pending, a.Prefix.Addr())
			switch {
			case a.Link != link || i < 0:
				continue
			case a.Flags&unix.IFA_F_DADFAILED != 0:
				return &tombolo.OpError{Op: "add address", Object: a.String(), Err: ErrDuplicate}
			case a.Flags&unix.IFA_F_TENTATIVE == 0:
				pending = slices.Delete(pending, i, i+1)
			}
		}
	}

	return nil
}

// askAfter is how long Wait waits for an announcement before it reads the addresses. The kernel's worker takes less
// time, even on a busy machine. Wait cannot read them earlier: an address without duplicate address detection looks
// usable before the worker has added its route.
const askAfter = 250 * time.Millisecond

// awaitAnnounced returns the addresses in the next announcements. If announcements were lost, or none came within
// askAfter, it reads the pending addresses from the kernel. If a pending address does not exist after an announced
// deletion, or after lost announcements, it returns the error of lookUp.
func (w *Watch) awaitAnnounced(ctx context.Context, conn *Conn, link int, pending []netip.Addr) ([]Address, error) {
	var list []Address
	look := func(last Address) error {
		a, err := conn.lookUp(ctx, last)
		if err == nil {
			list = append(list, a)
		}
		return err
	}
	quiet, cancel := context.WithTimeout(ctx, askAfter)
	defer cancel()
	messages, err := w.nl.Next(quiet)
	isLost, isQuiet := errors.Is(err, unix.ENOBUFS), err != nil && quiet.Err() != nil && ctx.Err() == nil
	if isLost || isQuiet {
		for _, a := range pending {
			err := look(Address{Prefix: netip.PrefixFrom(a, a.BitLen()), Link: link})
			if err != nil && (isLost || !errors.Is(err, fs.ErrNotExist)) {
				return nil, err
			}
		}
		return list, nil
	}

	if err != nil {
		return nil, err
	}

	for _, m := range messages {
		if m.Header.Type == unix.RTM_NEWNDUSEROPT {
			continue
		}

		a, err := decode(m.Data)
		switch {
		case err != nil:
			return nil, err
		case m.Header.Type == unix.RTM_NEWADDR:
			list = append(list, a)
		case m.Header.Type == unix.RTM_DELADDR && a.Link == link && slices.Contains(pending, a.Prefix.Addr()):
			// The deletion may not be final, since Conn.Ensure deletes some addresses to add them again. So look
			// whether the address exists.
			if err := look(a); err != nil {
				return nil, err
			}
		}
	}

	return list, nil
}

// lookUp returns the current state of an IPv6 address of a link. last is the state in the last announcement or, without
// one, has only the address and the link. If the address is gone, the error matches ErrDuplicate if last has
// IFA_F_DADFAILED, and fs.ErrNotExist if not.
func (c *Conn) lookUp(ctx context.Context, last Address) (Address, error) {
	now, err := c.get(ctx, &last)
	switch {
	case err == nil && now.Link == last.Link:
		return now, nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return Address{}, err
	case last.Flags&unix.IFA_F_DADFAILED != 0:
		// The address is gone because it was a duplicate: the kernel deletes such an address if it is not permanent.
		return Address{}, &tombolo.OpError{Op: "add address", Object: last.String(), Err: ErrDuplicate}
	}

	return Address{}, &tombolo.OpError{Op: "add address", Object: last.String(),
		Err: fmt.Errorf("another program deleted it: %w", fs.ErrNotExist)}
}

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
	// Deprecated ones come last. Each of the two groups is in order of creation.
	Addresses []Address
	// Servers are the name servers (RFC 8106, section 5.1), and Search the search domains (section 5.2), in the order
	// of the advertisement. Settings that the link received before Listen are missing.
	Servers []netip.Addr
	Search  []string
	// OtherConfig is set if the last advertisement had the flag O or M (RFC 4861, section 4.2). Then a DHCPv6 server
	// has further settings, such as name servers.
	OtherConfig bool
}

// Advertised waits until a link has a usable address from a router advertisement (RFC 4861), and no such address is
// still in duplicate address detection. The kernel's settings, such as accept_ra, determine which advertisements
// count. Advertised lists the addresses over conn. Call Listen before the link accepts advertisements, or the Watch
// misses the name servers in the first advertisement.
//
// If ctx is done first, the error matches ctx's error and the reason, such as ErrNoRouter or ErrNoPrefix. If another
// node has the only address, Advertised returns an error at once that matches ErrDuplicate.
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
// usable ones, deprecated ones last, and those still in duplicate address detection. It omits addresses that failed
// this detection.
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

// readAll calls next until next returns no announcement, and processes the announcements about a link. It returns true
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

// handle stores the name servers, search domains or duplicate address of one announcement. It reports whether the
// announcement is about an address of the link.
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

// explain returns the reason why the link has no address from an advertisement: ErrNoRouter, ErrNoPrefix, or an error
// that matches ErrDuplicate. It also returns its own error if it cannot read the link.
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
