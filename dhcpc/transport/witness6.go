package transport

import (
	"context"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc/dhcp6"
)

// Witness6 is a Witness for DHCPv6: it hears, at the host's end of a veth pair, messages to
// dhcp6.ClientPort that leave there for the client's MAC address, and nothing that the client's namespace
// says. Use it from one goroutine.
type Witness6 struct{ raw *Raw }

// DialWitness6 opens a packet socket in Config.NetNS, on the other end of the client's link.
// Config.MAC is needed, and is the client's own. Open it before the first message is sent. Its errors
// are those of DialRaw.
func DialWitness6(cfg *Config) (*Witness6, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	raw, err := listenRaw(cfg, append(leaving(cfg.MAC), frames6()...), unix.ETH_P_ALL)
	if err != nil {
		return nil, err
	}
	return &Witness6{raw}, nil
}

// Receive is that of a dhcp6.Transport. What is damaged is passed over.
func (w *Witness6) Receive(ctx context.Context, until time.Time) ([]byte, error) {
	if err := dialedFor(ctx, w != nil && w.raw.isOpen()); err != nil {
		return nil, err
	}
	done, err := deadline(ctx, w.raw.conn, until)
	if err != nil {
		return nil, err
	}
	defer done()
	for {
		n, _, err := w.raw.conn.ReadFrom(w.raw.buf)
		if err != nil {
			return nil, orDone(ctx, err)
		}
		if message, err := decode6(w.raw.buf[:n]); err == nil {
			return message, nil
		}
	}
}

// Close closes the socket, which takes the kernel as long as that of a Raw.
func (w *Witness6) Close() error {
	if err := dialed(w != nil); err != nil {
		return err
	}
	return w.raw.Close()
}

// For gives a transport that sends by another one and hears by the witness. Its Close closes
// both.
func (w *Witness6) For(send dhcp6.Transport) dhcp6.Transport {
	if send == nil {
		send = (*UDP6)(nil)
	}
	return &witnessed6{send, w}
}

type witnessed6 struct {
	dhcp6.Transport
	witness *Witness6
}

// Receive hears by the witness.
func (t *witnessed6) Receive(ctx context.Context, until time.Time) ([]byte, error) {
	return t.witness.Receive(ctx, until)
}

// Close closes both.
func (t *witnessed6) Close() error { return closeBoth(t.witness, t.Transport) }

// frames6 takes Ethernet frames with UDP to a DHCPv6 client's port. It takes none with extension headers,
// fragments among them: servers send none, but in messages that are longer than the link's MTU.
func frames6() program {
	const etherTypeAt, nextAt, portAt = 12, etherLen + 6, etherLen + ip6Len + 2
	p := program{bpf.LoadAbsolute{Off: etherTypeAt, Size: 2}}
	p.need(unix.ETH_P_IPV6)
	p.add(bpf.LoadAbsolute{Off: nextAt, Size: 1})
	p.need(unix.IPPROTO_UDP)
	p.add(bpf.LoadAbsolute{Off: portAt, Size: 2})
	p.need(dhcp6.ClientPort)
	p.add(bpf.RetConstant{Val: accept})
	return p
}
