package dhcplease

import (
	"context"
	"errors"
	"net/netip"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/lease"
)

// Dialer opens the sockets of a client: one that sends, in the pod, and one that hears, on
// the port, since what a DHCP server says of a pod's address goes into the host's firewall,
// and the pod's namespace may be prepared by a process that has all rights there.
// Packet sockets take the kernel longer to close than all the rest takes, and are left to
// the keeper: an ADD takes 20 ms so, and 50 without.
func Dialer(dir *lease.Dir, sockets *transport.Config, att *bridge.Attachment) func(context.Context, netip.Addr) (dhcpc.Transport, error) {
	return func(ctx context.Context, local netip.Addr) (dhcpc.Transport, error) {
		witness, err := transport.DialWitness(&transport.Config{Link: att.Index, MAC: att.PeerMAC, ARP: sockets.ARP})
		if err != nil {
			return nil, err
		}
		send, err := transport.Dialer(sockets)(ctx, local)
		if err != nil {
			return nil, errors.Join(err, witness.Close())
		}
		return &heardOutside{witness.For(send), send, witness, dir}, nil
	}
}

// inPod opens a client's sockets in the pod, to send and to hear.
func inPod(dir *lease.Dir, sockets *transport.Config) func(context.Context, netip.Addr) (dhcpc.Transport, error) {
	return func(context.Context, netip.Addr) (dhcpc.Transport, error) {
		raw, err := transport.DialRaw(sockets)
		if err != nil {
			return nil, err
		}
		return &heardInside{raw, dir}, nil
	}
}

// heardInside is a packet socket that the keeper closes.
type heardInside struct {
	*transport.Raw
	dir *lease.Dir
}

// Close hands the socket over.
func (h *heardInside) Close() error { return handOver(h.dir, h.Raw) }

// heardOutside is a transport whose packet sockets are closed by the keeper.
type heardOutside struct {
	dhcpc.Transport
	send    dhcpc.Transport
	witness *transport.Witness
	dir     *lease.Dir
}

// Close closes what is quickly closed, and hands over the rest.
func (h *heardOutside) Close() error {
	if raw, ok := h.send.(*transport.Raw); ok {
		return handOver(h.dir, h.witness, raw)
	}
	return errors.Join(h.send.Close(), handOver(h.dir, h.witness))
}

// packetSocket is one that is slow to close.
type packetSocket interface {
	Detach() (int, error)
	Close() error
}

// handOver has the keeper close packet sockets.
func handOver(dir *lease.Dir, sockets ...packetSocket) error {
	var fds []int
	var errs []error
	for _, s := range sockets {
		fd, err := s.Detach()
		if err != nil {
			errs = append(errs, s.Close())
			continue
		}
		fds = append(fds, fd)
	}
	return errors.Join(append(errs, dir.HandOver(fds...))...)
}
