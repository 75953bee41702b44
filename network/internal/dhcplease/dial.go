package dhcplease

import (
	"context"
	"errors"
	"net/netip"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
)

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
