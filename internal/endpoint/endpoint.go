package endpoint

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
)

// Leased is the IPAMType of attachments with an IPv4 address from DHCP.
const Leased = "dhcp"

// Of returns an attachment's endpoint: its addresses, host ports, egress policy, and guard against false source
// addresses, in the form for the firewall. An attachment without any address, as after the loss of its lease, publishes
// no host ports. If its guard checks addresses, a pod without its leased IPv4 address may send only DHCP requests in
// IPv4.
func Of(a *state.Attachment) nft.Endpoint {
	ep := nft.Endpoint{
		Owner: nft.Owner(a.Hash()), Network: a.Network, Bridge: a.GatewayLink(), NIC: a.NIC,
		Addrs: Addresses(a), MAC: net.HardwareAddr(a.MAC), Masquerade: a.Masquerade, Ports: Ports(a),
		PortSNAT: SNAT(a), PublishFrom: a.PublishFrom, Unadmitted: a.Unadmitted, Egress: a.Egress,
	}
	for _, w := range a.Waiting {
		for _, p := range w.Addresses {
			ep.Callers = append(ep.Callers, p.Addr())
		}
	}

	if a.Guard != "" {
		ep.GuardedPort, ep.SLAAC, ep.Guard = a.HostIf, a.SLAAC, a.Guard
		if a.Guard != nft.GuardMAC && a.IPAMType == Leased && !slices.ContainsFunc(ep.Addrs, netip.Addr.Is4) {
			// Without GuardUntrusted, a pod that has no address at all could send from any address.
			ep.Guard = nft.GuardUntrusted
		}
	}

	if len(ep.Addrs) == 0 {
		ep.Ports = nil
	}

	return ep
}

// SNAT returns the kind of connections to an attachment's host ports whose source address the firewall replaces by the
// host's address. Usually this is the record's PortSNAT. If that is SNATNeeded, and the container has another
// attachment on a LAN while this one is on none, SNAT returns SNATAll. Without this, the container would answer many
// clients directly through the LAN, from an address that does not belong there.
func SNAT(a *state.Attachment) nft.SNAT {
	isLAN := func(w state.Waiting) bool { return w.LAN }
	if a.PortSNAT == nft.SNATNeeded && a.DefaultRoute == "" && slices.ContainsFunc(a.Waiting, isLAN) {
		return nft.SNATAll
	}
	return a.PortSNAT
}

// In returns an attachment's endpoint, without features that the network n lacks now. The network may have lost
// features since the pod was added, and then the firewall no longer has sets for them.
func In(a *state.Attachment, n *state.Network) nft.Endpoint {
	ep := Of(a)
	ep.Masquerade = ep.Masquerade && n.Masquerade
	if !n.Guards() {
		ep.GuardedPort, ep.SLAAC, ep.Guard = "", false, ""
	}
	if !n.PodEgress {
		ep.Egress = ""
	}
	return ep
}

// WithResolvers returns an egress policy that also allows DNS to the name servers, if the policy has the entry
// "public". It returns any other policy unchanged.
func WithResolvers(policy nft.Egress, servers []netip.Addr) nft.Egress {
	isPublic := func(entry string) bool { return strings.TrimSpace(entry) == "public" }
	if !slices.ContainsFunc(strings.Split(string(policy), ","), isPublic) {
		return policy
	}
	for _, a := range servers {
		policy += nft.Egress(fmt.Sprintf(", %[1]s udp 53, %[1]s tcp 53", a))
	}
	return policy
}

// Addresses returns an attachment's addresses without their prefix lengths.
func Addresses(a *state.Attachment) []netip.Addr {
	list := make([]netip.Addr, len(a.Addresses))
	for i, address := range a.Addresses {
		list[i] = address.Prefix.Addr()
	}
	return list
}

// Ports returns the host ports that lead to an attachment. It leaves out host ports that another attachment of the same
// container has instead (Withheld).
func Ports(a *state.Attachment) []nft.Port {
	list := make([]nft.Port, 0, len(a.Published))
	for _, p := range a.Published {
		if !p.Withheld {
			list = append(list, p.Port)
		}
	}
	return list
}

// Published returns host ports in the form for records: sorted, with consecutive ports joined into ranges.
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

// compare orders ports by protocol, host address and host port.
func compare(a, b nft.Port) int {
	return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), a.HostAddr.Compare(b.HostAddr),
		cmp.Compare(a.HostPort, b.HostPort))
}

// PublishesIPv4 reports whether a host port on an IPv4 address of the host, such as 127.0.0.1, leads to the pod. A
// withheld host port counts too. A pod whose lease has ended counts as one with an address, since tombolod will get
// another lease. With SNATNone it reports false.
func PublishesIPv4(rec *state.Attachment) bool {
	if rec.PortSNAT == nft.SNATNone {
		return false // connections from 127.0.0.1 would get no answer
	}
	leased := rec.IPAMType == Leased
	return (leased || slices.ContainsFunc(rec.Addresses, func(a ipam.Address) bool { return a.Prefix.Addr().Is4() })) &&
		slices.ContainsFunc(rec.Published,
			func(p state.Published) bool { return !p.HostAddr.IsValid() || p.HostAddr.Is4() })
}

// PortText returns a host port as text for messages, such as 8080/tcp or 192.0.2.1:8080/tcp. It leaves out an
// unspecified address, such as 0.0.0.0.
func PortText(p nft.Port) string {
	if p.HostAddr.IsValid() && p.HostAddr.IsUnspecified() {
		p.HostAddr = netip.Addr{}
	}
	return p.String()
}

// OneMAC is part of a message: the question whether the LAN accepts only frames with the NIC's own MAC.
const OneMAC = "whether the network beyond the NIC drops frames of other MACs than the NIC's, as Wi-Fi, most clouds, " +
	"ESXi (unless its port group accepts forged transmits and promiscuous mode) and switches with port security do"

// MissingLinks returns a warning for each link that callers names and that does not exist. callers is a value of
// publishFrom: entries, separated by commas, that begin with a link, an address or a prefix.
func MissingLinks(callers string, exists func(name string) bool) (warnings []string) {
	for entry := range strings.SplitSeq(callers, ",") {
		name, _, _ := strings.Cut(strings.TrimSpace(entry), " ")
		_, noAddress := netip.ParseAddr(name)
		_, noPrefix := netip.ParsePrefix(name)
		if noAddress != nil && noPrefix != nil && name != "" && name != "all" && !exists(name) {
			warnings = append(warnings,
				fmt.Sprintf("publishFrom names link %q, which does not exist: no call comes by it", name))
		}
	}

	return warnings
}

// SlowPorts returns a warning about a bridge that runs the spanning tree protocol. delay is the time until a new port
// forwards frames. The warning names the command that turns the protocol off.
func SlowPorts(bridge string, delay time.Duration) string {
	return fmt.Sprintf("bridge %s runs the spanning tree protocol, so that a new port forwards nothing for %s; "+
		"unless its ports form a loop, this helps: "+
		"ip link set %s type bridge stp_state 0", bridge, delay, bridge)
}

// The alias (IFLA_IFALIAS) of a port, which is the host's end of a pod's link, names the attachment that owns it:
// tombolo:1:<hash>:<network>:<addresses>. So the owner can be found even if the node has lost its state.

// AliasPrefix is the prefix of each alias that Tombolo sets.
const AliasPrefix = "tombolo:1:"

// BridgeAlias is the alias of a bridge that Tombolo created, and of the host's links in the VLANs of a bridge. Tombolo
// never deletes a bridge without this alias.
const BridgeAlias = AliasPrefix + "bridge"

// ShareAlias is the alias prefix of the veth pair that connects a bridge to a shared NIC (package share).
const ShareAlias = AliasPrefix + "share"

const aliasMax = 255 // IFALIASZ without its NUL

// AliasOwner returns the beginning of the alias of the host's end of a pod's link, for the attachment with the given
// hash. No other attachment's alias begins with this text.
func AliasOwner(hash string) string { return AliasPrefix + hash + ":" }

// AliasOf returns the alias for an attachment's port.
func AliasOf(a *state.Attachment) string { return Alias(a.Hash(), a.Network, Addresses(a)) }

// Alias returns the alias for the host's end of a pod's link. If the addresses do not all fit, Alias leaves out all of
// them. The firewall's elements also have the addresses.
func Alias(hash, network string, addresses []netip.Addr) string {
	head := AliasOwner(hash) + NetworkToken(network) + ":"
	if full := head + printable.List(addresses, ","); len(full) <= aliasMax {
		return full
	}
	return head
}

// NetworkToken returns a network's name if it has at most 64 bytes, else "#" and a hash of the name. No network's
// name begins with "#".
func NetworkToken(network string) string {
	const longest = 64
	if len(network) <= longest {
		return network
	}
	return "#" + ident.Hash(network, "", "")
}

// Mark is the content of the alias of the host's end of a pod's link.
type Mark struct {
	Hash      string
	Network   string // a NetworkToken
	Addresses []netip.Addr
}

// ParseAlias parses the alias of the host's end of a pod's link. It returns false for any other text.
func ParseAlias(s string) (Mark, bool) {
	const hash, network, addresses, all = 2, 3, 4, 5
	parts := strings.SplitN(s, ":", all) // an IPv6 address contains colons, but a network's name does not
	if len(parts) < all || !strings.HasPrefix(s, AliasPrefix) || !ident.IsHash(parts[hash]) {
		return Mark{}, false
	}

	m := Mark{Hash: parts[hash], Network: parts[network]}
	for text := range strings.SplitSeq(parts[addresses], ",") {
		if ip, err := netip.ParseAddr(text); err == nil {
			m.Addresses = append(m.Addresses, ip)
		}
	}

	return m, true
}
