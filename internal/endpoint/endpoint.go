package endpoint

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
)

// Leased is the IPAMType of attachments whose IPv4 address is leased by DHCP.
const Leased = "dhcp"

// Of is an attachment as the firewall sees it, from its record. One that has lost its
// lease publishes nothing, and may ask for another and send nothing else of IPv4.
func Of(a *state.Attachment) nft.Endpoint {
	ep := nft.Endpoint{
		Owner: nft.Owner(a.Hash()), Network: a.Network, Bridge: a.GatewayLink(), NIC: a.NIC,
		Addrs: Addresses(a), MAC: net.HardwareAddr(a.MAC), Masquerade: a.Masquerade, Ports: Ports(a),
		PortSNAT: SNAT(a),
	}
	for _, w := range a.Waiting {
		for _, p := range w.Addresses {
			ep.Callers = append(ep.Callers, p.Addr())
		}
	}
	if a.Guard != "" {
		ep.GuardedPort, ep.SLAAC, ep.Guard = a.HostIf, a.SLAAC, a.Guard
		if a.Guard != nft.GuardMAC && a.IPAMType == Leased && !slices.ContainsFunc(ep.Addrs, netip.Addr.Is4) {
			// Without it, a pod without any address could send from any.
			ep.Guard = nft.GuardUntrusted
		}
	}
	if len(ep.Addrs) == 0 {
		ep.Ports = nil
	}
	return ep
}

// SNAT returns whose calls of an attachment's host ports come from the host's address. A container that is on a LAN too
// would answer many callers by that LAN, with an address that does not belong there, so all calls do.
func SNAT(a *state.Attachment) nft.SNAT {
	isLAN := func(w state.Waiting) bool { return w.LAN }
	if a.PortSNAT == nft.SNATNeeded && a.DefaultRoute == "" && slices.ContainsFunc(a.Waiting, isLAN) {
		return nft.SNATAll
	}
	return a.PortSNAT
}

// In is Of in its network as that is now: features that were switched off there since the pod came have no set any
// more.
func In(a *state.Attachment, n *state.Network) nft.Endpoint {
	ep := Of(a)
	ep.Masquerade = ep.Masquerade && n.Masquerade
	if !n.Guard {
		ep.GuardedPort, ep.SLAAC, ep.Guard = "", false, ""
	}
	return ep
}

// Addresses lists an attachment's addresses.
func Addresses(a *state.Attachment) []netip.Addr {
	list := make([]netip.Addr, len(a.Addresses))
	for i, address := range a.Addresses {
		list[i] = address.Prefix.Addr()
	}
	return list
}

// Ports lists an attachment's host ports, but for those that another attachment of its container
// has.
func Ports(a *state.Attachment) []nft.Port {
	list := make([]nft.Port, 0, len(a.Published))
	for _, p := range a.Published {
		if !p.Withheld {
			list = append(list, p.Port)
		}
	}
	return list
}

// Published returns host ports as they are on record: in order, and those that follow one another are one range.
func Published(ports []nft.Port) []state.Published {
	var list []state.Published
	for _, p := range slices.SortedStableFunc(slices.Values(ports), compare) {
		if p.Count == 1 {
			p.Count = 0
		}
		if last := len(list) - 1; last >= 0 {
			before, n := list[last].Port, max(list[last].Count, 1)
			next := before
			next.HostPort, next.PodPort, next.Count = before.HostPort+n, before.PodPort+n, p.Count
			if next == p {
				list[last].Count = n + max(p.Count, 1)
				continue
			}
		}
		list = append(list, state.Published{Port: p})
	}
	return list
}

func compare(a, b nft.Port) int {
	return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), a.HostAddr.Compare(b.HostAddr), cmp.Compare(a.HostPort, b.HostPort))
}

// PublishesIPv4 says whether a port of the host's IPv4 addresses, 127.0.0.1 among them, leads to the pod, or
// will once more: one whose lease has ended has no address until the keeper has got another.
func PublishesIPv4(rec *state.Attachment) bool {
	if rec.PortSNAT == nft.SNATNone {
		return false // 127.0.0.1 would get no answer
	}
	leased := rec.IPAMType == Leased
	return (leased || slices.ContainsFunc(rec.Addresses, func(a ipam.Address) bool { return a.Prefix.Addr().Is4() })) &&
		slices.ContainsFunc(rec.Published, func(p state.Published) bool { return !p.HostAddr.IsValid() || p.HostAddr.Is4() })
}

// PortText names a host port in messages: 8080/tcp, 192.0.2.1:8080/tcp.
func PortText(p nft.Port) string {
	if p.HostAddr.IsValid() && p.HostAddr.IsUnspecified() {
		p.HostAddr = netip.Addr{}
	}
	return p.String()
}

// SlowPorts says that a bridge runs the spanning tree protocol, for how long a new port therefore forwards nothing, and
// which command helps.
func SlowPorts(bridge string, delay time.Duration) string {
	return fmt.Sprintf("bridge %s runs the spanning tree protocol, so that a new port forwards nothing for %s; unless its ports form a loop, this helps: "+
		"ip link set %s type bridge stp_state 0", bridge, delay, bridge)
}
