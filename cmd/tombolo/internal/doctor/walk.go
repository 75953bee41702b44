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
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/icmp"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// wait is how long one answer may take. One that does not come in time on a link, or from the next hop, is lost.
const wait = time.Second

// way is what a pod's packets pass.
type way struct {
	pod, host     *netns.NS
	socket        *nl.Conn // of the pod's namespace, as inPod
	inPod, onHost *route.Conn
	links         *bridge.Conn
	hostSocket    *nl.Conn
	index, shaper int // of the pod's interface, and of the link that limits what the pod sends; 0 if there is none
	port, bridge  *bridge.Link
	link          *bridge.Link // the bridge, or the host's link in the network's VLAN
	own           netip.Addr   // the pod's address that probes are sent from
}

// walk goes the pod's way, as far as it is not known to be cut.
func (e *examination) walk(ctx context.Context) error {
	if e.dead || !e.at.Ready {
		return nil
	}
	var err error
	if e.pod, err = netns.Open(e.at.Path); err != nil {
		e.add(StepNamespace, "delete the pod and create it again", "%v", err)
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
	if e.port, err = e.links.Link(ctx, e.at.Port); errors.Is(err, fs.ErrNotExist) {
		return nil // it is among the differences
	}
	if err != nil || e.failed(StepLink) {
		return err
	}
	if e.bridge, err = e.links.Link(ctx, e.at.Bridge); err != nil {
		return err
	}
	if e.link, err = e.links.Link(ctx, cmp.Or(e.at.HostVLAN, e.at.Bridge)); err != nil {
		return err
	}
	if l, err := e.links.Link(ctx, "ifb"+strings.TrimPrefix(e.at.Port, "veth")); err == nil {
		e.shaper = l.Index
	}
	if err := e.lookAtLink(ctx); err != nil || e.failed(StepLink) {
		return err
	}
	if err := e.addresses(ctx); err != nil || e.failed(StepAddress) {
		return err
	}
	e.try("the port, the pod's interface and its addresses")
	if err := e.duplicates(ctx); err != nil {
		return err
	}
	for _, a := range e.at.Addresses {
		if err := e.family(ctx, a.Prefix.Addr(), a.Gateway); err != nil {
			return err
		}
	}
	if err := e.targets(ctx); err != nil {
		return err
	}
	if !e.failed(StepGateway, StepRoute, StepForwarding, StepFirewall) && !e.cut && (e.led || !e.alone) {
		return e.names(ctx)
	}
	return nil
}

// lookAtLink looks at both ends of the pod's link.
func (e *examination) lookAtLink(ctx context.Context) error {
	e.index = e.port.Peer
	peer, err := bridge.On(e.socket, nil).LinkByIndex(ctx, e.index)
	forwards := e.port.Port == nil || e.port.Port.Forwarding
	switch {
	case errors.Is(err, fs.ErrNotExist):
		e.add(StepLink, "delete the pod and create it again", "the other end of the port %s is not in the pod's network namespace %s", e.port.Name, e.at.Path)
		return nil
	case err != nil:
		return err
	case !peer.Up:
		e.add(StepLink, e.inside()+"ip link set "+peer.Name+" up", "the pod's interface %s is down", peer.Name)
	case e.bridge.Bridge != nil && e.bridge.Bridge.PortDelay > 0:
		evidence, remedy := split(endpoint.SlowPorts(e.bridge.Name, e.bridge.Bridge.PortDelay), "")
		if !forwards {
			evidence = fmt.Sprintf("port %s does not forward yet: %s", e.port.Name, evidence)
			remedy += "; bridge link set dev " + e.port.Name + " state 3" // else it waits to the end
		}
		e.add(StepLink, remedy, "%s", evidence)
		e.found[len(e.found)-1].Note = forwards
	case !forwards:
		e.add(StepLink, "bridge link set dev "+e.port.Name+" state 3", "port %s does not forward, though both of its ends are up", e.port.Name)
	}
	return nil
}

// addresses looks at the flags of the pod's, and finds its interface's index.
func (e *examination) addresses(ctx context.Context) error {
	have, err := addr.On(e.socket).List(ctx, addr.Filter{})
	for _, a := range have {
		for _, own := range e.at.Addresses {
			if a.Prefix != own.Prefix {
				continue
			}
			if a.Flags&unix.IFA_F_DADFAILED != 0 {
				e.add(StepDuplicate, "give one of the two another address", "another node has %s: duplicate address detection failed", a.Prefix.Addr())
			}
		}
	}
	return err
}

// family follows one address of the pod's to its gateway and beyond.
func (e *examination) family(ctx context.Context, own, gateway netip.Addr) error {
	e.own = own
	routes, err := e.inPod.List(ctx, route.Filter{Family: nl.FamilyOf(own), Link: e.index})
	if err != nil {
		return err
	}
	for _, r := range routes {
		if r.Gateway.IsValid() && r.Gateway != gateway && r.Gateway.Is4() == own.Is4() {
			if _, err := e.gateway(ctx, r.Gateway, fmt.Sprintf("the gateway %s of the pod's route to %s", r.Gateway, r.Dst)); err != nil {
				return err
			}
		}
	}
	if !gateway.IsValid() {
		return nil
	}
	isUsed := slices.ContainsFunc(routes, func(r route.Route) bool {
		return r.Gateway == gateway || slices.ContainsFunc(r.Nexthops, func(h route.Nexthop) bool { return h.Gateway == gateway })
	})
	if !isUsed && !e.isOwn(ctx, gateway) {
		e.alone = true // the IPAM names a gateway for every subnet, and no host needs to have that address
		return nil
	}
	e.led = true
	answers, err := e.gateway(ctx, gateway, "the gateway "+gateway.String())
	if err != nil || !answers {
		return err
	}
	if err := e.kept(ctx, own); err != nil {
		return err
	}
	return e.beyond(ctx, own)
}

// gateway reports whether a gateway answers by ARP or neighbour discovery, and by the right MAC. Its own firewall may
// drop echo requests.
func (e *examination) gateway(ctx context.Context, gateway netip.Addr, name string) (bool, error) {
	pingErr := ping(ctx, e.pod, gateway, icmp.Echo{From: e.own, Wait: wait})
	if err := ctx.Err(); err != nil {
		return false, err
	}
	if e.failed(StepForwarding, StepRoute) && pingErr != nil {
		return false, nil // it is known what stops the pod
	}
	if r, err := e.inPod.Get(ctx, gateway); err != nil || r.Link != e.index {
		e.add(StepRoute, fmt.Sprintf("delete in the pod what leads elsewhere (ip route get %s; ip rule), or create it again", gateway),
			"the pod has no route to its gateway %s by %s", gateway, e.at.IfName)
		return false, nil
	}
	next, nextErr := routing.Find(e.socket, e.index, gateway)
	if pingErr != nil && (nextErr != nil || len(next.MAC) == 0) {
		l, err := e.unresolved(ctx, gateway, pingErr)
		e.add(StepGateway, l.remedy, "%s does not answer by %s: %s", name, protocolOf(gateway), l.evidence)
		return false, err
	}
	// A link in a VLAN of the bridge has its MAC.
	if pingErr != nil && e.isOwn(ctx, gateway) && !bytes.Equal(e.bridge.MAC, next.MAC) {
		e.add(StepGateway, "if it stays, another pod forges it, or a program has set it: set guard for the network, and delete it in the pod (ip neigh)",
			"the gateway %s does not answer: the pod has its MAC as %s, and it is %s", gateway, next.MAC, e.bridge.MAC)
		return false, nil
	}
	e.try("%s by %s", name, protocolOf(gateway))
	return true, nil
}

// unresolved finds out where the question for the MAC of a neighbour of the pod, or its answer, is lost.
func (e *examination) unresolved(ctx context.Context, a netip.Addr, sendErr error) (loss, error) {
	t, err := e.follow(ctx, neighbourProbe(a), func() { _ = ping(ctx, e.pod, a, icmp.Echo{Wait: wait * 3 / 2}) }) // the kernel asks once a second
	if err != nil {
		return loss{}, err
	}
	return e.lost(ctx, e.own, a, t, sendErr)
}

// beyond follows the way to elsewhere, as far as the host's next hop.
func (e *examination) beyond(ctx context.Context, own netip.Addr) error {
	far := routing.Outside(own)
	hop, err := e.onHost.Get(ctx, far)
	if err != nil {
		return e.noDefault(ctx, far, err)
	}
	if r, err := e.inPod.Get(ctx, far); err != nil {
		e.add(StepRoute, "set isDefaultGateway, or a route in the ipam, and create the pod again", "the pod has no default route: %v", err)
		return nil
	} else if r.Link != e.index {
		e.try("no way to elsewhere by this interface: the pod sends by another one")
		return nil
	}
	if !hop.Gateway.IsValid() || hop.Link == e.bridge.Index || e.failed(StepForwarding, StepFirewall) {
		return nil // on the pod's own link, or it is known what stops the pod
	}
	l, answered, err := e.echo(ctx, own, hop.Gateway)
	switch {
	case err != nil:
		return err
	case answered:
		e.try("the host's next hop %s by echo requests", hop.Gateway)
		return e.long(ctx, own, hop.Gateway)
	case !l.beyond:
		e.cut = true
		e.addLoss(l, fmt.Sprintf("the host's next hop %s gives the pod %s no answer", hop.Gateway, own))
	case ping(ctx, e.host, hop.Gateway, icmp.Echo{Wait: wait}) == nil:
		e.cut = true
		e.add(StepBeyond, fmt.Sprintf("see on %s whether a route leads back to the pod, and whether a firewall there drops its packets: ip route get %s", hop.Gateway, own),
			"the host reaches its next hop %s, and the pod %s does not: %s", hop.Gateway, own, l.evidence)
	default:
		e.try("the host's next hop %s, which answers no echo request of host or pod: what the pod sends leaves the host", hop.Gateway)
	}
	return ctx.Err()
}

// noDefault reports that the host has no default route. A host without IPv6 of its own may be as it should be.
func (e *examination) noDefault(ctx context.Context, far netip.Addr, cause error) error {
	if e.failed(StepForwarding) {
		return nil
	}
	if far.Is4() {
		e.add(StepForwarding, "give the host a default route", "the host itself has no route to elsewhere (%s): %v", far, cause)
		return nil
	}
	note, remedy := true, "give the host a default route of IPv6: ip -6 route add default via ROUTER"
	evidence := fmt.Sprintf("the host itself has no default route of IPv6 (%s): %v", far, cause)
	have, err := e.links.Addresses().List(ctx, addr.Filter{})
	for _, a := range have {
		if a.Prefix.Addr().Is6() && a.Link != e.link.Index && a.Prefix.Addr().IsGlobalUnicast() {
			note = false
		}
	}
	for _, text := range e.others {
		if strings.Contains(text, "ignores router advertisements") {
			deaf, command := split(text, "")
			note, evidence, remedy = false, evidence+"; "+deaf, command
		}
	}
	e.add(StepForwarding, remedy, "%s", evidence)
	e.found[len(e.found)-1].Note = note
	return err
}

// echo has the pod send echo requests, and finds out where they, or their answers, are lost if none comes.
func (e *examination) echo(ctx context.Context, own, to netip.Addr) (l loss, answered bool, _ error) {
	id := uint16(rand.Uint32())
	var sendErr error
	t, err := e.follow(ctx, echoProbe(to.Is4(), id), func() { sendErr = ping(ctx, e.pod, to, icmp.Echo{From: own, Wait: wait, ID: id}) })
	if err != nil || sendErr == nil {
		return l, err == nil, err
	}
	l, err = e.whereLost(ctx, own, to, t, sendErr)
	return l, false, cmp.Or(ctx.Err(), err)
}

// whereLost is lost that also looks for the next hop in the pod, if the probe waits for its MAC.
func (e *examination) whereLost(ctx context.Context, own, to netip.Addr, t *trail, sendErr error) (loss, error) {
	hop := to
	r, err := e.inPod.Get(ctx, to)
	if err == nil && r.Link != e.index {
		return loss{StepRoute, fmt.Sprintf("the pod does not send it by %s", e.at.IfName), e.inside() + "ip route get " + to.String(), false}, nil
	}
	if r.Gateway.IsValid() {
		hop = r.Gateway
	}
	if next, nextErr := routing.Find(e.socket, e.index, hop); err == nil && (nextErr != nil || len(next.MAC) == 0) {
		l, err := e.unresolved(ctx, hop, sendErr)
		l.evidence = fmt.Sprintf("%s does not answer the pod by %s: %s", hop, protocolOf(hop), l.evidence)
		return l, err
	}
	return e.lost(ctx, own, to, t, sendErr)
}

// isOwn says whether the host has an address.
func (e *examination) isOwn(ctx context.Context, a netip.Addr) bool {
	r, err := e.onHost.Get(ctx, a)
	return err == nil && r.Type == unix.RTN_LOCAL
}

// long sends packets as long as the pod's MTU, which a lease or the plugin tuning may have made less than that on record.
func (e *examination) long(ctx context.Context, own, hop netip.Addr) error {
	var link *net.Interface
	err := e.pod.Do(func() (err error) { link, err = net.InterfaceByIndex(e.index); return err })
	if err != nil {
		return err
	}
	const headers4, headers6 = 20 + 8, 40 + 8
	headers := headers6
	if own.Is4() {
		headers = headers4
	}
	echo := icmp.Echo{From: own, Size: link.MTU - headers, DontFragment: true, Wait: wait}
	err = ping(ctx, e.pod, hop, echo)
	if err == nil || e.failed(StepMTU) {
		return ctx.Err()
	}
	echo.From = netip.Addr{}
	if errors.Is(err, unix.EMSGSIZE) || ping(ctx, e.host, hop, echo) != nil {
		e.add(StepMTU, "set mtu of the network to what the path takes, and create its pods again",
			"packets of %d bytes, the pod's MTU, do not get to %s, and short ones do: %v", link.MTU, hop, err)
	}
	return nil
}

func ping(ctx context.Context, ns *netns.NS, to netip.Addr, echo icmp.Echo) error {
	_, err := icmp.Ping(ctx, ns, to, echo)
	return err
}

// names asks each name server something that any answers, if with an error.
func (e *examination) names(ctx context.Context) error {
	for _, server := range e.opt.DNS {
		if r, err := e.inPod.Get(ctx, server); err != nil || !e.sendsTo(server) || r.Link != e.index {
			e.try("not the name server %s, since the pod has no route there by %s", server, e.at.IfName)
			continue
		}
		l, err := e.ask(ctx, server)
		switch {
		case err != nil:
			return err
		case l == nil:
			e.try("the name server %s", server)
		case l.beyond:
			e.add(StepDNS, "see whether the server serves the pod's subnet, and whether a firewall on the way drops UDP 53", "the name server %s does not answer the pod: %s", server, l.evidence)
		default:
			e.add(StepDNS, l.remedy, "the name server %s does not answer the pod: %s", server, l.evidence)
		}
	}
	return nil
}

// ask sends a query twice, and takes any answer. If none comes, it finds out where the query or the answer was lost.
func (e *examination) ask(ctx context.Context, server netip.Addr) (*loss, error) {
	var conn *net.UDPConn
	err := e.pod.Do(func() (err error) {
		conn, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(server, 53)))
		return err
	})
	if err != nil {
		return &loss{StepDNS, err.Error(), "see in the pod: " + e.inside() + "ip route get " + server.String(), false}, nil
	}
	defer conn.Close()
	// RFC 1035, section 4.1: the name servers of the root.
	query := []byte{0x74, 0x6f, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1}
	port := conn.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	t, followErr := e.follow(ctx, flowProbe(server.Is4(), unix.IPPROTO_UDP, port), func() {
		for range 2 {
			if _, err = conn.Write(query); err != nil {
				return
			}
			_ = conn.SetReadDeadline(time.Now().Add(wait))
			if _, err = conn.Read(make([]byte, 512)); err == nil {
				return
			}
		}
	})
	if followErr != nil || err == nil || ctx.Err() != nil {
		return nil, cmp.Or(followErr, ctx.Err())
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = errors.New("nothing comes back")
	}
	l, lostErr := e.whereLost(ctx, e.own, server, t, err)
	return &l, lostErr
}

// protocolOf names the protocol by which a neighbour is asked for its MAC.
func protocolOf(a netip.Addr) string {
	if a.Is4() {
		return "ARP"
	}
	return "neighbour discovery"
}
