package cni

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"strings"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
)

// check carries out CHECK: it compares the attachment with what ADD made of it
// and with the result of the whole chain, and lists all that is not so in one
// error.
func (c *call) check(ctx context.Context, conf *NetConf) error {
	if _, err := conf.runtimeConfig(); err != nil {
		return err
	}
	prev, err := parsePrevResult(conf, c.cniVersion)
	if err != nil {
		return err
	}
	if prev == nil {
		return newError(codeInvalidConfig, "CHECK needs prevResult: the result of the ADD that is to be checked")
	}
	pod, err := c.openPod()
	if err != nil {
		return err
	}
	defer pod.Close()
	h, err := c.openHost(conf.settings())
	if err != nil {
		return err
	}
	defer h.Close()
	if err := h.enter(ctx); err != nil {
		return err
	}
	rec, err := h.dir.Load(c.network, c.hash())
	if errors.Is(err, fs.ErrNotExist) {
		return newError(codeDiffers, "container %s has no attachment %s to network %q on record: DEL it and ADD it again", c.containerID, c.ifName, c.network)
	}
	if err != nil {
		return newError(codeIO, "%v", err)
	}
	if rec.State != state.Ready {
		return newError(codeDiffers, "the ADD of container %s never came to its end: DEL it and ADD it again", c.containerID)
	}
	found := &findings{}
	k := &checking{host: h, rec: rec, prev: prev}
	if conf.ipamType() == ipamDHCP {
		if k.dhcp, err = conf.dhcp(); err != nil {
			return err
		}
	}
	if err := k.link(ctx, pod, found); err != nil {
		return err
	}
	if err := k.network(ctx, found); err != nil {
		return err
	}
	if err := k.limitDifferences(ctx, rec, found); err != nil {
		return err
	}
	if err := k.reservations(ctx, found); err != nil {
		return err
	}
	return found.err(c)
}

type findings struct{ list []string }

func (f *findings) add(format string, args ...any) {
	f.list = append(f.list, fmt.Sprintf(format, args...))
}

func (f *findings) addAll(diffs []tombolo.Difference) {
	for _, d := range diffs {
		f.add("%s", d)
	}
}

func (f *findings) err(c *call) error {
	if len(f.list) == 0 {
		return nil
	}
	return newError(codeDiffers, "container %s, attachment %s to network %q: %s: %s",
		c.containerID, c.ifName, c.network, plural(len(f.list), "difference", "differences"), strings.Join(f.list, "; "))
}

type checking struct {
	*host
	rec  *state.Attachment
	prev *current.Result
	dhcp *dhcpConf // of the configuration, if it has such an ipam
}

// link compares both ends of the veth. What the port should be comes from the
// configuration of today; what the pod's interface should be, from the result,
// where a chained plugin has told what it changed.
func (k *checking) link(ctx context.Context, pod *netns.NS, found *findings) error {
	port, err := k.portAsRecorded(ctx, k.rec)
	if err != nil {
		return err
	}
	port.Bridge = k.settings.Bridge
	port.Hairpin, port.Isolated = k.settings.Hairpin, k.settings.Isolated
	own := port.PeerMAC
	port.PeerMAC = nil
	k.readInterfaces(&port, found)
	// The entry is of the MAC that ADD gave, whatever a plugin after it gave instead.
	port.StaticFDB = port.StaticFDB && bytes.Equal(own, port.PeerMAC)
	has, err := podAddresses(pod)
	if err != nil {
		return err
	}
	port.Addresses = k.expectedAddresses(has, found)
	if port.Routes, err = podRoutes(k.settings, nil, k.rerouted(k.prev.Routes)); err != nil {
		return err
	}
	diffs, err := k.br.Check(ctx, pod, port)
	found.addAll(diffs)
	return err
}

// portAsRecorded is the port of an attachment, on the bridge that it was attached to.
func (h *host) portAsRecorded(ctx context.Context, rec *state.Attachment) (bridge.Port, error) {
	br, err := h.br.Link(ctx, rec.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return portOf(rec), nil
	}
	if err != nil {
		return bridge.Port{}, err
	}
	return portOn(rec, br), nil
}

// isOurs says whether an interface of a result is the pod's that ADD made.
func (k *checking) isOurs(in *current.Interface) bool {
	return in.Sandbox != "" && in.Name == k.call.ifName
}

// readInterfaces takes from the result what a plugin after this one may have changed.
// That it names the pod's interface is what the rest of it goes by.
func (k *checking) readInterfaces(port *bridge.Port, found *findings) {
	if !slices.ContainsFunc(k.prev.Interfaces, k.isOurs) {
		found.add("prevResult has no interface %s of the pod", k.call.ifName)
	}
	for _, in := range k.prev.Interfaces {
		var into *net.HardwareAddr
		switch {
		case k.isOurs(in):
			into = &port.PeerMAC
		case in.Sandbox == "" && in.Name == port.Name:
			into = &port.MAC
		}
		if into == nil || in.Mac == "" {
			continue
		}
		mac, err := net.ParseMAC(in.Mac)
		if err != nil || len(mac) != 6 {
			found.add("prevResult gives the interface %s the MAC %.40q, which is none", in.Name, in.Mac)
			continue
		}
		*into = mac
	}
}

// expectedAddresses are those that the pod's interface should have: what the result
// names, with what plugins after this one have added. They may have taken some of ADD's
// away too, but not if the pod has them still. A lease and an advertised prefix
// come and go, and are compared elsewhere.
func (k *checking) expectedAddresses(has []netip.Prefix, found *findings) []netip.Prefix {
	named := k.namedAddresses()
	if k.rec.IPAMType == ipamDHCP || k.rec.SLAAC {
		return slices.DeleteFunc(named, func(p netip.Prefix) bool {
			return autoconfigured(k.rec, p) || !slices.ContainsFunc(k.rec.Addresses, func(a state.Address) bool { return a.Prefix == p })
		})
	}
	for _, a := range k.rec.Addresses {
		if !slices.Contains(named, a.Prefix) && slices.Contains(has, a.Prefix) {
			found.add("prevResult lacks the address %s of the interface %s", a.Prefix, k.call.ifName)
		}
	}
	return named
}

// podAddresses lists the addresses of a pod, by whichever interface it has them.
func podAddresses(pod *netns.NS) ([]netip.Prefix, error) {
	conn, err := addr.Dial(&addr.Config{NetNS: pod})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	have, err := conn.List(addr.Filter{})
	var list []netip.Prefix
	for _, a := range have {
		list = append(list, a.Prefix)
	}
	return list, err
}

// namedAddresses are those that the result gives to the pod's interface. One that says
// of no interface can only mean that, if the pod has no other.
func (k *checking) namedAddresses() []netip.Prefix {
	inPod := 0
	for _, in := range k.prev.Interfaces {
		if in.Sandbox != "" {
			inPod++
		}
	}
	var list []netip.Prefix
	for _, ip := range k.prev.IPs {
		p, ok := prefixOf(ip.Address)
		switch {
		case !ok:
		case ip.Interface == nil && inPod <= 1, ip.Interface != nil && k.isOurs(k.prev.Interfaces[*ip.Interface]):
			list = append(list, p)
		case slices.ContainsFunc(k.rec.Addresses, func(a state.Address) bool { return a.Prefix == p }) && ip.Interface == nil:
			list = append(list, p)
		}
	}
	return list
}

// network compares the parts that the attachment shares with others, and its own
// share in them.
func (k *checking) network(ctx context.Context, found *findings) error {
	rec, err := k.dir.LoadNetwork(k.call.network)
	if err != nil {
		found.add("the record of network %q: %v", k.call.network, err)
		return nil
	}
	l, err := k.bridgeDifferences(ctx, rec, found)
	if err != nil {
		return err
	}
	own := *rec
	own.Gateways = k.gateways()
	if err := k.gatewayDifferences(ctx, &own, l, found); err != nil {
		return err
	}
	if publishesIPv4(k.rec) {
		if err := k.loopbackDifferences(ctx, rec, l, found); err != nil {
			return err
		}
	}
	ep := endpointOf(k.rec)
	diffs, err := k.fw.Check(ctx, rules(rec, l), &ep)
	if err != nil {
		return err
	}
	found.addAll(diffs)
	diffs, err = k.fw.CheckAdmission(ctx)
	found.addAll(diffs)
	return err
}

// gateways are those of the attachment's addresses.
func (k *checking) gateways() []netip.Prefix {
	var list []netip.Prefix
	for _, a := range k.rec.Addresses {
		if k.settings.IsGateway && a.Gateway.IsValid() {
			list = append(list, netip.PrefixFrom(a.Gateway, a.Prefix.Bits()))
		}
	}
	return list
}

// gatewayDifferences looks for a bridge's addresses, and whether the host forwards.
func (h *host) gatewayDifferences(ctx context.Context, rec *state.Network, l *bridge.Link, found *findings) error {
	if l.Index == 0 {
		return nil // found already
	}
	for _, gw := range rec.Gateways {
		ok, err := h.br.Addresses().Has(addr.Address{Prefix: gw, Link: l.Index})
		if err != nil {
			return err
		}
		if !ok {
			found.add("bridge %s: the gateway %s is missing", rec.Bridge, gw)
		}
		if ok, err = h.br.Forwards(ctx, bridge.Routing{IPv4: gw.Addr().Is4(), IPv6: gw.Addr().Is6()}); err != nil {
			return err
		}
		if !ok {
			found.add("the host does not forward packets of the family of %s", gw.Addr())
		}
	}
	return nil
}

func (k *checking) reservations(ctx context.Context, found *findings) error {
	if k.rec.IPAMType == ipamDHCP {
		k.leave() // leases are on a disk
		return k.leaseDifferences(k.rec, k.dhcp, found)
	}
	allocator, err := ipamconf.New(k.ipamRequest(true))
	if err != nil {
		return err
	}
	if allocator.Slow() {
		k.leave()
	}
	var held []ipam.Address
	for _, ip := range k.prev.IPs {
		// What other plugins have added is not this one's to have reserved.
		p, ok := prefixOf(ip.Address)
		if ok && slices.ContainsFunc(k.rec.Addresses, func(a state.Address) bool { return a.Prefix.Addr() == p.Addr() }) {
			gateway, _ := netip.AddrFromSlice(ip.Gateway)
			held = append(held, ipam.Address{Prefix: p, Gateway: gateway.Unmap()})
		}
	}
	err = allocator.Bind(k.ipamNode()).Check(ctx, k.call.owner(), held)
	if err != nil && !allocator.Slow() {
		found.add("%v", err)
		return nil
	}
	return err
}
