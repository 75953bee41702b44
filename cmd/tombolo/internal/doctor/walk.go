package doctor

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/bridge/share"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/icmp"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// wait is the time to wait for one answer. A later answer counts as lost.
const wait = time.Second

// way holds the links that a pod's packets pass, and sockets in the pod's and the host's network namespace.
type way struct {
	pod, host          *netns.NS
	socket, hostSocket *nl.Conn // in the pod's and in the host's namespace; used by inPod and onHost
	inPod, onHost      *route.Conn
	links              *bridge.Conn
	index, mtu         int // the pod's interface: its index and MTU
	port, bridge       *bridge.Link
	link               *bridge.Link // the bridge, or the host's link in the network's VLAN
	own                netip.Addr   // the pod's address that probes are sent from

	// between holds the indexes of other links between the pod and the NICs: the link that limits packets from the pod,
	// and both ends of the veth between the bridge and a shared NIC.
	between []int
}

// walk tests the steps on the path of the pod's packets, and adds findings. It does nothing if the pod is dead or its
// ADD is not done. It ends early if a link or an address of the pod is wrong.
func (e *examination) walk(ctx context.Context) error {
	if e.dead || !e.at.Ready {
		return nil
	}

	var err error
	if e.pod, err = netns.Open(e.at.Path); err != nil {
		e.add(StepNamespace, recreate, "%v", err)
		return nil
	}
	defer e.pod.Close()
	if e.host, err = netns.Current(); err != nil {
		return err
	}
	defer e.host.Close()
	if e.socket, err = nl.Dial(unix.NETLINK_ROUTE, e.pod); err != nil {
		return err
	}
	defer e.socket.Close()
	if e.links, err = bridge.Dial(nil); err != nil {
		return err
	}
	defer e.links.Close()
	e.inPod, e.onHost, e.hostSocket = route.On(e.socket), e.links.Routes(), nl.Of(e.links.Socket())
	if e.failed(StepLink) {
		return nil
	}

	if err := e.lookAtLinks(ctx); err != nil || e.failed(StepLink) {
		return err
	}

	steps := []func(context.Context){e.addresses, e.duplicates, e.families, e.names, e.targets}
	for i := 0; e.err == nil && i < len(steps) && (i == 0 || !e.failed(StepAddress)); i++ {
		steps[i](ctx)
	}

	return ctx.Err()
}

// lookAtLinks stores the host's links and the pod's interface in e.way. It adds a finding if one of them is missing,
// if the interface is down, or if the port does not forward.
func (e *examination) lookAtLinks(ctx context.Context) error {
	for _, find := range []struct {
		link **bridge.Link
		name string
	}{{&e.port, e.at.Port}, {&e.bridge, e.at.Bridge}, {&e.link, e.at.HostVLAN}} {
		l, err := e.links.Link(ctx, cmp.Or(find.name, e.at.Bridge))
		if errors.Is(err, fs.ErrNotExist) && find.name == e.at.HostVLAN {
			l, err = e.bridge, nil // the network has no gateways
		}
		if errors.Is(err, fs.ErrNotExist) {
			e.add(StepLink, recreate, "%v", err)
			return nil
		}
		if err != nil {
			return err
		}
		*find.link = l
	}

	outer, port := share.Pair(e.at.Bridge)
	for _, name := range []string{outer, port, bandwidth.IFBName(e.at.Port)} {
		if l, err := e.links.Link(ctx, name); err == nil {
			e.between = append(e.between, l.Index)
		}
	}

	e.index = e.port.Peer
	peer, err := bridge.On(e.socket, nil).LinkByIndex(ctx, e.index)
	if err == nil {
		e.mtu = peer.MTU
	}

	switch {
	case errors.Is(err, fs.ErrNotExist):
		e.add(StepLink, recreate, "the other end of the port %s is not in the pod's network namespace %s", e.port.Name,
			e.at.Path)
	case err != nil:
		return err
	case !peer.Up:
		e.add(StepLink, e.inside("ip link set "+peer.Name+" up"), "the pod's interface %s is down", peer.Name)
	case e.port.Port != nil && !e.port.Forwarding:
		remedy := "bridge link set dev " + e.port.Name + " state 3"
		if b := e.bridge.Bridge; b != nil && b.PortDelay > 0 {
			evidence, command := split(endpoint.SlowPorts(e.bridge.Name, b.PortDelay), "")
			e.add(StepLink, command+"; "+remedy, "port %s does not forward yet: %s", e.port.Name, evidence)
		} else {
			e.add(StepLink, remedy, "port %s does not forward, though both of its ends are up", e.port.Name)
		}
	}

	return nil
}

// addresses adds a finding for each address of the pod that another node has too, according to duplicate address
// detection.
func (e *examination) addresses(ctx context.Context) {
	e.try("the port, the pod's interface and its addresses")
	have, err := addr.On(e.socket).List(ctx, addr.Filter{})
	e.fail(err)
	for _, a := range have {
		isOwn := slices.ContainsFunc(e.at.Addresses, func(own ipam.Address) bool { return own.Prefix == a.Prefix })
		if isOwn && a.Flags&unix.IFA_F_DADFAILED != 0 {
			e.add(StepDuplicate, "give one of the two another address",
				"another node has %s: duplicate address detection failed", a.Prefix.Addr())
		}
	}
}

// families follows each address of the pod to its gateway and beyond.
func (e *examination) families(ctx context.Context) {
	for _, a := range e.at.Addresses {
		e.own = a.Prefix.Addr()
		e.family(ctx, a.Gateway)
	}
}

// family follows packets from the pod's address e.own to its gateways and beyond. It tests the gateways of the pod's
// routes. The parameter gateway is the recorded gateway of the address. An IPAM names a gateway for every subnet. So
// family tests the recorded gateway, and the path beyond it, only if the host has its address, or if a route of the pod
// leads there.
func (e *examination) family(ctx context.Context, gateway netip.Addr) {
	routes, err := e.inPod.List(ctx, route.Filter{Family: nl.FamilyOf(e.own), Link: e.index})
	e.fail(err)
	isUsed := gateway.IsValid() && e.isOwn(ctx, gateway)
	for _, r := range routes {
		isUsed = isUsed || gateway.IsValid() && (r.Gateway == gateway ||
			slices.ContainsFunc(r.Nexthops, func(h route.Nexthop) bool { return h.Gateway == gateway }))
		if r.Gateway.IsValid() && r.Gateway != gateway && r.Gateway.Is4() == e.own.Is4() {
			name := fmt.Sprintf("the gateway %s of the pod's route to %s", r.Gateway, r.Dst)
			e.gateway(ctx, r.Gateway, name)
		}
	}

	if !isUsed {
		return
	}

	e.usesGateway = true
	if e.gateway(ctx, gateway, "the gateway "+gateway.String()) && e.err == nil {
		e.kept(ctx)
		e.beyond(ctx)
	}
}

// gateway reports whether the pod reaches a gateway. It pings the gateway, but a resolved MAC suffices, since the
// gateway's firewall may drop pings. If the gateway is an address of the host and does not answer, gateway compares the
// MAC in the pod's neighbour entry with the bridge's. It adds a finding for a problem, unless an earlier step explains
// it.
func (e *examination) gateway(ctx context.Context, gateway netip.Addr, name string) bool {
	pingErr := icmp.Ping(ctx, e.pod, gateway, icmp.Echo{From: e.own, Wait: wait})
	if e.failed(StepForwarding, StepRoute) && pingErr != nil {
		return false // the obstacle is known
	}

	if r, err := e.inPod.Get(ctx, gateway); err != nil || r.Link != e.index {
		look := e.inside("sh -c 'ip route get " + gateway.String() + "; ip rule'")
		e.add(StepRoute, "delete in the pod the route or rule that leads elsewhere: "+look,
			"the pod has no route to its gateway %s by %s", gateway, e.at.IfName)
		return false
	}

	if pingErr != nil && !isResolved(e.socket, e.index, gateway) {
		f := e.unresolved(ctx, gateway, name)
		if f != nil {
			e.findings = append(e.findings, *f)
		}
		return f == nil
	}

	// Compare the MAC in the pod's neighbour entry with the bridge's MAC. The host's link in a VLAN has that MAC too.
	next, _ := routing.Find(e.socket, e.index, gateway)
	if pingErr != nil && e.isOwn(ctx, gateway) && !bytes.Equal(e.bridge.MAC, next.MAC) {
		e.add(StepGateway, "delete the entry in the pod (ip neigh); if it comes back, a pod forges it: set guard for "+
			"the network",
			"the gateway %s does not answer: the pod's entry for it has the MAC %s, not %s", gateway, next.MAC,
			e.bridge.MAC)
		return false
	}

	protocol := protocolOf(gateway)
	if next.State == routing.Permanent {
		protocol = "the pod's permanent neighbour entry"
	}

	e.try("%s by %s", name, protocol)
	return true
}

// beyond follows the path to destinations outside, as far as the host's next hop, and adds findings. If the next hop
// answers, it also tests long packets.
func (e *examination) beyond(ctx context.Context) {
	far := routing.Outside(e.own)
	hop, err := e.onHost.Get(ctx, far)
	if err != nil {
		e.noDefault(ctx, far, err)
		return
	}

	if r, err := e.inPod.Get(ctx, far); err != nil {
		e.add(StepRoute, e.setRoute(err), "the pod has no default route: %v", err)
		return
	} else if r.Link != e.index {
		e.try("not beyond the gateway: the pod's default route is by another interface")
		return
	}

	if !hop.Gateway.IsValid() || hop.Link == e.bridge.Index || e.failed(StepForwarding, StepFirewall) {
		return // there is no next hop, it is on the pod's bridge, or the obstacle is known
	}

	name := "the host's next hop " + hop.Gateway.String()
	lost, answered := e.echo(ctx, hop.Gateway, name)
	if lost != nil {
		e.try("%s, which answers no echo request of host or pod: what the pod sends leaves the host", name)
	}

	if answered {
		e.long(ctx, hop.Gateway)
	}
}

// noDefault adds a finding that the host has no default route, unless an earlier finding concerns forwarding. For IPv6
// the finding is a note if the host does not seem to use IPv6.
func (e *examination) noDefault(ctx context.Context, far netip.Addr, cause error) {
	missing := map[bool]string{true: "default route of IPv4", false: "default route of IPv6"}[far.Is4()]
	f := finding(StepForwarding, "give the host a default route: ip route add default via ROUTER",
		"the host itself has no %s (%s): %v", missing, far, cause)
	have, err := e.links.Addresses().List(ctx, addr.Filter{})
	e.fail(err)
	f.Note = far.Is6() && !slices.ContainsFunc(have, func(a addr.Address) bool {
		return a.Prefix.Addr().Is6() && a.Link != e.link.Index && a.Prefix.Addr().IsGlobalUnicast()
	})
	for _, text := range e.others {
		if far.Is6() && strings.Contains(text, "ignores router advertisements") {
			f.Note = false
			f.Evidence, f.Remedy = split(text, "")
		}
	}

	if !e.failed(StepForwarding) {
		e.findings = append(e.findings, *f)
	}
}

// echo sends echo requests from the pod to an address. If exchange returns no Finding and records no error, answered is
// true. If exchange returns a Finding, echo adds one if this host is the cause, or if the host itself gets an answer.
// Otherwise it returns the Finding as lost, which tells how far the requests came.
func (e *examination) echo(ctx context.Context, to netip.Addr, name string) (lost *Finding, answered bool) {
	id := uint16(rand.Uint32())
	f := e.exchange(ctx, name+" by echo requests", to, echoProbe(to.Is4(), id), func() error {
		return icmp.Ping(ctx, e.pod, to, icmp.Echo{From: e.own, Wait: wait, ID: id})
	})
	switch {
	case f == nil:
		return nil, e.err == nil
	case f.Remedy != "":
		e.addLoss(f, name)
	case icmp.Ping(ctx, e.host, to, icmp.Echo{Wait: wait}) == nil:
		remedy := "see there, or on its node, whether a route leads back to the pod, and whether a firewall drops " +
			"what is " +
			"forwarded: ip route get " + e.own.String()
		if e.opt.Uplinks[e.at.Network] != "" {
			remedy = fmt.Sprintf(
				"see there, and on the LAN's router, whether a firewall or a list of known machines stops %s (%s)",
				e.own, e.at.MAC)
		}
		e.add(StepBeyond, remedy, "the host reaches %s, and the pod %s does not: %s", to, e.own, f.Evidence)
	default:
		return f, false
	}

	return nil, false
}

// isOwn reports whether the host itself has an address.
func (e *examination) isOwn(ctx context.Context, a netip.Addr) bool {
	r, err := e.onHost.Get(ctx, a)
	return err == nil && r.Type == unix.RTN_LOCAL
}

// long sends an echo request as long as the pod's MTU to the host's next hop. It adds a finding if the request is
// too long, or if neither the pod nor the host gets an answer. It uses the MTU of the pod's interface, which a lease
// or the plugin tuning may have reduced below the recorded MTU.
func (e *examination) long(ctx context.Context, hop netip.Addr) {
	headers := map[bool]int{true: 20 + 8, false: 40 + 8}[hop.Is4()] // of IP and ICMP
	echo := icmp.Echo{From: e.own, Size: e.mtu - headers, DontFragment: true, Wait: wait}
	err := icmp.Ping(ctx, e.pod, hop, echo)
	if err == nil || e.failed(StepMTU) {
		return
	}

	echo.From = netip.Addr{}
	if errors.Is(err, unix.EMSGSIZE) || icmp.Ping(ctx, e.host, hop, echo) != nil {
		e.add(StepMTU, "set mtu of the network to what the path takes, and create its pods again",
			"packets of %d bytes, the pod's MTU, do not get to %s, and short ones do: %v", e.mtu, hop, err)
	}
}

// names sends a DNS query from the pod to each name server that the pod reaches through the examined interface. It
// adds a finding for each server that does not answer. An error answer is an answer too. names does nothing if a
// step from the route to beyond the host has shown that packets get lost.
func (e *examination) names(ctx context.Context) {
	if e.failed(StepGateway, StepRoute, StepForwarding, StepFirewall, StepBeyond) {
		return
	}

	for _, server := range e.opt.DNS {
		if r, err := e.inPod.Get(ctx, server); err != nil || !e.sendsTo(server) || r.Link != e.index {
			if e.usesGateway {
				e.try("not the name server %s, since the pod has no route there by %s", server, e.at.IfName)
			}
			continue
		}

		if f := e.ask(ctx, server); f != nil {
			remedy := "see whether the server serves the pod's subnet, and whether a firewall drops UDP 53"
			if !e.opt.IsDNSNamed && strings.Contains(e.at.Pod, "/") {
				remedy = "ask the cluster's DNS, since this is the node's name server: --dns ADDR; else " + remedy
			}
			e.add(StepDNS, cmp.Or(f.Remedy, remedy),
				"the name server %s does not answer the pod: %s", server, f.Evidence)
		}
	}
}

// ask sends a query to a name server, twice if necessary. It returns nil for any answer, even an error. If none comes,
// it returns a finding that tells where the query or the answer was lost.
func (e *examination) ask(ctx context.Context, server netip.Addr) *Finding {
	var conn *net.UDPConn
	err := e.pod.Do(func() (err error) {
		conn, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(server, 53)))
		return err
	})
	if err != nil {
		return finding(StepDNS, "see in the pod: "+e.inside("ip route get "+server.String()), "%v", err)
	}
	defer conn.Close()

	// The query asks for the name servers of the root (RFC 1035, section 4.1).
	query := []byte{0x74, 0x6f, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1}
	port := conn.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	p := flowProbe(server.Is4(), unix.IPPROTO_UDP, port)
	tried := "the name server " + server.String()
	if !e.opt.IsDNSNamed && strings.Contains(e.at.Pod, "/") {
		tried += " (the node's; a cluster's by --dns ADDR)"
	}
	return e.exchange(ctx, tried, server, p, func() error {
		for range 2 {
			if _, err = conn.Write(query); err != nil {
				break
			}
			_ = conn.SetReadDeadline(time.Now().Add(wait))
			if _, err = conn.Read(make([]byte, 512)); err == nil {
				break
			}
		}

		return err
	})
}
