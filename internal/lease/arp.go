package lease

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
)

// WhoHas returns the MACs of other machines that have the address a. It sends one ARP probe (RFC 5227) from the link,
// and collects answers for the given time. The parameter own is the sender's MAC. A probe changes no neighbour table.
func WhoHas(ctx context.Context, link int, own net.HardwareAddr, a netip.Addr, within time.Duration) (
	list []net.HardwareAddr, _ error,
) {
	conn, err := transport.DialRaw(&transport.Config{Link: link, MAC: own, ARP: true})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	probe := &dhcpc.ARP{SenderMAC: dhcpc.Hex(own), SenderIP: netip.IPv4Unspecified(), TargetIP: a}
	if err := conn.Send(ctx, &dhcpc.Packet{ARP: probe}); err != nil {
		return nil, err
	}

	until := time.Now().Add(within)
	for {
		p, err := conn.Receive(ctx, until)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return list, nil
		}

		if err != nil {
			return nil, err
		}

		if p.ARP == nil || p.ARP.SenderIP != a || !p.ARP.Reply {
			continue
		}

		mac := net.HardwareAddr(p.ARP.SenderMAC)
		isMAC := func(have net.HardwareAddr) bool { return bytes.Equal(have, mac) }
		if !isMAC(own) && !slices.ContainsFunc(list, isMAC) {
			list = append(list, mac)
		}
	}
}
