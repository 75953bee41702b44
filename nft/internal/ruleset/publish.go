package ruleset

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// The names of the chains for published ports. The chains look up ports in hash maps with one element for each port:
// see Family. A packet that opens a connection to the host needs at most two such lookups, regardless of the number
// of ports.
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

// setsOfBoth calls each function for IPv4 and for IPv6, and returns the resulting sets.
func setsOfBoth(sets ...func(Family) Set) []Set {
	list := make([]Set, 0, 2*len(sets))
	for _, set := range sets {
		for _, f := range Families() {
			list = append(list, set(f))
		}
	}
	return list
}

// portMap returns a map with the given keys, whose data are a pod's address and port.
func (f *Family) portMap(name string, key ...uint32) Set {
	s := keySet(name, key...)
	s.DataType, s.DataLen = concat(f.addrType, nftnl.TypePort)
	return s
}

// podPortSet returns a set whose elements are ports of pods. The parts of its keys are link, address, protocol and
// port.
func (f *Family) podPortSet(name string) Set {
	return keySet(name, nftnl.TypeIfname, f.addrType, nftnl.TypeProtocol, nftnl.TypePort)
}

// HostPort returns the family, protocol and port that an element publishes, as one opaque string. onAll reports
// whether the port is published on all addresses. For elements of other sets, the string is empty.
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

// Excludes reports whether one element publishes a port on all addresses and the other one the same port on one
// address.
func (e Element) Excludes(other Element) bool {
	port, onAll := e.HostPort()
	otherPort, otherOnAll := other.HostPort()
	return port == otherPort && onAll != otherOnAll
}

// portChains returns the chains for published ports, which all networks share.
func portChains(mark uint32) []Chain {
	return []Chain{
		loopback(),
		answers(mark),
		publish(HostPortsChain, unix.NF_INET_PRE_ROUTING, (*rules).addPublish),
		publish(HostPortsLocalChain, unix.NF_INET_LOCAL_OUT, (*rules).addPublishLocal),
		hairpin(),
	}
}

// loopback returns the chain that protects the host's services at 127.0.0.0/8. A port published on 127.0.0.1 needs
// route_localnet on the bridge. With route_localnet the kernel treats 127.0.0.0/8 like other addresses. Pods could
// then reach programs that listen there, or programs that trust callers from there. So this chain runs first and
// always exists.
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

// answers returns the chain that sets the mark on packets from our bridges to 127.0.0.0/8. These are the pods'
// answers to programs of the host that connected to a published port from 127.0.0.1. Connection tracking restores the
// destination of an answer before the packet leaves the bridge, if bridged packets pass the firewall. Another
// program's rules may drop packets to 127.0.0.0/8 from other links. Such rules can recognize the answers by the mark
// alone.
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

// sharedSettings is the settings text in the comments of chains that all networks share and whose rules depend on no
// setting.
const sharedSettings = "shared"

// publish returns a chain that redirects callers of published ports to pods. One such chain is for packets from
// outside, and one for packets of the host itself.
func publish(name string, hook uint32, write func(*rules)) Chain {
	return Chain{
		Place: InInet(name), Kind: "nat", Hook: hook, Priority: priorityDestinationNAT,
		settings: sharedSettings, write: write,
	}
}

func (list *rules) addPublish() { list.addToHost(); list.addCallers(); list.addHostPorts() }

func (list *rules) addPublishLocal() { list.addToHost(); list.addHostPorts() }

// addToHost appends rules that end the chain for packets whose destination cannot be a host port.
func (list *rules) addToHost() {
	list.add("only what is sent to the host", func(x expressions) {
		x.loadDestinationType()
		x.Compare(expr.CmpOpNeq, binary.NativeEndian.AppendUint32(nil, unix.RTN_LOCAL))
		x.Return()
	})

	// The kernel cannot forward packets to ::1 and to link-local addresses. If such packets were redirected to a pod,
	// the caller would wait for an answer. Without a redirect, the host refuses the connection, and the caller can
	// use IPv4.
	ip6 := Families()[1]
	for _, p := range []netip.Prefix{
		netip.PrefixFrom(netip.IPv6Loopback(), 128),
		netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfe, 0x80}), 10),
	} {
		list.add("cannot be forwarded: "+p.String(), func(x expressions) {
			x.isTo(ip6, p)
			x.Return()
		})
	}
}

// addHostPorts adds the rules that change the destination of packets to host ports.
func (list *rules) addHostPorts() {
	list.addFamilies("ports on one address", func(x expressions, f Family) {
		x.is(f)
		x.Payload(expr.PayloadBaseNetworkHeader, f.dst, f.AddrLen, nftnl.First)
		x.loadHostPort(f.AddrLen)
		x.lookupData(f.HostAddrs)
		x.dnat(f)
	})

	// Publish no port at the addresses of 127.0.0.0/8 except 127.0.0.1, since programs of the host listen there. An
	// example is systemd-resolved, at 127.0.0.53.
	list.add("of 127.0.0.0/8, all addresses are 127.0.0.1 alone", func(x expressions) {
		ip4 := Families()[0]
		x.isTo(ip4, loopbackPrefix())
		x.Payload(expr.PayloadBaseNetworkHeader, ip4.dst, ip4.AddrLen, nftnl.First)
		x.Compare(expr.CmpOpNeq, []byte{127, 0, 0, 1})
		x.Return()
	})

	// If kube-proxy runs in IPVS mode, a link of the host has the addresses of all Kubernetes services. Ports on all
	// addresses must not be published there.
	list.addFamilies("addresses that are left alone", func(x expressions, f Family) {
		x.is(f)
		x.Payload(expr.PayloadBaseNetworkHeader, f.dst, f.AddrLen, nftnl.First)
		x.Lookup(f.Services)
		x.Return()
	})
	list.addFamilies("ports on all addresses", func(x expressions, f Family) {
		x.is(f)
		x.loadHostPort(0)
		x.lookupData(f.HostPorts)
		x.dnat(f)
	})
}

// hairpin returns the chain that masquerades connections whose answers would otherwise not return through the host.
// The chain does not change other connections.
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

	// The outgoing link identifies the pod's bridge, because bridged packets have no incoming link in postrouting.
	list.addFamilies("a pod calls itself", func(x expressions, f Family) {
		x.isRedirected()
		x.is(f)
		x.loadLinkAnd(expr.MetaKeyOIFNAME, expr.PayloadBaseNetworkHeader, f.src, f.AddrLen)
		x.Payload(expr.PayloadBaseNetworkHeader, f.dst, f.AddrLen, nftnl.Behind(IfnameLen+f.AddrLen))
		x.Lookup(f.Selves)
		x.masquerade()
	})

	list.addFamilies("the answer is bridged past the host", func(x expressions, f Family) {
		x.isRedirected()
		x.linkIn(expr.MetaKeyOIFNAME, bypassSet)
		x.is(f)
		x.loadLinkAnd(expr.MetaKeyOIFNAME, expr.PayloadBaseNetworkHeader, f.src, f.AddrLen)
		x.Lookup(f.pods)
		x.masquerade()
	})

	list.addLAN()
}

// addLAN appends rules that masquerade packets to machines on a LAN if any rule changed the destination. Without
// masquerading, such a machine would answer past this host, directly or through its router. The first rule leaves out
// pods' packets, because answers to pods pass the hooks on the bridge. The second rule is for bridges whose packets
// do not pass the hooks.
func (list *rules) addLAN() {
	list.addFamilies("a machine of the LAN answers past the host", func(x expressions, f Family) {
		x.isRedirected()
		x.linkIn(expr.MetaKeyOIFNAME, lansSet)
		x.is(f)
		for _, end := range [...]uint32{f.dst, f.src} {
			x.loadLinkAnd(expr.MetaKeyOIFNAME, expr.PayloadBaseNetworkHeader, end, f.AddrLen)
			x.LookupNone(f.pods)
		}
		x.masquerade()
	})

	// If answers from pods do not pass the hooks, masquerade packets to pods on the LAN too.
	list.add("a pod on the LAN answers past the host", func(x expressions) {
		x.isRedirected()
		for _, set := range []string{lansSet, bypassSet} {
			x.linkIn(expr.MetaKeyOIFNAME, set)
		}
		x.masquerade()
	})
}

// The chain portSNATChain masquerades more or fewer callers of published ports than the chain hairpin, as
// nft.Endpoint.PortSNAT selects. The firewall has this chain only if there is a network with PortSNAT.

const portSNATChain = "hostports-snat"

// portSNATSets returns two kinds of sets with ports of pods, for each family. For ports in SNATAll, all callers are
// masqueraded. For ports in SNATNone, callers keep their address if they come in by the link that leads to the pod.
func portSNATSets() []Set {
	return setsOfBoth(
		func(f Family) Set { return f.podPortSet(f.SNATAll) },
		func(f Family) Set {
			return keySet(f.SNATNone, nftnl.TypeIfname, nftnl.TypeIfname, f.addrType, nftnl.TypeProtocol,
				nftnl.TypePort)
		},
	)
}

// portSNAT returns the chain portSNATChain. It runs before the chain hairpin, which the kernel skips for connections
// that portSNATChain has translated.
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
			x.loadPodPort(f)
			x.Lookup(f.SNATAll)
			x.masquerade()
		})

		list.add("calls of these ports keep their address, by the link to the pod, "+f.name, func(x expressions) {
			x.loadRedirected(f)
			x.Lookup(f.SNATNone)
			x.Payload(expr.PayloadBaseNetworkHeader, f.src, f.AddrLen, nftnl.First)
			x.Add(&expr.NAT{Type: expr.NATTypeSourceNAT, Family: uint32(f.Proto), RegAddrMin: uint32(nftnl.First)})
		})
	}
}

// loadRedirected matches redirected connections and loads the key of SNATNone: the packet's two links and the key of
// the pod's port.
func (x expressions) loadRedirected(f Family) {
	x.isRedirected()
	x.is(f)
	x.loadBridges()
	x.Payload(expr.PayloadBaseNetworkHeader, f.dst, f.AddrLen, nftnl.Behind(2*IfnameLen))
	x.loadHostPort(2*IfnameLen + f.AddrLen)
}
