package doctor

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/route"
)

// hear is for how long several nodes may answer for one address.
const hear = 200 * time.Millisecond

// duplicates asks on the bridge who has the pod's IPv4 address, and who the gateway's, which the
// host itself does not answer there.
func (e *examination) duplicates(ctx context.Context, br *bridge.Link) error {
	onHost, err := route.Dial(nil)
	if err != nil {
		return err
	}
	defer onHost.Close()
	for _, a := range e.at.Addresses {
		if !a.Prefix.Addr().Is4() {
			continue
		}
		owners, err := whoHas(ctx, br, a.Prefix.Addr())
		if err != nil {
			return err
		}
		for _, mac := range owners {
			if !bytes.Equal(mac, e.at.MAC) {
				e.add(StepDuplicate, "give one of the two another address", "another node answers for %s: %s, and the pod has %s", a.Prefix.Addr(), mac, e.at.MAC)
			}
		}
		if !a.Gateway.Is4() || !isOwn(onHost, a.Gateway) {
			return nil
		}
		if owners, err = whoHas(ctx, br, a.Gateway); err != nil {
			return err
		}
		for _, mac := range owners {
			e.add(StepDuplicate, "give that node another address", "another node on bridge %s answers for the gateway %s: %s", br.Name, a.Gateway, mac)
		}
	}
	return nil
}

// whoHas sends an ARP probe (RFC 5227), which leaves no trace in anybody's table, and gives the
// MACs of those that answer.
func whoHas(ctx context.Context, br *bridge.Link, a netip.Addr) ([]net.HardwareAddr, error) {
	conn, err := transport.DialRaw(&transport.Config{Link: br.Index, MAC: br.MAC, ARP: true})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	probe := &dhcpc.Packet{ARP: &dhcpc.ARP{SenderMAC: dhcpc.Hex(br.MAC), SenderIP: netip.IPv4Unspecified(), TargetIP: a}}
	if err := conn.Send(ctx, probe); err != nil {
		return nil, err
	}
	var list []net.HardwareAddr
	until := time.Now().Add(hear)
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
		if !bytes.Equal(mac, br.MAC) && !slices.ContainsFunc(list, func(have net.HardwareAddr) bool { return bytes.Equal(have, mac) }) {
			list = append(list, mac)
		}
	}
}
