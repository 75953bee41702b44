// Package giveback has the host release what pods leased that are gone.
package giveback

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/netns"
)

// Release sends the RELEASE of a pod that is gone, from the host, whose links those are, in a namespace:
// by the link by which it is where the pod was. In a VLAN of a LAN there is none, so that it goes out by
// the ports that are in the VLAN, as the bridge would send it that does not know where the server is.
func Release(ctx context.Context, r *lease.Record, links *bridge.Conn, host *netns.NS, l *dhcpc.Lease) error {
	return send(ctx, r, links, host, l.Address.Addr(), func(cfg *transport.Config, _ bool) error { return transport.Release(ctx, cfg, l) })
}

// Release6 sends the RELEASE of what the pod had by DHCPv6, in the way of Release.
func Release6(ctx context.Context, r *lease.Record, links *bridge.Conn, host *netns.NS) error {
	return send(ctx, r, links, host, r.Six.Lease.Address, func(cfg *transport.Config, port bool) error {
		if port {
			cfg.MAC = net.HardwareAddr(r.Client.MAC)
		}
		return transport.Send6(cfg, r.Six.Release)
	})
}

// send has by send a message from the host's link in the pod's network. Where a VLAN has no such link, by sends it
// from each port of the bridge that is in the VLAN, and port is true.
func send(ctx context.Context, r *lease.Record, links *bridge.Conn, host *netns.NS, own netip.Addr, by func(cfg *transport.Config, port bool) error) error {
	fails := func(err error) error { return fmt.Errorf("release lease of %s: %w", own, err) }
	at, err := links.Link(ctx, r.At())
	if err == nil {
		return by(&transport.Config{NetNS: host, Link: at.Index}, false)
	}
	if r.VLAN() == 0 || !errors.Is(err, fs.ErrNotExist) {
		return fails(err)
	}
	if at, err = links.Link(ctx, r.Bridge); err != nil {
		return fails(err)
	}
	ports, err := links.Ports(ctx, at.Index)
	if err != nil {
		return fails(err)
	}
	// The NICs first; pods are seldom servers, and some go meanwhile.
	var errs []error
	for _, pods := range []bool{false, true} {
		for i := range ports {
			if (ports[i].Kind == "veth") == pods {
				errs = append(errs, sendBy(ctx, r.VLAN(), links, host, &ports[i], by))
			}
		}
	}
	return errors.Join(errs...)
}

// sendBy has by send a message from a port that is up and in the VLAN, and passes over any other.
func sendBy(ctx context.Context, id uint16, links *bridge.Conn, host *netns.NS, port *bridge.Link, by func(cfg *transport.Config, port bool) error) error {
	outside, err := links.VLANs().Outside(ctx, port.Index, vlan.Range{First: id, Last: id})
	if err != nil || len(outside) > 0 || !port.Up {
		return ignoreGone(err)
	}
	cfg := &transport.Config{NetNS: host, Link: port.Index}
	differs, err := links.VLANs().Check(ctx, port.Index, port.Name, vlan.Membership{ID: id, KeepDefault: true})
	if len(differs) > 0 {
		cfg.VLAN = id // its frames have their tags there
	}
	if err == nil {
		err = by(cfg, true)
	}
	return ignoreGone(err)
}

func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
