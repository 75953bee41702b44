// Package giveback releases the leases of pods. It sends the RELEASE from the pod's interface if that exists, and
// otherwise from the host.
package giveback

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
)

// All releases an attachment's leases, and removes their record. If the client is sticky, it releases nothing and
// keeps the IPv4 lease in a sticky record. It does nothing if there is no record. links works in the host's
// namespace.
//
// If the record is damaged or a RELEASE cannot be sent, All passes the error to warn and goes on, since the pod must
// be able to end. The server then frees the address when the lease expires. If another process holds the record's
// lock until ctx ends, the error matches file.ErrLocked. The caller must not hold the state's lock.
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

	if rec.Client.Sticky && rec.Lease != nil && rec.State != lease.Expired { // a server may have refused an expired lease
		if err = held.Remember(ctx, rec); err == nil {
			return nil
		}
		warn(err.Error()) // for example, because the disk is full
	}

	return held.Remove()
}

// all4 sends the DHCPv4 RELEASE. It does not release a sticky lease, so that the server reserves the address for the
// pod until the lease expires. If the pod is gone, another record may have the same client identity. Then all4 does
// not release the lease either, since the server cannot tell the two clients apart.
func all4(ctx context.Context, dir *lease.Store, r *lease.Record, links *bridge.Conn) error {
	if r.Client.Sticky || r.Lease == nil || r.State != lease.Bound || r.Lease.Left(time.Now()) == 0 {
		return nil
	}

	sent, err := fromPod(ctx, r, links, func(cfg *transport.Config) error {
		return transport.Release(ctx, cfg, r.Lease)
	})
	if sent {
		return err
	}

	if others, err := dir.Same(r); err != nil || len(others) > 0 {
		return err
	}
	return Release(ctx, r, links, nil, r.Lease)
}

// all6 sends the DHCPv6 RELEASE, which the keeper has encoded. The host may send it if the pod is gone, since servers
// check its content and not its sender. Its destination is a multicast group, so no neighbour entry is needed.
func all6(ctx context.Context, r *lease.Record, links *bridge.Conn) error {
	if !r.Releases6(time.Now()) {
		return nil
	}

	sent, err := fromPod(ctx, r, links, func(cfg *transport.Config) error {
		return transport.Send6(cfg, r.Six.Release)
	})
	if sent {
		return err
	}
	return Release6(ctx, r, links, nil)
}

// fromPod sends a message from the pod's interface. It reports whether the interface exists.
func fromPod(ctx context.Context, r *lease.Record, links *bridge.Conn, send func(*transport.Config) error) (bool,
	error) {
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

	l, err := link.Peer(conn, port.Peer, port.Index) // the pod's owner may have renamed it
	if err != nil {
		return false, nil
	}

	return true, send(&transport.Config{NetNS: pod, Link: l.Index})
}

// Release sends the RELEASE for a pod that is gone, from the host's link in the pod's network. links is a connection
// to the host's namespace, and host a handle to that namespace. In a VLAN of a LAN the host has no such link.
// There Release does nothing, and the server frees the address when the lease expires.
func Release(ctx context.Context, r *lease.Record, links *bridge.Conn, host *netns.NS, l *dhcpc.Lease) error {
	return send(ctx, r, links, host, l.Address.Addr(),
		func(cfg *transport.Config) error { return transport.Release(ctx, cfg, l) })
}

// Release6 sends the DHCPv6 RELEASE for a pod that is gone, in the same way as Release.
func Release6(ctx context.Context, r *lease.Record, links *bridge.Conn, host *netns.NS) error {
	return send(ctx, r, links, host, r.Six.Lease.Address,
		func(cfg *transport.Config) error { return transport.Send6(cfg, r.Six.Release) })
}

// send calls its last argument, a function that sends a message from the host's link in the pod's network.
func send(ctx context.Context, r *lease.Record, links *bridge.Conn, host *netns.NS, own netip.Addr,
	transmit func(*transport.Config) error) error {
	at, err := links.Link(ctx, r.At())
	if errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(r.At(), r.Bridge+".") {
		return nil // the host is not in the pod's VLAN
	}
	if err != nil {
		return fmt.Errorf("release lease of %s: %w", own, err)
	}
	return transmit(&transport.Config{NetNS: host, Link: at.Index})
}
