package takeover

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/lease"
)

// claim is a lease that the host may have by a NIC, and the identities that it may have it by.
type claim struct {
	nic     *bridge.Link
	address addr.Address
	ids     []string // see lease.ClientID
}

// prove has a server confirm the lease that the host has by the NIC, as long as the host's own
// client is there. So a takeover is begun only if the keeper will be able to renew it. It gives
// the identity, or an empty one where nothing was leased.
func (n *Node) prove(ctx context.Context, want uplink.Uplink) (id string, _ *dhcpc.Lease, _ error) {
	if n.LeaseDir == "" {
		return want.ClientID, nil, nil
	}
	c, err := n.claimOf(ctx, want)
	if c == nil || err != nil {
		return "", nil, err
	}
	var refused []string
	for _, id := range c.ids {
		l, err := c.request(ctx, id)
		if err == nil {
			return id, l, nil
		}
		if ctx.Err() != nil {
			return "", nil, err
		}
		refused = append(refused, fmt.Sprintf("to client identifier %s: %v", id, err))
	}
	return "", nil, fmt.Errorf("take over %s: %w: no DHCP server confirms %s, which the host leased, %s; name the identifier that the host's client has with `tombolo uplink take %s %s --client-id mac|none|HEX`",
		want.NIC, uplink.ErrRefused, c.address.Prefix.Addr(), strings.Join(refused, ", or "), want.NIC, want.Bridge)
}

// claimOf is nil where no address of the NIC was leased. Without a word of the operator's or of
// systemd-networkd's, the likeliest identities are tried: servers find a client that names none
// by its MAC address.
func (n *Node) claimOf(ctx context.Context, want uplink.Uplink) (*claim, error) {
	nic, err := n.Links.Link(ctx, want.NIC)
	if err != nil {
		return nil, err
	}
	list, err := n.Links.Addresses().List(addr.Filter{Link: nic.Index, Family: unix.AF_INET})
	if err != nil || len(list) == 0 {
		return nil, err
	}
	leased := lease.FirstLeased(list)
	if address, id, known := lease.Networkd("", nic.Index); known && want.ClientID == "" {
		for _, a := range list {
			if a.Prefix.Addr() == address {
				return &claim{nic, a, []string{id.String()}}, nil
			}
		}
	}
	switch {
	case want.ClientID != "" && leased != nil:
		return &claim{nic, *leased, []string{want.ClientID}}, nil
	case want.ClientID != "": // some clients tell the kernel of no end
		return &claim{nic, list[0], []string{want.ClientID}}, nil
	case leased != nil:
		return &claim{nic, *leased, []string{"none", "mac"}}, nil
	}
	return nil, nil
}

const (
	// A server answers within milliseconds or, in general, not at all; a REQUEST that is lost is
	// sent again.
	answerWait  = 4 * time.Second
	resendAfter = time.Second
)

var errSilent = errors.New("no answer")

// request asks all servers to renew the address (RFC 2131, REBINDING).
func (c *claim) request(ctx context.Context, text string) (*dhcpc.Lease, error) {
	id, err := lease.ClientID(text, c.nic.MAC)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	machine, err := dhcpc.NewMachine(&dhcpc.Config{MAC: c.nic.MAC, ClientID: id, Address: c.address.Prefix.Addr()})
	if err != nil {
		return nil, err
	}
	s, err := machine.Restore(now, rand.Uint64(), &dhcpc.Lease{
		Address: c.address.Prefix, Server: netip.IPv4Unspecified(), MAC: dhcpc.Hex(c.nic.MAC), ClientID: id,
		Obtained: now, Renew: now, Rebind: now, Expire: now.Add(time.Hour),
	})
	if err != nil {
		return nil, err
	}
	conn, err := transport.DialRaw(&transport.Config{Link: c.nic.Index, MAC: c.nic.MAC})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return c.converse(ctx, machine, s, conn)
}

// converse waits for what a server says, and leaves it at that: a refusal is not followed by a DISCOVER.
func (c *claim) converse(ctx context.Context, machine *dhcpc.Machine, s dhcpc.Session, conn *transport.Raw) (*dhcpc.Lease, error) {
	limit := time.Now().Add(answerWait)
	var heard, asked *dhcpc.Packet
	for time.Now().Before(limit) {
		var out dhcpc.Output
		s, out = machine.Step(s, time.Now(), dhcpc.Event{Packet: heard})
		switch {
		case out.Bound != nil && out.Bound.Address.Addr() == c.address.Prefix.Addr():
			return out.Bound, nil
		case out.Bound != nil:
			return nil, fmt.Errorf("it is to be %s", out.Bound.Address.Addr())
		case out.Err != nil:
			return nil, out.Err
		case out.Send != nil:
			asked = out.Send
		}
		if heard == nil && asked != nil {
			if err := conn.Send(ctx, asked); err != nil {
				return nil, err
			}
		}
		var err error
		if heard, err = conn.Receive(ctx, time.Now().Add(resendAfter)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return nil, err
		}
	}
	return nil, errSilent
}
