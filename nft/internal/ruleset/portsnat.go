package ruleset

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// What changes the sources of more callers of published ports than the chain hairpin does, or of fewer. Only
// networks that ask for it have it made, so that the others need not look for it.

const (
	snatAll4Set  = "snatall4"
	snatAll6Set  = "snatall6"
	snatNone4Set = "snatnone4"
	snatNone6Set = "snatnone6"

	portSNATChain = "hostports-snat"
)

// portSNATSets have pods' ports: those whose callers all lose their address, and those whose callers never
// do that come in by the link that leads to the pod.
func portSNATSets() []Set {
	const (
		port  = nftnl.TypeProtocol<<nftnl.TypeBits | nftnl.TypePort
		port4 = nftnl.TypeIfname<<(3*nftnl.TypeBits) | nftnl.TypeIPv4<<(2*nftnl.TypeBits) | port
		port6 = nftnl.TypeIfname<<(3*nftnl.TypeBits) | nftnl.TypeIPv6<<(2*nftnl.TypeBits) | port
		link  = nftnl.TypeIfname << (4 * nftnl.TypeBits)
	)
	return []Set{
		{Place: InInet(snatAll4Set), KeyType: port4, KeyLen: pods4Len + 2*Slot},
		{Place: InInet(snatAll6Set), KeyType: port6, KeyLen: pods6Len + 2*Slot},
		{Place: InInet(snatNone4Set), KeyType: link | port4, KeyLen: IfnameLen + pods4Len + 2*Slot},
		{Place: InInet(snatNone6Set), KeyType: link | port6, KeyLen: IfnameLen + pods6Len + 2*Slot},
	}
}

// portSNAT comes before the chain hairpin: what it translates, that one does not.
func portSNAT() Chain {
	return Chain{
		Place: InInet(portSNATChain), Kind: "nat", Hook: unix.NF_INET_POST_ROUTING, Priority: priorityBeforeSourceNAT - 1,
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

// byLink loads the key of a pod's port and the links of the packet, of a connection that was led there.
func (x expressions) byLink(f Family) {
	x.isRedirected()
	x.is(f)
	x.bridged()
	x.Payload(expr.PayloadBaseNetworkHeader, f.dst, f.AddrLen, nftnl.Behind(2*IfnameLen))
	x.hostPort(2*IfnameLen + f.AddrLen)
}
