// Package giveback releases what pods leased: from a pod's interface as long as that is there, else from the host.
package giveback

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
)

// All gives back what an attachment leased, and removes the lease's record; where there is none, it does nothing. If a
// message does not reach the server, the address is free when the lease ends: it must not keep a pod from going. The
// error matches file.ErrLocked where another has the record for as long as ctx lasts. The state's lock must not be held.
func All(ctx context.Context, path, hash string, links *bridge.Conn, warn func(string)) error {
	dir, err := lease.Open(path)
	if err != nil {
		return err
	}
	if _, err := dir.Load(hash); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	held, err := dir.Lock(ctx, hash)
	if err != nil {
		return err
	}
	defer held.Close()
	rec, err := held.Load()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.As(err, new(*state.RecordError)):
		warn(err.Error())
		return held.Remove()
	case err != nil:
		return err
	}
	if err := errors.Join(all4(ctx, dir, rec, links), all6(ctx, rec, links)); err != nil {
		warn(err.Error())
	}
	if rec.Client.Sticky && rec.Lease != nil && rec.State != lease.Expired { // a server may have refused it
		if err = held.Remember(ctx, rec); err == nil {
			return nil
		}
		warn(err.Error()) // the disk is full, say
	}
	return held.Remove()
}

// all4 sends the RELEASE. A lease that is to stay the pod's own is not given back: the server keeps the address for it as
// long as the lease runs. Nor is that of a pod that is gone and whose identity another has by now: to the server both
// are the same client.
func all4(ctx context.Context, dir *lease.Dir, r *lease.Record, links *bridge.Conn) error {
	if r.Client.Sticky || r.Lease == nil || r.State != lease.Bound || r.Lease.Left(time.Now()) == 0 {
		return nil
	}
	sent, err := fromPod(ctx, r, links, func(cfg *transport.Config) error { return transport.Release(ctx, cfg, r.Lease) })
	if sent {
		return err
	}
	if others, err := dir.Same(r); err != nil || len(others) > 0 {
		return err
	}
	return Release(ctx, r, links, nil, r.Lease)
}

// all6 sends the RELEASE of DHCPv6, which the keeper has made. From the host it does as well: servers go by its content,
// and not by its sender. Its destination is a multicast group, so no neighbour has to be found.
func all6(ctx context.Context, r *lease.Record, links *bridge.Conn) error {
	if !r.Releases6(time.Now()) {
		return nil
	}
	sent, err := fromPod(ctx, r, links, func(cfg *transport.Config) error { return transport.Send6(cfg, r.Six.Release) })
	if sent {
		return err
	}
	return Release6(ctx, r, links, nil)
}

// fromPod sends from the pod's interface, if that is there.
func fromPod(ctx context.Context, r *lease.Record, links *bridge.Conn, send func(*transport.Config) error) (bool, error) {
	pod, err := netns.OpenSame(r.NetNS, r.NetNSCookie)
	if err != nil {
		return false, nil
	}
	defer pod.Close()
	conn, err := nl.Dial(unix.NETLINK_ROUTE, pod)
	if err != nil {
		return false, nil
	}
	defer conn.Close()
	port, err := links.Link(ctx, r.HostIf)
	if err != nil {
		return false, nil
	}
	l, err := link.Peer(conn, port.Peer, port.Index) // its owner may have renamed it
	if err != nil {
		return false, nil
	}
	return true, send(&transport.Config{NetNS: pod, Link: l.Index})
}

// Release sends the RELEASE of a pod that is gone, from the host, with links and the namespace host: through the
// host's link in the pod's network. A VLAN of a LAN has none: there it goes out by all ports in the VLAN, as a
// bridge sends a frame to a MAC that it has not learnt.
func Release(ctx context.Context, r *lease.Record, links *bridge.Conn, host *netns.NS, l *dhcpc.Lease) error {
	return send(ctx, r, links, host, l.Address.Addr(), func(cfg *transport.Config, _ bool) error { return transport.Release(ctx, cfg, l) })
}

// Release6 sends the RELEASE of the pod's lease by DHCPv6, in the way of Release.
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
