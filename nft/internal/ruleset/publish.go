package ruleset

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Hash maps publish ports, with one entry for each: see Family. A packet that opens a connection to the host causes
// two lookups in them at most, with any number of ports.
const (
	loopbackChain       = "loopback"
	answersChain        = "loopback-answers"
	HostPortsChain      = "hostports"
	HostPortsLocalChain = "hostports-local"
	hairpinChain        = "hairpin"
)

const loopbackLink = "lo"

func portSets() []Set {
	return setsOfBoth(
		func(f Family) Set { return f.portMap(f.HostPorts, nftnl.TypeProtocol, nftnl.TypePort) },
		func(f Family) Set { return f.portMap(f.HostAddrs, f.addrType, nftnl.TypeProtocol, nftnl.TypePort) },
		func(f Family) Set { return f.podPortSet(f.Published) },
		func(f Family) Set { return keySet(f.Services, f.addrType) },
		func(f Family) Set { return keySet(f.Selves, nftnl.TypeIfname, f.addrType, f.addrType) },
		Family.refusedSet, Family.exceptedSet,
	)
}

// setsOfBoth returns each set for IPv4 and for IPv6.
func setsOfBoth(sets ...func(Family) Set) []Set {
	list := make([]Set, 0, 2*len(sets))
	for _, set := range sets {
		for _, f := range Families() {
			list = append(list, set(f))
		}
	}
	return list
}

// portMap returns a map from keys to a pod's address and port.
func (f *Family) portMap(name string, key ...uint32) Set {
	s := keySet(name, key...)
	s.DataType, s.DataLen = concat(f.addrType, nftnl.TypePort)
	return s
}

// podPortSet returns a set of ports of pods: link, address, protocol and port.
func (f *Family) podPortSet(name string) Set {
	return keySet(name, nftnl.TypeIfname, f.addrType, nftnl.TypeProtocol, nftnl.TypePort)
}

// HostPort returns the family, protocol and port that an entry publishes, as one text, and whether it publishes it on
// all addresses. For elements of other sets, the text is empty.
func (e Element) HostPort() (port string, onAll bool) {
	for _, f := range Families() {
		switch e.Set {
		case InInet(f.HostPorts):
			return f.name + string(e.Key), true
		case InInet(f.HostAddrs):
			return f.name + string(e.Key[f.AddrLen:]), false
		}
	}
	return "", false
}

// Excludes reports whether two elements publish the same port, one of them on all addresses and the other on one.
func (e Element) Excludes(other Element) bool {
	port, onAll := e.HostPort()
	otherPort, otherOnAll := other.HostPort()
	return port == otherPort && onAll != otherOnAll
}

// portChains returns the chains that publish ports, for all networks.
func portChains(mark uint32) []Chain {
	return []Chain{
		loopback(),
		answers(mark),
		publish(HostPortsChain, unix.NF_INET_PRE_ROUTING, (*rules).addPublish),
		publish(HostPortsLocalChain, unix.NF_INET_LOCAL_OUT, (*rules).addPublishLocal),
		hairpin(),
	}
}

// loopback returns the chain that protects the host's own services. A port on 127.0.0.1 needs route_localnet on the
// bridge, which makes the kernel treat 127.0.0.0/8 like any other addresses. Then pods could reach programs that
// listen there or trust callers from there. So this chain is the first, and always exists.
func loopback() Chain {
	return Chain{
		Place: InInet(loopbackChain), Kind: "filter", Hook: unix.NF_INET_PRE_ROUTING, Priority: priorityRaw,
		settings: sharedSettings, write: (*rules).addLoopback,
	}
}

func (list *rules) addLoopback() {
	ip, local := Families()[0], loopbackPrefix()
	list.add("others must not reach what is local to the host", func(x expressions) {
		x.isNotLoopback(expr.MetaKeyIIFNAME)
		x.isTo(ip, local)
		x.Drop()
	})
	list.add("nor pass for it", func(x expressions) {
		x.isNotLoopback(expr.MetaKeyIIFNAME)
		x.isFrom(ip, local)
		x.Drop()
	})
}

// answers returns the chain that marks answers to the host's own calls from 127.0.0.1, to distinguish them from other
// packets to 127.0.0.0/8. If bridged packets pass the firewall, their original destination is restored before the
// bridge passes them to the host. A caller that keeps other packets out by separate means, which work without this
// table, can only use this mark.
func answers(mark uint32) Chain {
	return Chain{
		Place: InInet(answersChain), Kind: "filter", Hook: unix.NF_INET_PRE_ROUTING,
		Priority: priorityDestinationNAT + 1,
		settings: markSettings(mark), write: func(list *rules) { list.addAnswers(mark) },
	}
}

func (list *rules) addAnswers(mark uint32) {
	list.add("what the firewall itself leads to what is local to the host", func(x expressions) {
		x.linkIn(expr.MetaKeyIIFNAME, OursSet)
		x.isTo(Families()[0], loopbackPrefix())
		x.addMark(mark)
	})
}

func loopbackPrefix() netip.Prefix { return netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8) }

// sharedSettings are the settings of chains that all networks share.
const sharedSettings = "shared"

// publish returns a chain that leads callers to pods. There is one for callers from elsewhere, and one for the host
// itself.
func publish(name string, hook uint32, write func(*rules)) Chain {
	return Chain{
		Place: InInet(name), Kind: "nat", Hook: hook, Priority: priorityDestinationNAT,
		settings: sharedSettings, write: write,
	}
}

func (list *rules) addPublish() { list.addToHost(); list.addCallers(); list.addHostPorts() }

func (list *rules) addPublishLocal() { list.addToHost(); list.addHostPorts() }

// addToHost adds the rules that leave packets alone whose destination cannot be a host port.
func (list *rules) addToHost() {
	list.add("only what is sent to the host", func(x expressions) {
		x.destinationType()
		x.Compare(expr.CmpOpNeq, binary.NativeEndian.AppendUint32(nil, unix.RTN_LOCAL))
		x.Leave()
	})

	// Of IPv6, only packets to an address that routers forward may go to pods. With others, the caller would hang
	// instead of being refused and turning to IPv4.
	ip6 := Families()[1]
	for _, p := range []netip.Prefix{
		netip.PrefixFrom(netip.IPv6Loopback(), 128),
		netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfe, 0x80}), 10),
	} {
		list.add("cannot be forwarded: "+p.String(), func(x expressions) {
			x.isTo(ip6, p)
			x.Leave()
		})
	}
}

// addHostPorts adds the rules that change the destination of packets to host ports.
func (list *rules) addHostPorts() {
	list.addFamilies("ports on one address", func(x expressions, f Family) {
		x.is(f)
		x.Payload(expr.PayloadBaseNetworkHeader, f.dst, f.AddrLen, nftnl.First)
		x.hostPort(f.AddrLen)
		x.lookupData(f.HostAddrs)
		x.dnat(f)
	})

	// Programs such as systemd-resolved, at 127.0.0.53, use an address of their own there.
	list.add("of 127.0.0.0/8, all addresses are 127.0.0.1 alone", func(x expressions) {
		ip4 := Families()[0]
		x.isTo(ip4, loopbackPrefix())
		x.Payload(expr.PayloadBaseNetworkHeader, ip4.dst, ip4.AddrLen, nftnl.First)
		x.Compare(expr.CmpOpNeq, []byte{127, 0, 0, 1})
		x.Leave()
	})

	// kube-proxy in IPVS mode keeps the addresses of all services on a link of the host.
	list.addFamilies("addresses that are left alone", func(x expressions, f Family) {
		x.is(f)
		x.Payload(expr.PayloadBaseNetworkHeader, f.dst, f.AddrLen, nftnl.First)
		x.Lookup(f.Services)
		x.Leave()
	})
	list.addFamilies("ports on all addresses", func(x expressions, f Family) {
		x.is(f)
		x.hostPort(0)
		x.lookupData(f.HostPorts)
		x.dnat(f)
	})
}

// hairpin returns the chain that changes the sources of connections whose answers would not find their way back. All
// others keep their sources.
func hairpin() Chain {
	return Chain{
		Place: InInet(hairpinChain), Kind: "nat", Hook: unix.NF_INET_POST_ROUTING, Priority: priorityBeforeSourceNAT,
		settings: sharedSettings, write: (*rules).addHairpin,
	}
}

func (list *rules) addHairpin() {
	list.add("the host calls by 127.0.0.1", func(x expressions) {
		x.isRedirected()
		x.isNotLoopback(expr.MetaKeyOIFNAME)
		x.isFrom(Families()[0], loopbackPrefix())
		x.masquerade()
	})

	// Bridged packets have no incoming link here.
	list.addFamilies("a pod calls itself", func(x expressions, f Family) {
		x.isRedirected()
		x.is(f)
		x.port(expr.MetaKeyOIFNAME, expr.PayloadBaseNetworkHeader, f.src, f.AddrLen)
		x.Payload(expr.PayloadBaseNetworkHeader, f.dst, f.AddrLen, nftnl.Behind(IfnameLen+f.AddrLen))
		x.Lookup(f.Selves)
		x.masquerade()
	})

	list.addFamilies("the answer is bridged past the host", func(x expressions, f Family) {
		x.isRedirected()
		x.linkIn(expr.MetaKeyOIFNAME, bypassSet)
		x.is(f)
		x.port(expr.MetaKeyOIFNAME, expr.PayloadBaseNetworkHeader, f.src, f.AddrLen)
		x.Lookup(f.pods)
		x.masquerade()
	})

	list.addLAN()
}

// addLAN masquerades packets that the host sends to a machine on a LAN after any rule changed their destination. It
// does not check their source, since bridged packets have no incoming link here, and since a machine sends answers
// for hosts beyond the LAN to the router.
func (list *rules) addLAN() {
	list.addFamilies("a machine of the LAN answers past the host", func(x expressions, f Family) {
		x.isRedirected()
		x.linkIn(expr.MetaKeyOIFNAME, lansSet)
		x.is(f)
		x.port(expr.MetaKeyOIFNAME, expr.PayloadBaseNetworkHeader, f.dst, f.AddrLen)
		x.LookupNone(f.pods)
		x.masquerade()
	})

	// This is for packets to pods too, except if packets from the pods pass the hooks.
	list.add("a pod on the LAN answers past the host", func(x expressions) {
		x.isRedirected()
		for _, set := range []string{lansSet, bypassSet} {
			x.linkIn(expr.MetaKeyOIFNAME, set)
		}
		x.masquerade()
	})
}

// The chain portSNATChain masquerades more or fewer callers of published ports than the chain hairpin. It is created
// only for networks that need it, so that packets of others do not pass it.

const portSNATChain = "hostports-snat"

// portSNATSets returns the sets of the pods' ports whose callers all lose their address, and of those whose callers
// keep it if they come in by the link that leads to the pod.
func portSNATSets() []Set {
	return setsOfBoth(
		func(f Family) Set { return f.podPortSet(f.SNATAll) },
		func(f Family) Set {
			return keySet(f.SNATNone, nftnl.TypeIfname, nftnl.TypeIfname, f.addrType, nftnl.TypeProtocol, nftnl.TypePort)
		},
	)
}

// portSNAT returns a chain before the chain hairpin, which skips packets that this one has translated.
func portSNAT() Chain {
	return Chain{
		Place: InInet(portSNATChain), Kind: "nat", Hook: unix.NF_INET_POST_ROUTING,
		Priority: priorityBeforeSourceNAT - 1,
		settings: sharedSettings, write: (*rules).addPortSNAT,
	}
}

func (list *rules) addPortSNAT() {
	for _, f := range Families() {
		list.add("calls of these ports, by all, "+f.name, func(x expressions) {
			x.isRedirected()
			x.is(f)
			x.podPort(f)
			x.Lookup(f.SNATAll)
			x.masquerade()
		})

		list.add("calls of these ports keep their address, by the link to the pod, "+f.name, func(x expressions) {
			x.byLink(f)
			x.Lookup(f.SNATNone)
			x.Payload(expr.PayloadBaseNetworkHeader, f.src, f.AddrLen, nftnl.First)
			x.Add(&expr.NAT{Type: expr.NATTypeSourceNAT, Family: uint32(f.Proto), RegAddrMin: uint32(nftnl.First)})
		})
	}
}

// byLink loads the key of a pod's port and the links of the packet, for a redirected connection.
func (x expressions) byLink(f Family) {
	x.isRedirected()
	x.is(f)
	x.bridged()
	x.Payload(expr.PayloadBaseNetworkHeader, f.dst, f.AddrLen, nftnl.Behind(2*IfnameLen))
	x.hostPort(2*IfnameLen + f.AddrLen)
}
