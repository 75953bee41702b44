package dhcplease

import (
	"context"
	"math"
	"time"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// Apply gives the pod what it has leased. The address has the lease's lifetime,
// so that the kernel itself ends it if everything of ours dies.
func Apply(ctx context.Context, links *bridge.Conn, pod *netns.NS, rec *lease.Record, link *bridge.Attachment) error {
	if mtu := rec.Applied.MTU; mtu > 0 && mtu < link.MTU {
		// The pod's alone: the host's bridge, and with it the host, is not the server's.
		if err := links.SetMTU(ctx, pod, "", link.Peer, mtu); err != nil {
			return err
		}
	}
	addresses, err := addr.Dial(&addr.Config{NetNS: pod})
	if err != nil {
		return err
	}
	defer addresses.Close()
	valid := validFor(rec.Lease)
	for _, p := range rec.Applied.Addresses {
		if _, err := addresses.Ensure(addr.Address{Prefix: p, Link: link.PeerIndex, Broadcast: addr.Broadcast(p), Valid: valid, Preferred: valid}); err != nil {
			return err
		}
	}
	routes, err := route.Dial(&route.Config{NetNS: pod})
	if err != nil {
		return err
	}
	defer routes.Close()
	for _, rt := range rec.Applied.Routes {
		if err := routes.Add(lease.RouteOf(rt, link.PeerIndex, rec.Policy.Priority)); err != nil {
			return err
		}
	}
	return nil
}

// validFor is how long the kernel is to keep a lease's address; nil is for ever.
func validFor(l *dhcpc.Lease) *time.Duration {
	left := l.Left(time.Now())
	if left < 0 {
		return nil
	}
	left = min(max(left, time.Second), (math.MaxUint32-1)*time.Second)
	return &left
}
