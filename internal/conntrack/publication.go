package conntrack

import "net/netip"

// Publication is a port of the host that leads to a pod: one protocol and one family,
// which is that of the pod's address.
type Publication struct {
	// Proto is unix.IPPROTO_UDP, _TCP or _SCTP.
	Proto uint8
	// Host is the address and port that clients send to. An address that is invalid
	// or unspecified is any of the host's.
	Host netip.AddrPort
	// Pod is the pod's address and the port in the pod.
	Pod netip.AddrPort
}

// Stale gives the flows that a pod which has just been published would miss: those to
// the host's port that lead somewhere else than to it. That is the host itself, where
// they began before the port was published, or whichever pod had it before.
//
// With any address of the host, local has to say which addresses are the host's
// (route type local, as the rules see it): a flow to the same port of a machine
// elsewhere, which the host forwards, is none of ours. With nil it would be no
// condition, so no flow matches then. It is not asked where Host has an address.
//
// It leaves alone what the host itself began from that port: it may be a client's
// socket, whose answers come back to it whatever is published.
func (p Publication) Stale(local func(netip.Addr) bool) Filter {
	f := Filter{Family: familyOf(p.Pod.Addr()), Proto: p.Proto, Orig: p.orig()}
	f.Where = func(flow Flow) bool {
		if flow.Reply.Src == p.Pod {
			return false
		}
		return f.Orig.Dst.IsValid() || local != nil && local(flow.Orig.Dst.Addr())
	}
	return f
}

// Flows gives the flows that lead through the host's port to the pod: those that go
// when it does. It needs to know no local addresses, since nothing but the
// publication leads there.
func (p Publication) Flows() Filter {
	return Filter{
		Family: familyOf(p.Pod.Addr()),
		Proto:  p.Proto,
		Orig:   p.orig(),
		Reply:  Match{Src: p.Pod.Addr(), SrcPort: p.Pod.Port()},
	}
}

func (p Publication) orig() Match {
	m := Match{DstPort: p.Host.Port()}
	if a := p.Host.Addr(); a.IsValid() && !a.IsUnspecified() {
		m.Dst = a
	}
	return m
}

// Of gives the flows that an address takes part in: those that it began, whatever
// they were masqueraded to, and those that lead to it. It is for an address whose pod
// is gone, before another pod gets it: the kernel would go on translating for the
// new one as it did for the old.
func Of(a netip.Addr) []Filter {
	return []Filter{{Orig: Match{Src: a}}, {Reply: Match{Src: a}}}
}
