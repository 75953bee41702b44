package takeover

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
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
	list, err := n.Links.Addresses().List(ctx, addr.Filter{Link: nic.Index, Family: unix.AF_INET})
	if err != nil || len(list) == 0 {
		return nil, err
	}
	leased := lease.FirstLeased(list)
	if want.ClientID != "" {
		leased = cmp.Or(leased, &list[0]) // some clients tell the kernel of no end
		return &claim{nic, *leased, []string{want.ClientID}}, nil
	}
	address, id, known := lease.Networkd("", nic.Index)
	for _, a := range list {
		if known && a.Prefix.Addr() == address {
			return &claim{nic, a, []string{id.String()}}, nil
		}
	}
	if leased == nil {
		return nil, nil
	}
	return &claim{nic, *leased, []string{"none", "mac"}}, nil
}

// A server answers within milliseconds or, in general, not at all.
const answerWait = 4 * time.Second

var errAnswered = errors.New("the server refuses it")

// request asks all servers to renew the address (RFC 2131, REBINDING), and leaves it at that: a
// refusal is not followed by a DISCOVER.
func (c *claim) request(ctx context.Context, text string) (*dhcpc.Lease, error) {
	id, err := lease.ClientID(text, c.nic.MAC)
	if err != nil {
		return nil, err
	}
	client, err := dhcpc.New(&dhcpc.Config{MAC: c.nic.MAC, ClientID: id, Dial: func(context.Context, netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) {
		return transport.DialRaw(&transport.Config{Link: c.nic.Index, MAC: c.nic.MAC})
	}})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, answerWait)
	defer cancel()
	now := time.Now()
	held := &dhcpc.Lease{
		Address: c.address.Prefix, Server: netip.IPv4Unspecified(), MAC: dhcpc.Hex(c.nic.MAC), ClientID: id,
		Obtained: now, Renew: now, Rebind: now, Expire: now.Add(time.Hour),
	}
	var got *dhcpc.Lease
	err = client.Run(ctx, held, func(_, next *dhcpc.Lease) error {
		got = next
		return errAnswered
	})
	switch {
	case got != nil && got.Address.Addr() == held.Address.Addr():
		return got, nil
	case got != nil:
		return nil, fmt.Errorf("it is to be %s", got.Address.Addr())
	case errors.Is(err, errAnswered):
		return nil, errAnswered
	case errors.Is(err, context.DeadlineExceeded):
		return nil, errors.New("no answer")
	}
	return nil, err
}
