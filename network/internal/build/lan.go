package build

import (
	"context"
	"net/netip"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/reroute"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// hostAddress finds the host's own address in the subnet of a pod's; it is invalid where
// there is none.
func hostAddress(links *bridge.Conn, l *bridge.Link, pod netip.Prefix) (netip.Addr, error) {
	list, err := reroute.HostAddresses(links, l, pod)
	if err != nil || len(list) == 0 {
		return netip.Addr{}, err
	}
	return list[0], nil
}

// HostAddress is hostAddress for a pod that is to have its default route by it; nic is the
// uplink of the bridge, if any.
func HostAddress(ctx context.Context, s *session.Session, nic string, l *bridge.Link, pod netip.Prefix) (netip.Addr, error) {
	own, err := hostAddress(s.Links, l, pod)
	if err == nil && !own.IsValid() {
		// A network manager may have put it back on the NIC.
		if err := mendUplink(ctx, s, nic); err != nil {
			return own, err
		}
		own, err = hostAddress(s.Links, l, pod)
	}
	if err == nil && !own.IsValid() {
		err = fail.Errorf(fail.ErrNoGateway, `defaultRoute "host": the host has no address on bridge %s in %s, the subnet of the pod's address: give it one, or set defaultRoute to "router"`, l.Name, pod.Masked())
	}
	return own, err
}

// takeUplink sees to it that the network's uplink is a port of its bridge, and that the
// host has on the bridge what it had on the NIC.
func takeUplink(ctx context.Context, s *session.Session, w *Want) error {
	if w.Uplink.NIC == "" {
		return nil
	}
	return s.Uplinks().Ensure(ctx, w.Record.Name, w.Uplink)
}

// mendUplink puts right what somebody undid of a takeover that is on record.
func mendUplink(ctx context.Context, s *session.Session, nic string) error {
	if nic == "" {
		return nil
	}
	return s.Uplinks().Mend(ctx, nic)
}
