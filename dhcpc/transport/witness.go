package transport

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
)

// Witness hears, at the other end of a client's link, what leaves there towards the
// client: at the host's end of a veth pair, answers that came to a pod by the bridge, and
// nothing that the pod says. What is behind the client's own interface is the pod's to
// choose: it may rename it and put another in its place, redirect packets, and answer
// itself. By a Witness none of that is heard. Use it from one goroutine.
//
// It hears DHCP answers, and with Config.ARP what Ethernet's ARP says, that are sent to
// the client's MAC address or to all, without a VLAN tag. What others on the same bridge
// may say is not its business.
type Witness struct{ raw *Raw }

// DialWitness opens a packet socket in Config.NetNS, on the other end of the client's
// link. Config.MAC is needed, and is the client's own. Open it before the first packet is
// sent. Its errors are those of DialRaw.
func DialWitness(cfg *Config) (*Witness, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	raw, err := dialRaw(cfg, leaving(cfg.MAC), true)
	if err != nil {
		return nil, err
	}
	return &Witness{raw}, nil
}

// Receive is that of a dhcpc.Transport.
func (w *Witness) Receive(ctx context.Context, until time.Time) (*dhcpc.Packet, error) {
	if err := dialed(w != nil); err != nil {
		return nil, err
	}
	return w.raw.Receive(ctx, until)
}

// Close closes the socket, which takes the kernel as long as that of a Raw.
func (w *Witness) Close() error {
	if err := dialed(w != nil); err != nil {
		return err
	}
	return w.raw.Close()
}

// For gives a transport that sends by another one and hears by the witness. Its Close
// closes both.
func (w *Witness) For(send dhcpc.Transport) dhcpc.Transport {
	if send == nil {
		send = unopened{}
	}
	return &witnessed{send, w}
}

// DialHeard opens what Dialer does for a client, and hears by a Witness at the other end of its link, outside.
func DialHeard(ctx context.Context, client, outside *Config, local netip.Addr) (dhcpc.Transport, error) {
	w, err := DialWitness(outside)
	if err != nil {
		return nil, err
	}
	send, err := Dialer(client)(ctx, local)
	if err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w.For(send), nil
}

type witnessed struct {
	dhcpc.Transport
	witness *Witness
}

// Receive hears by the witness.
func (t *witnessed) Receive(ctx context.Context, until time.Time) (*dhcpc.Packet, error) {
	return t.witness.Receive(ctx, until)
}

// Close closes both.
func (t *witnessed) Close() error { return closeBoth(t.witness, t.Transport) }

// closeBoth closes two sockets at once: the kernel takes 12 to 16 ms to close a packet socket.
func closeBoth(a, b io.Closer) error {
	closed := make(chan error, 1)
	go func() { closed <- b.Close() }()
	return errors.Join(a.Close(), <-closed)
}
