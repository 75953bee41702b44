// Package giveback has the host release what pods leased that are gone.
package giveback

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

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
	if r.Apart && r.Bridge == "" {
		return nil // the host has no link by which the server is reached: there the lease runs out
	}
	fails := func(err error) error { return fmt.Errorf("release lease of %s: %w", l.Address.Addr(), err) }
	at, err := links.Link(ctx, r.At())
	if err == nil {
		return transport.Release(ctx, &transport.Config{NetNS: host, Link: at.Index}, l)
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
				errs = append(errs, releaseBy(ctx, r.VLAN(), links, host, &ports[i], l))
			}
		}
	}
	return errors.Join(errs...)
}

// releaseBy sends it out by a port that is in the VLAN.
func releaseBy(ctx context.Context, id uint16, links *bridge.Conn, host *netns.NS, port *bridge.Link, l *dhcpc.Lease) error {
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
		err = transport.Release(ctx, cfg, l)
	}
	return ignoreGone(err)
}

func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
