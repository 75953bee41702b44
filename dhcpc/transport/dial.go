package transport

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
)

// Dialer gives the Dial of a dhcpc.Config: DialRaw for a client without an address,
// DialUDP for one that has its address.
func Dialer(cfg *Config) func(ctx context.Context, local netip.Addr) (dhcpc.Transport, error) {
	return func(ctx context.Context, local netip.Addr) (dhcpc.Transport, error) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if local.IsValid() {
			return DialUDP(cfg)
		}
		return DialRaw(cfg)
	}
}

// Release sends the RELEASE of a lease from an interface that is not the client's: that
// of the bridge, after the client's own has gone. The frame has the client's MAC and IP
// addresses, and the server's, or that of the relay before it, as the lease has them;
// without the server's MAC address it is broadcast. Config.MAC is not used.
//
// A server in the same namespace, behind the bridge's own address, does not hear what
// the bridge itself sends. To such a one the RELEASE goes through the kernel, from the
// server's own address, as if it had come in by the bridge.
func Release(ctx context.Context, cfg *Config, l *dhcpc.Lease) error {
	p, err := dhcpc.Release(l, rand.Uint32())
	if err != nil {
		return fmt.Errorf("release lease: %w", err)
	}
	here := false
	if err = cfg.checkLink(); err == nil {
		here, err = releaseHere(cfg, p)
	}
	if err == nil && !here {
		err = releaseFrom(ctx, cfg, p)
	}
	if err != nil {
		return fmt.Errorf("release lease of %s: %w", l.Address.Addr(), err)
	}
	return nil
}

func releaseFrom(ctx context.Context, cfg *Config, p *dhcpc.Packet) error {
	c := *cfg
	c.MAC, c.ARP = net.HardwareAddr(p.SrcMAC), false
	raw, err := DialRaw(&c)
	if err != nil {
		return err
	}
	return errors.Join(raw.Send(ctx, p), raw.Close())
}

// releaseHere sends a RELEASE to a server that has its address on the interface itself,
// and says whether there is one.
func releaseHere(cfg *Config, p *dhcpc.Packet) (bool, error) {
	fd, err := cfg.socket(unix.AF_INET, unix.SOCK_DGRAM)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	// To the server, what is sent on an interface to its own address came in there.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX, cfg.Link); err != nil {
		return false, &tombolo.OpError{Op: "bind UDP socket to", Object: cfg.object(), Err: err}
	}
	server := unix.SockaddrInet4{Addr: p.Dst.Addr().As4(), Port: int(p.Dst.Port())}
	if err := unix.Connect(fd, &server); err != nil {
		return false, nil // no route: it is not here, at any rate
	}
	// The kernel speaks to its own addresses from the same address. (It would let a
	// socket bind to any address while the namespace has none.)
	own, err := unix.Getsockname(fd)
	if err != nil {
		return false, &tombolo.OpError{Op: "read address of UDP socket on", Object: cfg.object(), Err: err}
	}
	if from, ok := own.(*unix.SockaddrInet4); !ok || from.Addr != server.Addr {
		return false, nil
	}
	if _, err := unix.Write(fd, p.Payload); err != nil {
		return false, &tombolo.OpError{Op: "send to", Object: p.Dst.String(), Err: err}
	}
	return true, nil
}
