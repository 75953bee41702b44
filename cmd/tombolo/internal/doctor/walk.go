package doctor

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
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
	index         int // of the pod's interface
	bridge        *bridge.Link
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
	links, err := bridge.Dial(nil)
	if err != nil {
		return err
	}
	defer links.Close()
	e.inPod, e.onHost = route.On(e.socket), links.Routes()
	port, err := links.Link(ctx, e.at.Port)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it is among the differences
	}
	if err != nil {
		return err
	}
	if up := port.Port; up != nil && !up.Forwarding && !e.failed(StepLink) {
		e.add(StepLink, "tombolo repair", "port %s has no carrier, or does not forward: the pod's end of it is down", port.Name)
	}
	if e.failed(StepLink) {
		return nil
	}
	if e.bridge, err = links.Link(ctx, e.at.Bridge); err != nil {
		return err
	}
	if err := e.addresses(ctx); err != nil || e.failed(StepAddress) {
		return err
	}
	if err := e.duplicates(ctx); err != nil {
		return err
	}
	for _, a := range e.at.Addresses {
		if err := e.family(ctx, a.Prefix.Addr(), a.Gateway); err != nil {
			return err
		}
	}
	if !e.failed(StepGateway, StepRoute, StepForwarding, StepFirewall) && !e.cut && (e.led || !e.alone) {
		e.names(ctx)
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
			if e.index = a.Link; a.Flags&unix.IFA_F_DADFAILED != 0 {
				e.add(StepDuplicate, "give one of the two another address", "another node has %s: duplicate address detection failed", a.Prefix.Addr())
			}
		}
	}
	return err
}

// family follows one address of the pod's to its gateway and beyond.
func (e *examination) family(ctx context.Context, own, gateway netip.Addr) error {
	if !gateway.IsValid() {
		return nil
	}
	needed, err := e.isNeeded(ctx, gateway)
	if err != nil {
		return err
	}
	if !needed {
		e.alone = true
		return nil
	}
	e.led = true
	pingErr := ping(ctx, e.pod, gateway, icmp.Echo{From: own, Wait: wait})
	if err := ctx.Err(); err != nil {
		return err
	}
	if e.failed(StepForwarding, StepRoute) && pingErr != nil {
		return nil // it is known what stops the pod
	}
	if r, err := e.inPod.Get(ctx, gateway); err != nil || r.Link != e.index {
		e.add(StepRoute, fmt.Sprintf("delete in the pod what leads elsewhere (ip route get %s; ip rule), or create it again", gateway),
			"the pod has no route to its gateway %s by %s", gateway, e.at.IfName)
		return nil
	}
	next, nextErr := routing.Find(e.socket, e.index, gateway)
	if pingErr != nil && (nextErr != nil || len(next.MAC) == 0) {
		how, remedy := unresolved(gateway)
		e.add(StepGateway, remedy, "the gateway %s does not answer by %s: %v", gateway, how, pingErr)
		return nil
	}
	// A link in a VLAN of the bridge has its MAC.
	if pingErr != nil && e.isOwn(ctx, gateway) && !bytes.Equal(e.bridge.MAC, next.MAC) {
		e.add(StepGateway, "if it stays, another pod forges it, or a program has set it: set guard for the network, and delete it in the pod (ip neigh)",
			"the gateway %s does not answer: the pod has its MAC as %s, and it is %s", gateway, next.MAC, e.bridge.MAC)
		return nil
	}
	if err := e.kept(ctx, own); err != nil {
		return err
	}
	for _, to := range e.opt.Ports {
		if to.Addr().Is4() == own.Is4() {
			if err := e.connection(ctx, own, to); err != nil {
				return err
			}
		}
	}
	for _, to := range e.opt.To {
		if to.Is4() == own.Is4() {
			if err := e.destination(ctx, own, to); err != nil {
				return err
			}
		}
	}
	far := outside(gateway)
	hop, err := e.onHost.Get(ctx, far)
	if err != nil {
		if !e.failed(StepForwarding) && gateway.Is4() {
			e.add(StepForwarding, "give the host a default route", "the host itself has no route to elsewhere (%s): %v", far, err)
		}
		return nil
	}
	if r, err := e.inPod.Get(ctx, far); err != nil {
		e.add(StepRoute, "set isDefaultGateway, or a route in the ipam, and create the pod again", "the pod has no default route: %v", err)
		return nil
	} else if r.Link != e.index {
		return nil // by another of its interfaces
	}
	if !hop.Gateway.IsValid() || hop.Link == e.bridge.Index || e.failed(StepForwarding, StepFirewall) {
		return nil // on the pod's own link, or it is known what stops the pod
	}
	if err := ping(ctx, e.host, hop.Gateway, icmp.Echo{Wait: wait}); err != nil {
		return nil // it answers no echo, or is away: nothing is known of the pod by that
	}
	if err := ping(ctx, e.pod, hop.Gateway, icmp.Echo{From: own, Wait: wait}); err != nil {
		e.cut = true
		if found, err := e.traceEcho(ctx, own, hop.Gateway); found || err != nil {
			return err
		}
		e.add(StepBeyond, "look for a rule that names the pod or its subnet: nft list ruleset; iptables-legacy-save",
			"the host reaches its next hop %s, and the pod %s does not: %v", hop.Gateway, own, err)
		return nil
	}
	return e.long(ctx, own, hop.Gateway)
}

// isOwn says whether the host has an address.
func (e *examination) isOwn(ctx context.Context, a netip.Addr) bool {
	r, err := e.onHost.Get(ctx, a)
	return err == nil && r.Type == unix.RTN_LOCAL
}

// isNeeded says whether a gateway is the host's, or the pod sends anything by it. The IPAM names one
// for every subnet, and in a network without a gateway no host has that
// address.
func (e *examination) isNeeded(ctx context.Context, gateway netip.Addr) (bool, error) {
	if e.isOwn(ctx, gateway) {
		return true, nil
	}
	routes, err := e.inPod.List(ctx, route.Filter{Family: nl.FamilyOf(gateway)})
	return slices.ContainsFunc(routes, func(r route.Route) bool {
		return r.Gateway == gateway || slices.ContainsFunc(r.Nexthops, func(h route.Nexthop) bool { return h.Gateway == gateway })
	}), err
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

// outside is an address of elsewhere, which is looked up and never sent to: of the blocks for
// documentation (RFC 5737, RFC 3849).
func outside(gateway netip.Addr) netip.Addr {
	if gateway.Is4() {
		return netip.AddrFrom4([4]byte{203, 0, 113, 1})
	}
	return netip.MustParseAddr("2001:db8:ffff::1")
}

// names asks each name server something that any answers, if with an error.
func (e *examination) names(ctx context.Context) {
	for _, server := range e.opt.DNS {
		if err := ask(ctx, e.pod, server); err != nil {
			e.add(StepDNS, "see whether a firewall drops UDP 53, and whether the server serves the pod's subnet",
				"the name server %s does not answer the pod: %v", server, err)
		}
	}
}

// ask sends a query twice, and takes any answer.
func ask(ctx context.Context, pod *netns.NS, server netip.Addr) error {
	var conn *net.UDPConn
	err := pod.Do(func() (err error) {
		conn, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(server, 53)))
		return err
	})
	if err != nil {
		return err
	}
	defer conn.Close()
	// RFC 1035, section 4.1: the name servers of the root.
	query := []byte{0x74, 0x6f, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1}
	for range 2 {
		_, err = conn.Write(query)
		err = cmp.Or(err, ctx.Err(), conn.SetReadDeadline(time.Now().Add(wait)))
		if err != nil {
			return err
		}
		if _, err = conn.Read(make([]byte, 512)); err == nil {
			return nil
		}
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return errors.New("nothing comes back")
	}
	return err
}

// unresolved is how a gateway is asked for, and where to look for what drops the question: rules of the bridge see it,
// and of IPv6 those of the host's hook input.
func unresolved(gateway netip.Addr) (how, remedy string) {
	if gateway.Is4() {
		return "ARP", "look which rules of the bridge drop it: nft list ruleset bridge"
	}
	return "neighbour discovery", "look which rules drop it, of the bridge: nft list ruleset bridge; or of the host's hook input: nft list ruleset inet; nft list ruleset ip6; ip6tables-legacy-save"
}
