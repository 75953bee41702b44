package dhcplease

import (
	"context"
	"errors"
	"math"
	"net/netip"
	"time"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
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

// Dialer opens the sockets of a client: one that sends, in the pod, and one that hears, on
// the port, since what a DHCP server says of a pod's address goes into the host's firewall,
// and the pod's namespace may be prepared by a process that has all rights there.
func Dialer(sockets *transport.Config, att *bridge.Attachment) func(context.Context, netip.Addr) (dhcpc.Transport, error) {
	return func(ctx context.Context, local netip.Addr) (dhcpc.Transport, error) {
		witness, err := transport.DialWitness(&transport.Config{Link: att.Index, MAC: att.PeerMAC, ARP: sockets.ARP})
		if err != nil {
			return nil, err
		}
		send, err := transport.Dialer(sockets)(ctx, local)
		if err != nil {
			return nil, errors.Join(err, witness.Close())
		}
		return &heardOutside{witness.For(send), send, witness}, nil
	}
}

// heardOutside is a transport that hears by a socket of its own.
type heardOutside struct {
	dhcpc.Transport
	send    dhcpc.Transport
	witness *transport.Witness
}

// Close closes both sockets at once: the kernel takes 12 to 16 ms to close a packet socket.
func (h *heardOutside) Close() error {
	sent := make(chan error, 1)
	go func() { sent <- h.send.Close() }()
	return errors.Join(h.witness.Close(), <-sent)
}
