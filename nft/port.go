package nft

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Port describes a port of a pod, or a range of ports, to publish on the host.
type Port struct {
	// Protocol is TCP, UDP or SCTP. The zero value is invalid.
	Protocol Protocol `json:"protocol"`
	// HostAddr is the host's address that the port is published on. 0.0.0.0 and :: mean all addresses of their
	// family, and the zero Addr means all addresses of both families. In 127.0.0.0/8, "all" includes only 127.0.0.1,
	// since programs use other addresses there for themselves. At 127.0.0.1, only the host can reach the port, and
	// the bridge needs route_localnet. The kernel has no such setting for ::1 and IPv6 link-local addresses, so Check
	// refuses them.
	HostAddr netip.Addr `json:"hostIP,omitzero"`
	// HostPort is the port that callers use on the host. PodPort is the port that the pod listens on.
	HostPort uint16 `json:"hostPort"`
	PodPort  uint16 `json:"podPort"`
	// Count is the number of consecutive ports. HostPort+i leads to PodPort+i. 0 means 1.
	Count uint16 `json:"count,omitempty"`
}

// Protocol is the IANA number of a transport protocol.
type Protocol uint8

// The protocols that a Port can have.
const (
	TCP  Protocol = unix.IPPROTO_TCP
	UDP  Protocol = unix.IPPROTO_UDP
	SCTP Protocol = unix.IPPROTO_SCTP
)

// String returns the protocol's name, such as "tcp".
func (p Protocol) String() string { return ruleset.ProtocolName(uint8(p)) }

// MarshalText returns the name from String.
func (p Protocol) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText parses "tcp", "udp" or "sctp". For any other text, the error matches tombolo.ErrInvalid.
func (p *Protocol) UnmarshalText(text []byte) error {
	return unmarshal(p, text, TCP, UDP, SCTP)
}

// unmarshal sets *to to the element of values whose String is name. If there is none, or if to is nil, the error
// matches tombolo.ErrInvalid.
func unmarshal[T fmt.Stringer](to *T, name []byte, values ...T) error {
	for _, v := range values {
		if to != nil && v.String() == string(name) {
			*to = v
			return nil
		}
	}
	return invalid("%q: want one of %v", name, values)
}

// SNAT selects the callers of published ports that are masqueraded. The source address of their packets is changed to
// the host's address on the link to the pod.
type SNAT string

const (
	// SNATNeeded selects only callers that would otherwise get no answer: the host if it calls by 127.0.0.1, and the
	// pod itself. If bridged packets do not pass the firewall's hooks, it also selects other pods on the same bridge.
	// For a pod on a LAN (Network.LAN or a NIC) without Network.NFCall, it selects all callers. SNATNeeded is the
	// default.
	SNATNeeded SNAT = ""
	// SNATAll selects all callers. The network must have Network.PortSNAT set.
	SNATAll SNAT = "all"
	// SNATNone selects only the host if it calls by 127.0.0.1. For a pod on a LAN without Network.NFCall, it also
	// selects callers that come in by another link than the pod. Another pod behind the same link then gets an answer
	// only if the answer passes the firewall. A pod that calls itself gets no answer. The network must have
	// Network.PortSNAT set.
	SNATNone SNAT = "none"

	snatAny SNAT = "any" // stands for SNATAll and SNATNone, to list the elements of both
)

// String returns the host's side of the port, such as 8080/tcp, 192.0.2.1:8080/udp or [2001:db8::1]:8080-8090/sctp.
func (p Port) String() string {
	text := strconv.Itoa(int(p.HostPort))
	if p.HostAddr.IsValid() {
		text = netip.AddrPortFrom(p.HostAddr, p.HostPort).String()
	}
	if p.Count > 1 {
		text += fmt.Sprintf("-%d", int(p.HostPort)+int(p.Count)-1)
	}
	return text + "/" + p.Protocol.String()
}

// Check returns an error that matches tombolo.ErrInvalid if the port cannot be published.
func (p Port) Check() error {
	switch {
	case p.Protocol != TCP && p.Protocol != UDP && p.Protocol != SCTP:
		return invalid("port %s: protocol %d, want TCP, UDP or SCTP", p, p.Protocol)
	case p.HostPort == 0 || p.PodPort == 0:
		return invalid("port %s: port 0, of the host or of the pod (%d)", p, p.PodPort)
	case int(max(p.HostPort, p.PodPort))+int(p.Count) > 1<<16:
		return invalid("port %s: %d ports from %d on, of the host or of the pod, end beyond 65535", p, p.Count,
			max(p.HostPort, p.PodPort))
	}

	switch a := p.HostAddr; {
	case a.Zone() != "" || a.Is4In6() || a.IsMulticast() || a.Is6() && a.IsLinkLocalUnicast():
		return invalid("port %s: no address that a port can be published on", p)
	case a.Is6() && a.IsLoopback():
		return invalid("port %s: the kernel forwards nothing that is sent to ::1; use 127.0.0.1", p)
	}

	return nil
}

// singles returns the endpoint's ports that lead to its address pod, as single ports without duplicates. In the result,
// ports on all addresses have no HostAddr. It returns an error if one host port would lead to two different ports of
// the pod.
func (ep *Endpoint) singles(pod netip.Addr) ([]Port, error) {
	var all, list []Port
	for _, p := range ep.Ports {
		for i := range max(p.Count, 1) {
			if one := (Port{p.Protocol, p.hostAddr(), p.HostPort + i, p.PodPort + i, 0}); p.isFor(pod) {
				all = append(all, one)
			}
		}
	}

	// Ports on all addresses come first, since they include the same ports on single addresses.
	slices.SortStableFunc(all, func(a, b Port) int { return a.HostAddr.Compare(b.HostAddr) })
	podPorts := make(map[Port]uint16, len(all)) // the PodPort of each key is 0
	for _, p := range all {
		key := Port{p.Protocol, p.HostAddr, p.HostPort, 0, 0}
		switch by := cmp.Or(podPorts[Port{Protocol: p.Protocol, HostPort: p.HostPort}], podPorts[key]); by {
		case 0:
			podPorts[key], list = p.PodPort, append(list, p)
		case p.PodPort:
		default:
			return nil, invalid("port %s is to lead both to %s and to %s", p, netip.AddrPortFrom(pod, by),
				netip.AddrPortFrom(pod, p.PodPort))
		}
	}

	return list, nil
}

// isFor reports whether the port can lead to an address of a pod. A port with a HostAddr of the other family cannot.
func (p Port) isFor(pod netip.Addr) bool {
	return !p.HostAddr.IsValid() || p.HostAddr.Is4() == pod.Is4()
}

// hostAddr returns HostAddr, or the zero Addr if it means all addresses of a family.
func (p Port) hostAddr() netip.Addr {
	if p.HostAddr.IsUnspecified() {
		return netip.Addr{}
	}
	return p.HostAddr
}

// firstAddrs returns the addresses that published ports lead to: the first one of each family.
func (ep *Endpoint) firstAddrs() []netip.Addr {
	var list []netip.Addr
	for _, a := range ep.Addrs {
		if !slices.ContainsFunc(list, func(other netip.Addr) bool { return other.Is4() == a.Is4() }) {
			list = append(list, a)
		}
	}
	return list
}

func (ep *Endpoint) checkPorts() error {
	for _, p := range ep.Ports {
		if err := p.Check(); err != nil {
			return err
		}
	}

	switch {
	case len(ep.Ports) > 0 && len(ep.Addrs) == 0:
		return invalid("endpoint %s: it has ports to publish, and no address", ep.Owner)
	case !slices.Contains([]SNAT{SNATNeeded, SNATAll, SNATNone}, ep.PortSNAT):
		return invalid("endpoint %s: PortSNAT is %q", ep.Owner, string(ep.PortSNAT))
	}

	for _, pod := range ep.firstAddrs() {
		if _, err := ep.singles(pod); err != nil {
			return err
		}
	}
	return nil
}

// portElements returns the endpoint's elements in the sets and maps for published ports.
func (ep *Endpoint) portElements() (list []ruleset.Element) {
	callers, _ := ruleset.ParseCallers(ep.PublishFrom...) // check reports this error
	for _, pod := range ep.firstAddrs() {
		ports, err := ep.singles(pod)
		if err != nil || len(ports) == 0 {
			continue // check reports this error
		}

		f, link := ruleset.FamilyOf(pod), nftnl.LinkKey(ep.link(), nil, 0)
		list = slices.Grow(list, 3*len(ports))
		done := make(map[Port]bool, len(ports))
		for _, p := range ports {
			list = append(list, p.element(f, pod))
			if at := (Port{Protocol: p.Protocol, PodPort: p.PodPort}); !done[at] {
				done[at] = true
				list = ep.appendPodPort(list, f, link, pod, at)
			}
		}

		if ep.PortSNAT != SNATNone {
			for _, caller := range append([]netip.Addr{pod}, ep.Callers...) {
				if caller.Is4() == f.Is4() {
					list = append(list, ruleset.Element{Set: ruleset.InInet(f.Selves),
						Key: ruleset.Key(link, caller.AsSlice(), pod.AsSlice())})
				}
			}
		}

		var targets []ruleset.HostPorts
		for _, p := range ep.Ports {
			if p.isFor(pod) {
				last := p.HostPort + max(p.Count, 1) - 1
				targets = append(targets, f.HostPortsAt(p.hostAddr(), uint8(p.Protocol), p.HostPort, last))
			}
		}
		list = append(list, callers.Elements(f, targets)...)
	}

	return list
}

// appendPodPort appends the elements for a port of the pod, to which any number of host ports lead.
func (ep *Endpoint) appendPodPort(list []ruleset.Element, f ruleset.Family, link []byte, pod netip.Addr,
	p Port) []ruleset.Element {
	key := ruleset.Key(link, pod.AsSlice(), []byte{byte(p.Protocol)}, ruleset.Number16(p.PodPort))
	if !ep.Unadmitted {
		list = append(list, ruleset.Element{Set: ruleset.InInet(f.Published), Key: key})
	}
	if ep.PortSNAT == SNATAll || ep.PortSNAT == snatAny {
		list = append(list, ruleset.Element{Set: ruleset.InInet(f.SNATAll), Key: key})
	}
	if ep.PortSNAT == SNATNone || ep.PortSNAT == snatAny {
		list = append(list, ruleset.Element{Set: ruleset.InInet(f.SNATNone), Key: ruleset.Key(link, key)})
	}
	return list
}

// CheckCallers returns an error that matches tombolo.ErrInvalid if lists cannot be the value of Endpoint.PublishFrom.
func CheckCallers(lists ...string) error {
	if _, err := ruleset.ParseCallers(lists...); err != nil {
		return invalid("callers of host ports: %w", err)
	}
	return nil
}

// element returns the map element that leads from the host's port to the pod's.
func (p Port) element(f ruleset.Family, pod netip.Addr) ruleset.Element {
	el := ruleset.Element{
		Set:  ruleset.InInet(f.HostPorts),
		Key:  ruleset.Key([]byte{byte(p.Protocol)}, ruleset.Number16(p.HostPort)),
		Data: ruleset.Key(pod.AsSlice(), ruleset.Number16(p.PodPort)),
	}
	if p.HostAddr.IsValid() {
		el.Set, el.Key = ruleset.InInet(f.HostAddrs), ruleset.Key(p.HostAddr.AsSlice(), el.Key)
	}
	return el
}
