package uplink

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/jsimonetti/rtnetlink/v2/driver"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// detour is the way that frames for the host take while its NIC becomes a port, or
// ceases to be one. A port takes nothing in for the microseconds in which the kernel
// has given it the bridge's receive handler and has not enabled it yet (br_add_if()),
// or has disabled it and not taken the handler away yet (br_del_if()); and for as long
// as the caller's thread loses its processor in between.
//
// So a rule of nf_tables at the NIC's ingress, which comes before that handler, sends
// them out by one end of a veth pair, the stand-in. Its other end is a port of the
// bridge, which has the addresses at that time in either direction:
//
//	NIC -> rule -> peer ~ port -> bridge
//
// Only IPv4 and IPv6 that is sent to the NIC's own MAC is sent round: anything else the
// bridge could send back by the NIC. Nor is what the kernel answers by the link that it
// came in by (ARP, ICMPv6, what goes to link-local addresses): its answer would have no
// port to go out by. All of that is asked again where it is lost. What has a VLAN tag is
// for a link on the NIC, and goes on there.
//
// The rule is there only while the stand-in's port forwards: it is made last and goes
// first. A host that a process which was killed leaves with all of it is reachable.
//
// A filter of tc could send frames straight to the bridge, but its qdisc cannot be had
// without the kernel dropping what the NIC is to send at that moment (qdisc_graft()).
type detour struct {
	// key makes the names: the index that the NIC had before the takeover, so that they
	// are known as long as there is a record.
	key int
}

// standInAlias is that of both ends of the pair, for a person who lists links.
const standInAlias = "tombolo:1:uplink"

// The names of the stand-in's ends begin with these: what goes out by the peer comes in
// by the port. With an index of ten digits they are 15 bytes long, which is the most.
const (
	portPrefix = "tombi"
	peerPrefix = "tombo"
)

func (rec *Record) detour() detour { return detour{rec.Before.NIC.Index} }

func (d detour) port() string { return portPrefix + strconv.Itoa(d.key) }
func (d detour) peer() string { return peerPrefix + strconv.Itoa(d.key) }

// table is the name of the table, which is of the family netdev.
func (d detour) table() string { return "tombolo-uplink-" + strconv.Itoa(d.key) }

// portMAC and peerMAC are of the highest there are that are set by hand: a bridge whose
// MAC was not chosen takes the lowest of its ports'. They also tell the pair from
// another's of the same name before it has its alias.
func (d detour) portMAC() net.HardwareAddr { return d.mac(0xfe) }
func (d detour) peerMAC() net.HardwareAddr { return d.mac(0xff) }

func (d detour) mac(end byte) net.HardwareAddr {
	const locallyAdministered = 0xfe // and unicast
	return binary.BigEndian.AppendUint32([]byte{locallyAdministered, end}, uint32(d.key))
}

// words describe it in a plan.
func (d detour) words(nic Link) string {
	return fmt.Sprintf("let what comes in for %s go round the port meanwhile, by veth %s and %s and nft's table netdev %s, if the kernel can",
		nic.MAC, d.peer(), d.port(), d.table())
}

// isStandIn says that a link is an end of some detour's pair. Such a link is nobody's
// port, and nothing that a plan is about.
func isStandIn(l *Link) bool {
	digits, isPort := strings.CutPrefix(l.Name, portPrefix)
	if !isPort {
		digits, _ = strings.CutPrefix(l.Name, peerPrefix)
	}
	key, err := strconv.Atoi(digits)
	if err != nil {
		return false
	}
	d := detour{key}
	mac := d.peerMAC()
	if isPort {
		mac = d.portMAC()
	}
	return isOurs(l.Kind, l.Alias, l.MAC, mac)
}

// isOurs says that a link of one of the names is of a pair of ours, which has its MACs
// from the beginning, and its alias by the next request.
func isOurs(kind, alias, mac string, want net.HardwareAddr) bool {
	return kind == "veth" && mac == want.String() && (alias == standInAlias || alias == "")
}

// applyRound does operations. Those during which the NIC takes nothing in are done with
// a detour.
func (r *run) applyRound(ctx context.Context, s *Snapshot, ops []operation) error {
	if !slices.ContainsFunc(ops, func(op operation) bool { return op.interrupts }) || s.Bridge == nil || !s.Bridge.Up() {
		return r.apply(ctx, ops)
	}
	d := r.rec.detour()
	if err := r.begin(ctx, d, s); err != nil && !isUnsupported(err) {
		r.note("what came in for %s while it became a port, or ceased to be one, may have been lost: %v", s.NIC.Name, err)
	}
	err := r.apply(ctx, ops)
	return errors.Join(err, r.clear(ctx))
}

// isUnsupported says that a kernel lacks what a detour needs: netlink of netfilter, the
// family netdev or veth (EPROTONOSUPPORT, EAFNOSUPPORT, EOPNOTSUPP), or the expression
// fwd (ENOENT). Then there is none, and that is all.
func isUnsupported(err error) bool {
	return slices.ContainsFunc([]error{unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT, unix.EOPNOTSUPP, unix.ENOENT},
		func(errno error) bool { return errors.Is(err, errno) })
}

func (r *run) note(format string, args ...any) {
	r.rec.Notes = append(r.rec.Notes, fmt.Sprintf(format, args...))
}

// begin makes the detour.
func (r *run) begin(ctx context.Context, d detour, s *Snapshot) error {
	if r.netfilter == nil {
		return r.noNetfilter
	}
	mac, err := net.ParseMAC(s.NIC.MAC)
	if err != nil {
		return err
	}
	if err := r.addStandIn(ctx, d, s); err != nil {
		return err
	}
	port, err := r.bridge.Link(ctx, d.port())
	if err != nil {
		return err
	}
	if port.Port == nil || !port.Port.Forwarding || port.Peer == 0 {
		return fmt.Errorf("%s does not forward what comes in by %s", s.Bridge.Name, d.port())
	}
	return r.netfilter.Execute(d.addTable(s.NIC.Name, mac, port.Peer))
}

// addStandIn makes the pair, and returns when what is sent by the one end is taken in by
// the bridge.
//
// The pair is made by a request of its own: what follows goes by the names, and must not
// be done to another's links if there are such.
func (c *Conn) addStandIn(ctx context.Context, d detour, s *Snapshot) error {
	// The bridge's own MTU follows the lowest of its ports', and frames are as long as
	// the NIC's may be.
	mtu := max(s.Bridge.MTU, s.NIC.MTU)
	var b nl.Batch
	link.Request{
		Name: d.port(), MAC: d.portMAC(), MTU: &mtu,
		Peer: &link.Request{Name: d.peer(), MAC: d.peerMAC(), MTU: &mtu},
	}.Create(&b, "add link", d.port())
	if err := c.execute(ctx, &b); err != nil {
		return err
	}
	b.Reset()
	d.setUp(&b, s.Bridge.Index, true)
	err := c.execute(ctx, &b)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		// The kernel has no IPv6.
		b.Reset()
		d.setUp(&b, s.Bridge.Index, false)
		err = c.execute(ctx, &b)
	}
	if err != nil {
		return err
	}
	// Until the kernel has taken note of the carriers, the pair sends nothing, and the
	// port takes nothing in.
	for _, name := range []string{d.peer(), d.port(), s.Bridge.Name} {
		c.nl.RefreshCarrier(name)
	}
	return nil
}

// setUp has the pair say nothing by itself, which is no link-local address and, as
// nothing floods to it, nothing that the bridge sends; and then sets it up.
func (d detour) setUp(b *nl.Batch, bridge int, ipv6 bool) {
	for _, name := range []string{d.port(), d.peer()} {
		link.Request{Name: name, Alias: new(standInAlias), NoLinkLocal: ipv6}.Set(b, "set link", name)
	}
	link.Request{Name: d.port(), Master: &bridge}.Set(b, "set master of", d.port())
	off := new(driver.BridgeEnableDisabled)
	link.Request{Name: d.port(), Port: &driver.BridgePort{Learning: off, UnicastFlood: off, McastFlood: off, BcastFlood: off}}.Set(b, "set port", d.port())
	for _, name := range []string{d.peer(), d.port()} {
		link.Request{Name: name, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(b, "set link up", name)
	}
}

// clear takes away what there is of a detour, of a process that was killed too: the rule
// first, without which nothing is sent to the pair. As long as it is there, the pair and
// the bridge have to stay.
func (r *run) clear(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	d := r.rec.detour()
	if r.netfilter != nil {
		if err := r.netfilter.Execute(d.delTable()); err != nil && !isUnsupported(err) {
			return fmt.Errorf("what comes in for %s goes by a detour; delete it with `nft delete table netdev %s`: %w", r.rec.NIC, d.table(), err)
		}
	}
	if err := r.delStandIn(ctx, d); err != nil && !isGone(err) {
		return fmt.Errorf("%s is left of a detour; delete it with `ip link delete %s`: %w", d.port(), d.port(), err)
	}
	return nil
}

// delStandIn deletes the pair, and leaves one of another's alone.
func (c *Conn) delStandIn(ctx context.Context, d detour) error {
	l, err := c.bridge.Link(ctx, d.port())
	if err != nil || !isOurs(l.Kind, l.Alias, l.MAC.String(), d.portMAC()) {
		return err
	}
	var b nl.Batch
	link.Request{Index: l.Index}.Delete(&b, d.port())
	return c.execute(ctx, &b)
}
