package ruleset

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
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
	portSNATChain       = "hostports-snat"
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
	s.flags = unix.NFT_SET_MAP
	s.DataType, s.DataLen = concat(f.addrType, nftnl.TypePort)
	return s
}

// podPortSet returns a set whose elements are ports of pods. The parts of its keys are link, address, protocol and
// port.
func (f *Family) podPortSet(name string) Set {
	return keySet(name, nftnl.TypeIfname, f.addrType, nftnl.TypeProtocol, nftnl.TypePort)
}

// HostPort returns the family, protocol and port that an element publishes, as one opaque string. onAll reports whether
// the port is published on all addresses. For an element that publishes no port, the string is empty.
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

// addPorts adds the chains for published ports, which all networks share.
func (rs *Ruleset) addPorts(mark uint32) {
	const before = unix.NF_INET_PRE_ROUTING

	rs.filter(InInet(loopbackChain), before, priorityRaw, sharedSettings, (*rules).addLoopback)
	rs.filter(InInet(answersChain), before, priorityDestinationNAT+1, markSettings(mark),
		func(list *rules) { list.addAnswers(mark) })

	rs.nat(HostPortsChain, before, priorityDestinationNAT, sharedSettings, (*rules).addPublish)
	rs.nat(HostPortsLocalChain, unix.NF_INET_LOCAL_OUT, priorityDestinationNAT, sharedSettings,
		(*rules).addPublishLocal)
	rs.nat(hairpinChain, unix.NF_INET_POST_ROUTING, priorityBeforeSourceNAT, sharedSettings, (*rules).addHairpin)
}

// addLoopback appends the rules that protect the host's services at 127.0.0.0/8. A port published on 127.0.0.1 needs
// route_localnet on the bridge. With route_localnet the kernel treats 127.0.0.0/8 like other addresses. Pods could
// then reach programs that listen there, or programs that trust callers from there. So this chain always exists. It
// runs before NAT, which restores 127.0.0.1 as the destination of pods' answers.
func (list *rules) addLoopback() {
	const in = expr.MetaKeyIIFNAME
	ip, local := Families()[0], loopbackPrefix()

	list.begin("others must not reach what is local to the host").isNotLoopback(in).isTo(ip, local).Drop()
	list.begin("nor pass for it").isNotLoopback(in).isFrom(ip, local).Drop()
}

// addAnswers appends a rule that sets the mark on packets from our bridges to 127.0.0.0/8. These are the pods'
// answers to programs of the host that connected to a published port from 127.0.0.1. Connection tracking restores the
// destination of an answer before the packet leaves the bridge, if bridged packets pass the firewall. Another
// program's rules may drop packets to 127.0.0.0/8 from other links. Such rules can recognize the answers by the mark
// alone.
func (list *rules) addAnswers(mark uint32) {
	list.begin("what the firewall itself leads to what is local to the host").
		linkIn(expr.MetaKeyIIFNAME, OursSet).isTo(Families()[0], loopbackPrefix()).addMark(mark)
}

func loopbackPrefix() netip.Prefix { return netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8) }

// sharedSettings is the settings text in the comments of chains whose rules depend on no setting. All networks, or all
// networks on a bridge, share such a chain.
const sharedSettings = "shared"

// addPublish appends the rules that redirect callers of published ports to pods, for packets that the host receives.
func (list *rules) addPublish() { list.addToHost(); list.addCallers(); list.addHostPorts() }

// addPublishLocal appends the rules that redirect the host's own packets to pods. It does not check the callers, since
// the host may always call.
func (list *rules) addPublishLocal() { list.addToHost(); list.addHostPorts() }

// addToHost appends rules that end the chain for packets whose destination cannot be a host port.
func (list *rules) addToHost() {
	list.begin("only what is sent to the host").loadDestinationType().
		compare(expr.CmpOpNeq, binary.NativeEndian.AppendUint32(nil, unix.RTN_LOCAL)).Return()

	// The kernel cannot forward packets to ::1 and to link-local addresses. If such packets were redirected to a pod,
	// the caller would wait for an answer. Without a redirect, the host refuses the connection, and the caller can
	// use IPv4.
	for _, p := range []netip.Prefix{
		netip.PrefixFrom(netip.IPv6Loopback(), 128),
		netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfe, 0x80}), 10),
	} {
		list.begin("cannot be forwarded: "+p.String()).isTo(Families()[1], p).Return()
	}
}

// addHostPorts adds the rules that change the destination of packets to host ports.
func (list *rules) addHostPorts() {
	list.addFamilies("ports on one address", func(x expressions, f Family) {
		x.is(f).loadAddress(f.dst, f).loadHostPort(f.AddrLen).lookupData(f.HostAddrs).dnat(f)
	})

	// In 127.0.0.0/8, publish ports on all addresses at 127.0.0.1 only, since programs of the host listen at others. An
	// example is systemd-resolved, at 127.0.0.53.
	ip4 := Families()[0]
	list.begin("of 127.0.0.0/8, all addresses are 127.0.0.1 alone").
		isTo(ip4, loopbackPrefix()).loadAddress(ip4.dst, ip4).compare(expr.CmpOpNeq, []byte{127, 0, 0, 1}).Return()

	// If kube-proxy runs in IPVS mode, a link of the host has the addresses of all Kubernetes services. Ports on all
	// addresses must not be published there.
	list.addFamilies("addresses that are left alone", func(x expressions, f Family) {
		x.is(f).loadAddress(f.dst, f).isIn(f.Services).Return()
	})

	list.addFamilies("ports on all addresses", func(x expressions, f Family) {
		x.is(f).loadHostPort(0).lookupData(f.HostPorts).dnat(f)
	})
}

// addHairpin appends rules that masquerade connections whose answers would otherwise not return through the host.
// The chain does not change other connections.
func (list *rules) addHairpin() {
	const out = expr.MetaKeyOIFNAME
	list.begin("the host calls by 127.0.0.1").
		isRedirected().isNotLoopback(out).isFrom(Families()[0], loopbackPrefix()).masquerade()

	// The outgoing link identifies the pod's bridge, because bridged packets have no incoming link in postrouting.
	list.addFamilies("a pod calls itself", func(x expressions, f Family) {
		x.isRedirected().is(f).loadLinkAddress(out, f.src, f).
			Payload(expr.PayloadBaseNetworkHeader, f.dst, f.AddrLen, nftnl.Behind(IfnameLen+f.AddrLen))
		x.isIn(f.Selves).masquerade()
	})

	list.addFamilies("the answer is bridged past the host", func(x expressions, f Family) {
		x.isRedirected().linkIn(out, bypassSet).isPod(f, out, f.src).masquerade()
	})

	list.addLAN()
}

// addLAN appends rules that masquerade packets to bridges with machines of a LAN if any rule changed the destination.
// Without masquerading, such a machine would answer past this host, directly or through its router. The first rule
// leaves out packets from and to pods, because their answers pass the hooks on the bridge. The second rule is for
// bridges whose packets do not pass the hooks.
func (list *rules) addLAN() {
	const out = expr.MetaKeyOIFNAME
	list.addFamilies("a machine of the LAN answers past the host", func(x expressions, f Family) {
		x.isRedirected().linkIn(out, lansSet).is(f)

		for _, end := range [...]uint32{f.dst, f.src} {
			x.loadLinkAddress(out, end, f).isNotIn(f.Pods)
		}

		x.masquerade()
	})

	// If answers from pods do not pass the hooks, masquerade packets to pods on the LAN too.
	list.begin("a pod on the LAN answers past the host").
		isRedirected().linkIn(out, lansSet).linkIn(out, bypassSet).masquerade()
}

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

// addPortSNAT appends the rules for ports with SNATAll or SNATNone, for which the rules of the chain hairpin masquerade
// too few or too many callers. This chain runs before the chain hairpin, which the kernel skips for packets that this
// chain has translated.
func (list *rules) addPortSNAT() {
	for _, f := range Families() {
		list.begin("calls of these ports, by all, " + f.name).
			isRedirected().is(f).loadPodPort(f).isIn(f.SNATAll).masquerade()

		// The key of SNATNone is the packet's two links and the key of the pod's port.
		x := list.begin("calls of these ports keep their address, by the link to the pod, " + f.name).
			isRedirected().is(f).loadBridges()
		x.Payload(expr.PayloadBaseNetworkHeader, f.dst, f.AddrLen, nftnl.Behind(2*IfnameLen))
		x.loadHostPort(2*IfnameLen+f.AddrLen).isIn(f.SNATNone).loadAddress(f.src, f).
			Add(&expr.NAT{Type: expr.NATTypeSourceNAT, Family: uint32(f.Proto), RegAddrMin: uint32(nftnl.First)})
	}
}

// Callers describes the calls to host ports, except calls by the host itself, that are admitted. It has a list of
// boxes for each family. The parts of a box are incoming link, source, destination, protocol and host port. A nil
// Callers admits every call.
type Callers [][]box

// ParseCallers parses lists of callers of host ports, such as "192.0.2.0/24 tcp 80-90, eth0". It returns the calls that
// every list permits. "" and "all" permit every call. Any other list consists of entries with commas between. An entry
// is a prefix, an address or the name of a link. Behind it, the word tcp, udp or sctp may follow. A host port, or two
// with '-' between, may come last.
func ParseCallers(lists ...string) (Callers, error) {
	var all Callers
	for _, text := range lists {
		if text == "" || text == "all" {
			continue
		}

		list := make(Callers, len(Families()))
		if err := parseEntries(text, list.add); err != nil {
			return nil, err
		}

		for i := range all {
			var common []box
			for _, b := range all[i] {
				for _, other := range list[i] {
					if both := b.intersect(other); both != nil {
						common = append(common, both)
					}
				}
			}
			list[i] = common
		}
		all = list
	}

	return all, nil
}

// add parses the words of one entry, and adds its boxes to c.
func (c Callers) add(words []string) error {
	flow, err := parseFlow(words[1:], 0)
	if err != nil {
		return err
	}

	prefix, err := parsePrefix(words[0])
	isLink := err != nil && words[0] != "all" && ident.IsLinkName(words[0]) && !strings.ContainsAny(words[0], "*+") &&
		strings.Trim(words[0], "0123456789.") != ""
	if err != nil && !isLink {
		return fmt.Errorf("%w, and cannot name a link", err)
	}

	for i, f := range Families() {
		at, source := anyLink(), addresses(f.All)
		switch {
		case isLink:
			at = single(linkValue(words[0]))
		case i != familyIndex(prefix.Addr()):
			continue
		default:
			source = addresses(prefix)
		}
		c[i] = append(c[i], append(box{at, source, addresses(f.All)}, flow...))
	}

	return nil
}

// anyLink returns the interval of all names of links.
func anyLink() interval {
	last := [IfnameLen]byte{}
	for i := range last {
		last[i] = 0xff
	}
	return interval{netip.IPv6Unspecified(), netip.AddrFrom16(last)}
}

// HostPorts are ports of the host: addresses of the host, a protocol, and ports.
type HostPorts = box

// HostPortsAt returns the ports from first to last at an address of the host, or at all addresses if the parameter at
// is not valid. first and last are included.
func (f Family) HostPortsAt(at netip.Addr, protocol uint8, first, last uint16) HostPorts {
	hosts := addresses(f.All)
	if at.IsValid() {
		hosts = single(at)
	}
	return box{hosts, numbers(uint32(protocol), uint32(protocol)), numbers(uint32(first), uint32(last))}
}

// Elements returns the elements that close host ports of a family to callers that c does not contain. They are in two
// sets: one of refused sources, and one of links through which a refused source may call nevertheless. A single set
// would need intervals of names, which nft could not read.
func (c Callers) Elements(f Family, ports []HostPorts) (list []Element) {
	if c == nil {
		return nil
	}

	refused, excepted := f.refusedSet(), f.exceptedSet()
	for _, target := range disjoint(ports) {
		target = append(box{anyLink(), addresses(f.All)}, target...)
		rest, except := []box{target[1:]}, []box(nil)
		for _, b := range c[familyIndex(f.All.Addr())] {
			if b[0] == anyLink() {
				rest = subtract(rest, b[1:])
			} else if b = b.intersect(target); b != nil {
				except = append(except, b)
			}
		}

		for _, b := range rest {
			list = append(list, refused.boxElement(b))
		}
		for _, b := range disjoint(except) {
			list = append(list, excepted.boxElement(b))
		}
	}

	return list
}

// refusedSet returns the set that closes host ports to sources. Its key is source, destination, protocol and port.
func (f Family) refusedSet() Set {
	return intervalSet(f.refused, f.addrType, f.addrType, nftnl.TypeProtocol, nftnl.TypePort)
}

// exceptedSet returns the set of exceptions from refusedSet. Its key is the incoming link and the key of refusedSet.
func (f Family) exceptedSet() Set {
	return intervalSet(f.excepted, nftnl.TypeIfname, f.addrType, f.addrType, nftnl.TypeProtocol, nftnl.TypePort)
}

// addCallers appends rules that end the chain if the host port is closed to the packet's sender. The packet then goes
// to the host itself.
func (list *rules) addCallers() {
	list.addFamilies("ports that are closed to the caller", func(x expressions, f Family) {
		const ip = expr.PayloadBaseNetworkHeader
		flow := func(length uint32) expressions {
			x.Payload(ip, f.src, f.AddrLen, nftnl.Behind(length))
			x.Payload(ip, f.dst, f.AddrLen, nftnl.Behind(length+f.AddrLen))

			return x.loadHostPort(length + 2*f.AddrLen)
		}

		x.is(f)
		flow(0).isIn(f.refused).loadMeta(expr.MetaKeyIIFNAME)
		flow(IfnameLen).isNotIn(f.excepted).Return()
	})
}
