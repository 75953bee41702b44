package nft

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// What publishes ports. Every port is an entry of hash maps, of which a packet that
// opens a connection to the host looks into two at most, however many there are.
const (
	// hostPorts lead from a port on all addresses of the host's to a pod's address
	// and port, hostAddrs from a port on one address.
	hostPorts4Map = "hostports4"
	hostPorts6Map = "hostports6"
	hostAddrs4Map = "hostaddrs4"
	hostAddrs6Map = "hostaddrs6"
	// claimsSet has the ports of hostAddrs, whatever their addresses: see claim.
	claimsSet = "hostclaims"
	// published are pods' ports that something leads to.
	published4Set = "published4"
	published6Set = "published6"
	// selves are addresses of such pods, each with itself.
	selves4Set = "selves4"
	selves6Set = "selves6"

	loopbackChain       = "loopback"
	answersChain        = "loopback-answers"
	hostPortsChain      = "hostports"
	hostPortsLocalChain = "hostports-local"
	hairpinChain        = "hairpin"
)

const loopbackLink = "lo"

func portSets() []set {
	const (
		port  = nftnl.TypeProtocol<<nftnl.TypeBits | nftnl.TypePort
		port4 = nftnl.TypeIPv4<<(2*nftnl.TypeBits) | port
		port6 = nftnl.TypeIPv6<<(2*nftnl.TypeBits) | port
		pod4  = nftnl.TypeIPv4<<nftnl.TypeBits | nftnl.TypePort
		pod6  = nftnl.TypeIPv6<<nftnl.TypeBits | nftnl.TypePort
	)
	return []set{
		{place: inInet(hostPorts4Map), keyType: port, keyLen: 2 * slot, dataType: pod4, dataLen: addr4Len + slot},
		{place: inInet(hostPorts6Map), keyType: port, keyLen: 2 * slot, dataType: pod6, dataLen: addr6Len + slot},
		{place: inInet(hostAddrs4Map), keyType: port4, keyLen: addr4Len + 2*slot, dataType: pod4, dataLen: addr4Len + slot},
		{place: inInet(hostAddrs6Map), keyType: port6, keyLen: addr6Len + 2*slot, dataType: pod6, dataLen: addr6Len + slot},
		{place: inInet(claimsSet), keyType: nftnl.TypeFamily<<(2*nftnl.TypeBits) | port, keyLen: 3 * slot},
		{place: inInet(published4Set), keyType: nftnl.TypeIfname<<(3*nftnl.TypeBits) | port4, keyLen: pods4Len + 2*slot},
		{place: inInet(published6Set), keyType: nftnl.TypeIfname<<(3*nftnl.TypeBits) | port6, keyLen: pods6Len + 2*slot},
		{place: inInet(selves4Set), keyType: (nftnl.TypeIfname<<nftnl.TypeBits|nftnl.TypeIPv4)<<nftnl.TypeBits | nftnl.TypeIPv4, keyLen: pods4Len + addr4Len},
		{place: inInet(selves6Set), keyType: (nftnl.TypeIfname<<nftnl.TypeBits|nftnl.TypeIPv6)<<nftnl.TypeBits | nftnl.TypeIPv6, keyLen: pods6Len + addr6Len},
	}
}

// portChains are what publishes ports, for all networks.
func portChains(mark uint32) []chain {
	return []chain{
		loopback(),
		answers(mark),
		publish(hostPortsChain, unix.NF_INET_PRE_ROUTING),
		publish(hostPortsLocalChain, unix.NF_INET_LOCAL_OUT),
		hairpin(),
	}
}

// loopback keeps to the host what is the host's own. A port on 127.0.0.1 needs
// route_localnet on the bridge, which has the kernel take 127.0.0.0/8 for an address
// like any other: what listens there, and what trusts callers from there, is then
// within the pods' reach. So this comes first, and is always there.
func loopback() chain {
	return chain{
		place: inInet(loopbackChain), kind: "filter", hook: unix.NF_INET_PRE_ROUTING, priority: priorityRaw,
		settings: sharedSettings, write: (*rules).addLoopback,
	}
}

func (list *rules) addLoopback() {
	ip, local := families()[0], loopbackPrefix()
	list.add("others must not reach what is local to the host", func(x expressions) {
		x.isLink(expr.MetaKeyIIFNAME, expr.CmpOpNeq, loopbackLink)
		x.isTo(ip, local)
		x.Drop()
	})
	list.add("nor pass for it", func(x expressions) {
		x.isLink(expr.MetaKeyIIFNAME, expr.CmpOpNeq, loopbackLink)
		x.isFrom(ip, local)
		x.Drop()
	})
}

// answers tells what the host's own calls from 127.0.0.1 get back from what others
// send to 127.0.0.0/8. Where bridged packets pass the firewall, they have their
// destination back before the bridge hands them to the host, and whoever keeps others
// out there by a means of its own, which stands without this table, has nothing else
// to go by.
func answers(mark uint32) chain {
	return chain{
		place: inInet(answersChain), kind: "filter", hook: unix.NF_INET_PRE_ROUTING, priority: priorityDestinationNAT + 1,
		settings: markSettings(mark), write: func(list *rules) { list.addAnswers(mark) },
	}
}

func (list *rules) addAnswers(mark uint32) {
	list.add("what the firewall itself leads to what is local to the host", func(x expressions) {
		x.isLink(expr.MetaKeyIIFNAME, expr.CmpOpNeq, loopbackLink)
		x.isTo(families()[0], loopbackPrefix())
		x.addMark(mark)
	})
}

func loopbackPrefix() netip.Prefix { return netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8) }

// sharedSettings are those of chains that are the same whatever is asked for.
const sharedSettings = "shared"

// publish is the chain that leads callers to pods, once for those who come from
// elsewhere and once for the host itself.
func publish(name string, hook uint32) chain {
	return chain{
		place: inInet(name), kind: "nat", hook: hook, priority: priorityDestinationNAT,
		settings: sharedSettings, write: (*rules).addPublish,
	}
}

func (list *rules) addPublish() {
	list.add("only what is sent to the host", func(x expressions) {
		x.destinationType()
		x.Compare(expr.CmpOpNeq, binary.NativeEndian.AppendUint32(nil, unix.RTN_LOCAL))
		x.Leave()
	})
	// What goes to pods must have an address that routers forward: these have the
	// caller hang where it could have been refused, and have turned to IPv4.
	ip6 := families()[1]
	for _, p := range []netip.Prefix{
		netip.PrefixFrom(netip.IPv6Loopback(), 128),
		netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfe, 0x80}), 10),
	} {
		list.add("cannot be forwarded: "+p.String(), func(x expressions) {
			x.isTo(ip6, p)
			x.Leave()
		})
	}
	for _, f := range families() {
		list.add("ports on one address, "+f.name, func(x expressions) {
			x.is(f)
			x.Payload(expr.PayloadBaseNetworkHeader, f.dst, f.addrLen, nftnl.First)
			x.hostPort(f.addrLen)
			x.lookupData(f.hostAddrs)
			x.dnat(f)
		})
	}
	for _, f := range families() {
		list.add("ports on all addresses, "+f.name, func(x expressions) {
			x.is(f)
			x.hostPort(0)
			x.lookupData(f.hostPorts)
			x.dnat(f)
		})
	}
}

// hairpin changes the sources of those connections whose answers would not find
// back otherwise. All others keep theirs.
func hairpin() chain {
	return chain{
		place: inInet(hairpinChain), kind: "nat", hook: unix.NF_INET_POST_ROUTING, priority: priorityBeforeSourceNAT,
		settings: sharedSettings, write: (*rules).addHairpin,
	}
}

func (list *rules) addHairpin() {
	list.add("the host calls by 127.0.0.1", func(x expressions) {
		x.isRedirected()
		x.isLink(expr.MetaKeyOIFNAME, expr.CmpOpNeq, loopbackLink)
		x.isFrom(families()[0], loopbackPrefix())
		x.masquerade()
	})
	// Bridged packets have no incoming link here.
	for _, f := range families() {
		list.add("a pod calls itself, "+f.name, func(x expressions) {
			x.isRedirected()
			x.is(f)
			x.port(expr.MetaKeyOIFNAME, expr.PayloadBaseNetworkHeader, f.src, f.addrLen)
			x.Payload(expr.PayloadBaseNetworkHeader, f.dst, f.addrLen, nftnl.Behind(ifnameLen+f.addrLen))
			x.Lookup(f.selves)
			x.masquerade()
		})
	}
	for _, f := range families() {
		list.add("the answer is bridged past the host, "+f.name, func(x expressions) {
			x.isRedirected()
			x.Meta(expr.MetaKeyOIFNAME, nftnl.First)
			x.Lookup(bypassSet)
			x.is(f)
			x.port(expr.MetaKeyOIFNAME, expr.PayloadBaseNetworkHeader, f.src, f.addrLen)
			x.Lookup(f.pods)
			x.masquerade()
		})
	}
	list.addLAN()
}

// addLAN is for what the host leads to somewhere on a LAN, whoever did it and wherever
// it comes from: that is not asked, since bridged packets have no incoming link here,
// and a machine's answer to anywhere beyond the LAN goes to the router.
func (list *rules) addLAN() {
	for _, f := range families() {
		list.add("a machine of the LAN answers past the host, "+f.name, func(x expressions) {
			x.isRedirected()
			x.Meta(expr.MetaKeyOIFNAME, nftnl.First)
			x.Lookup(lansSet)
			x.is(f)
			x.port(expr.MetaKeyOIFNAME, expr.PayloadBaseNetworkHeader, f.dst, f.addrLen)
			x.LookupNone(f.pods)
			x.masquerade()
		})
	}
	// Pods too, but for where what they send passes the hooks.
	list.add("a pod on the LAN answers past the host", func(x expressions) {
		x.isRedirected()
		for _, set := range []string{lansSet, bypassSet} {
			x.Meta(expr.MetaKeyOIFNAME, nftnl.First)
			x.Lookup(set)
		}
		x.masquerade()
	})
}
