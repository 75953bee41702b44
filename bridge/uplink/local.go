package uplink

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/route"
)

// waitUntilLocal waits until a link receives what is sent to the IPv6 addresses that
// it has just got. The kernel's worker that joins the groups of their neighbour
// discovery and adds their local routes runs after the request was answered; without
// them, what comes in once the other link has the addresses no longer is lost.
func (r *run) waitUntilLocal(ctx context.Context, link int, m *move) error {
	list := m.addresses6()
	if len(list) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, r.rec.timeout())
	defer cancel()
	watch, err := nl.Subscribe(unix.NETLINK_ROUTE, &nl.Config{NetNS: r.ns}, unix.RTNLGRP_IPV6_ROUTE)
	if err != nil {
		return err
	}
	defer watch.Close()
	for {
		have, err := r.routes.List(route.Filter{Family: unix.AF_INET6, Table: route.TableLocal, Link: link, Type: route.Local})
		if err != nil {
			return err
		}
		list = slices.DeleteFunc(list, func(a netip.Addr) bool {
			return slices.ContainsFunc(have, func(local route.Route) bool { return local.Dst.Addr() == a })
		})
		if len(list) == 0 {
			return nil
		}
		if _, err := watch.Next(ctx); err != nil && !errors.Is(err, unix.ENOBUFS) {
			return fmt.Errorf("wait until the kernel receives what is sent to %s: %w", list[0], err)
		}
	}
}

// addresses6 are the IPv6 addresses that go.
func (m *move) addresses6() []netip.Addr {
	var list []netip.Addr
	for _, a := range m.addresses() {
		if a.Prefix.Addr().Is6() {
			list = append(list, a.Prefix.Addr())
		}
	}
	return list
}
