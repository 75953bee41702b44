package bridge

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"

	"github.com/jsimonetti/rtnetlink/v2/driver"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
)

// Bridge describes a bridge device.
type Bridge struct {
	// Name is 1 to 15 bytes.
	Name string
	// MAC is the bridge's own. Nil leaves that of an existing bridge, and takes a
	// random one for a new. Either way it is pinned: a bridge otherwise takes the
	// lowest MAC among its ports, and breaks its neighbours' caches as they come
	// and go.
	MAC net.HardwareAddr
	// MTU, in bytes, is pinned too, and does not follow the ports. 0 leaves that of an existing bridge, and is 1500
	// for a new one.
	MTU int
	// Alias is given to a new bridge, and names its owner, in at most 255 bytes; an existing bridge keeps its own.
	// Ensure takes a bridge with this alias for one that it made, whose MAC is pinned. Of any other, each Ensure
	// pins the MAC again, upon which the kernel forgets the bridge's neighbours. Set it, unless the bridge is another
	// program's.
	Alias string
	// NoIPv6 keeps a new bridge from having a link-local address of its own, for
	// networks without IPv6.
	NoIPv6 bool
	// Promiscuous has the bridge hand the host all frames, whomever they are for (IFF_PROMISC), in place of
	// hairpin ports. With NFCall, what pods send to a service on their own node then arrives twice, unless rules
	// drop the copies. Nil leaves it as it is, and a new bridge has it not.
	Promiscuous *bool
	// NFCall has this bridge show its IPv4 and IPv6 packets to the firewall (IFLA_BR_NF_CALL_IPTABLES and
	// IFLA_BR_NF_CALL_IP6TABLES): without it, packets between pods pass no connection tracking, and a service's
	// answer comes from the wrong address. Nil leaves it as it is, and a new bridge has it not.
	//
	// It needs the kernel module br_netfilter, without which it has no effect: see ProbeNetfilter. False does not
	// help against the parameters net.bridge.bridge-nf-call-iptables and -ip6tables, which hold for each bridge.
	NFCall *bool
	// VLANFiltering has the bridge keep VLANs apart, as Port.VLAN needs it; false leaves it as it is, and a new
	// bridge without. Ports that are there stay in the default VLAN, and the bridge drops frames that they send
	// with a tag from then on.
	VLANFiltering bool
	// MaxLearned is how many MACs the bridge learns from what its ports send
	// (IFLA_BR_FDB_MAX_LEARNED, Linux 6.7; an older kernel has no such limit): a sender
	// with ever new ones fills the host's memory otherwise. Frames to a MAC for which there
	// is no room go to all ports. 0 leaves it as it is, and a new bridge without.
	MaxLearned uint32
}

// ErrNotBridge is the cause of an Ensure whose name is taken by another kind of
// link.
var ErrNotBridge = errors.New("the link is not a bridge")

// Ensure makes the bridge if it is not there, and sets it up, and says whether anything
// was changed. Conn.Link gives its index. Several callers may do it at once.
//
// Spanning tree stays off, as the kernel has it for a new bridge, so that a port
// forwards as soon as it has a carrier.
//
// It sends one request if the bridge is Ensure's own (see Alias) and right, and two for another's. If the kernel
// was built without br_netfilter and NFCall asks for it, all else is done and the error is ErrNoNetfilter. It needs
// CAP_NET_ADMIN.
func (c *Conn) Ensure(ctx context.Context, br Bridge) (changed bool, _ error) {
	if err := br.validate(); err != nil {
		return false, &tombolo.OpError{Op: "ensure bridge", Object: br.Name, Err: err}
	}
	l, err := c.bridgeNamed(ctx, br.Name)
	created := false
	if errors.Is(err, fs.ErrNotExist) {
		if err = c.createBridge(ctx, br); err == nil {
			l, err = c.Link(ctx, br.Name)
		}
	}
	if err == nil && l.Unfinished() {
		if err = c.finish(ctx, &br, l.Index); err == nil {
			created = true
			br.MTU = br.newMTU()
			l, err = c.Link(ctx, br.Name)
		}
	}
	if err != nil {
		return created, err
	}
	if l.Kind != "bridge" {
		return created, &tombolo.OpError{Op: "ensure bridge", Object: br.Name, Err: fmt.Errorf(
			"%w: it is %s; choose another name for the bridge, or delete the link", ErrNotBridge, describeKind(l))}
	}
	refused := br.refuseNFCall(l)
	pinned := br.Alias != "" && br.Alias == l.Alias && !created
	changed, err = c.correctBridge(ctx, br, l, pinned)
	if err == nil {
		err = refused
	}
	return created || changed, err
}

func (br *Bridge) validate() error {
	if err := checkName(br.Name); err != nil {
		return err
	}
	if len(br.Alias) > aliasMax {
		return fmt.Errorf("%w: an alias of %d bytes, where %d is the most", tombolo.ErrInvalid, len(br.Alias), aliasMax)
	}
	if br.MAC != nil && (len(br.MAC) != 6 || br.MAC[0]&1 != 0) {
		return fmt.Errorf("%w: %s is not a unicast MAC", tombolo.ErrInvalid, br.MAC)
	}
	return nil
}

// unfinishedGroup is the group of links that a bridge is in from when it is made until it
// has what the request that makes it does not take. A caller that is killed in between
// leaves it for the next one to finish, which would otherwise take it for another program's bridge.
const unfinishedGroup = 29808

// Unfinished says that the link is a bridge whose maker (Conn.Ensure) is at work, or was
// killed: it has no alias yet, and Ensure finishes it.
func (l *Link) Unfinished() bool { return l != nil && l.Kind == "bridge" && l.Group == unfinishedGroup }

// createBridge makes a bridge, which finish completes. If another caller has made it, that is success.
func (c *Conn) createBridge(ctx context.Context, br Bridge) error {
	if br.MAC == nil {
		br.MAC = ident.RandomMAC()
	}
	var b nl.Batch
	link.Request{
		Name: br.Name, MAC: br.MAC, MTU: new(otherMTU(br.newMTU())), Group: new(uint32(unfinishedGroup)), Kind: "bridge",
	}.Create(&b, "add bridge", br.Name)
	err := c.execute(ctx, &b)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// finish sets what the request that creates a bridge cannot: its alias, and whether it gets
// a link-local address. Call it before the bridge is up. Several callers may do so at once.
func (c *Conn) finish(ctx context.Context, br *Bridge, index int) error {
	noIPv6 := br.NoIPv6 && hasIPv6(otherMTU(br.newMTU()))
	err := c.setNew(ctx, br, index, noIPv6)
	if noIPv6 && errors.Is(err, unix.EAFNOSUPPORT) {
		err = c.setNew(ctx, br, index, false) // the kernel has no IPv6
	}
	return err
}

// setNew sets the alias and takes the bridge out of unfinishedGroup. It goes by the index: with the name of a link that
// is gone, the kernel applies a request with a group to all links of that group.
func (c *Conn) setNew(ctx context.Context, br *Bridge, index int, noIPv6 bool) error {
	var b nl.Batch
	r := link.Request{Index: index, Group: new(uint32(0)), NoLinkLocal: noIPv6}
	if br.Alias != "" {
		r.Alias = &br.Alias
	}
	r.Set(&b, "set bridge", br.Name)
	return c.execute(ctx, &b)
}

// newMTU is that of a bridge which is made.
func (br *Bridge) newMTU() int {
	return cmp.Or(br.MTU, 1500)
}

// otherMTU differs from mtu. A bridge's MTU follows the lowest among its ports
// until it has been changed by hand, and neither one given at creation nor setting
// what it has already counts as that. So it is born with another.
func otherMTU(mtu int) int {
	if mtu > 1280 {
		return mtu - 1
	}
	return mtu + 1
}

// refuseNFCall clears br.NFCall where the kernel would ignore it, and is an error if it was true.
func (br *Bridge) refuseNFCall(l *Link) error {
	if br.NFCall == nil || l.Bridge.Netfilter {
		return nil
	}
	wanted := *br.NFCall
	br.NFCall = nil
	if !wanted {
		return nil
	}
	return &tombolo.OpError{Op: "ensure bridge", Object: br.Name,
		Err: fmt.Errorf("%w: the kernel was built without CONFIG_BRIDGE_NETFILTER", ErrNoNetfilter)}
}

// correctBridge brings l to what br asks for. The kernel does not say whether a
// bridge's MAC is pinned already, so the caller has to.
func (c *Conn) correctBridge(ctx context.Context, br Bridge, l *Link, pinned bool) (bool, error) {
	changed := len(br.Differences(l)) > 0
	if !changed && pinned {
		return false, nil
	}
	var b nl.Batch
	r := link.Request{Index: l.Index, MTU: new(cmp.Or(br.MTU, l.MTU))}
	r.Flags, r.Change = br.setFlags()
	mac := l.MAC
	if br.MAC != nil {
		mac = br.MAC
	}
	if !pinned || !bytes.Equal(mac, l.MAC) {
		// To write the address that it has pins it, and flushes its neighbours.
		r.MAC = mac
	}
	if br.NFCall != nil || br.limits(l) || br.VLANFiltering {
		var data driver.Bridge
		if br.NFCall != nil {
			data.NfCallIptables, data.NfCallIp6tables = enable(*br.NFCall), enable(*br.NFCall)
		}
		if br.limits(l) {
			data.FdbMaxLearned = &br.MaxLearned
		}
		if br.VLANFiltering {
			data.VlanFiltering, data.VlanProtocol = enable(true), new(driver.VlanProtocol8021Q)
		}
		r.Data = &data
	}
	r.Set(&b, "set bridge", br.Name)
	err := c.execute(ctx, &b)
	return changed && err == nil, err
}

// setFlags gives the flags, and which of them to change.
func (br *Bridge) setFlags() (flags, change uint32) {
	flags, change = unix.IFF_UP, unix.IFF_UP
	if br.Promiscuous != nil {
		change |= unix.IFF_PROMISC
		if *br.Promiscuous {
			flags |= unix.IFF_PROMISC
		}
	}
	return flags, change
}

// limits says whether br asks for a limit that the kernel has.
func (br *Bridge) limits(l *Link) bool { return br.MaxLearned != 0 && l.Bridge.MaxLearned != nil }

// Remove deletes a bridge, and lets its ports go. One that is not there is
// success; another kind of link of the name is ErrNotBridge, and stays.
func (c *Conn) Remove(ctx context.Context, name string) error {
	l, err := c.bridgeNamed(ctx, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if l.Kind != "bridge" {
		return &tombolo.OpError{Op: "delete bridge", Object: name, Err: ErrNotBridge}
	}
	var b nl.Batch
	link.Request{Index: l.Index}.Delete(&b, l.Name)
	if err := c.execute(ctx, &b); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Enslave makes the link port.Name a port of port.Bridge, and sets it up: for a port that
// was taken off its bridge, or whose bridge was made anew. The link gets the flags and the
// alias of port, and its MAC and MTU if port has them; it loses other flags, hairpin too. A
// link that is a port of the bridge already goes on forwarding. The peer is left alone.
// StaticFDB needs PeerMAC. It takes one sendmsg if BridgeIndex is given, two more with
// StaticFDB.
func (c *Conn) Enslave(ctx context.Context, port Port) error {
	if err := checkName(port.Name); err != nil {
		return &tombolo.OpError{Op: "enslave", Object: port.Name, Err: err}
	}
	if port.StaticFDB && len(port.PeerMAC) != 6 {
		return &tombolo.OpError{Op: "enslave", Object: port.Name, Err: fmt.Errorf("%w: a static entry without the MAC that it is for", tombolo.ErrInvalid)}
	}
	if port.BridgeIndex == 0 {
		l, err := c.bridgeNamed(ctx, port.Bridge)
		if err != nil {
			return err
		}
		port.BridgeIndex = l.Index
	}
	var b nl.Batch
	if err := c.downUnlessPort(ctx, &b, &port); err != nil {
		return err
	}
	link.Request{Name: port.Name, Master: &port.BridgeIndex}.Set(&b, "enslave", port.Name)
	if err := c.configure(ctx, &b, &port, false); err != nil {
		return err
	}
	if err := c.setUp(ctx, &port, nil); err != nil {
		return err
	}
	if err := c.refuseIPv6(port.Name); err != nil || !port.StaticFDB {
		return err
	}
	l, err := c.Link(ctx, port.Name)
	if err != nil {
		return err
	}
	return c.addStaticFDB(ctx, &port, l.Index)
}

func describeKind(l *Link) string {
	if l.Kind == "" {
		return "a physical or a loopback interface"
	}
	return "of kind " + l.Kind
}

// Probe asks the kernel whether it makes bridges and veth pairs, without making any.
func (c *Conn) Probe() error {
	for _, kind := range []string{"bridge", "veth"} {
		if err := link.Probe(c.nl, kind); err != nil {
			return err
		}
	}
	return nil
}

// ErrNoNetfilter is the cause where a bridge is to show its packets to the firewall
// (Bridge.NFCall) and this kernel, in its present state, has nothing that does so.
var ErrNoNetfilter = errors.New("bridged packets do not pass the firewall")

// ProbeNetfilter asks whether the kernel module br_netfilter is there, without which
// NFCall has no effect: nil, or an ErrNoNetfilter that says what to do. Nothing here
// loads the module; once it is loaded, it acts on bridges that were there before.
func ProbeNetfilter() error { return probeNetfilter(sysctl.Exists) }

// probeNetfilter looks for what comes with the module, in each namespace (Linux 5.3).
func probeNetfilter(exists func(path string) bool) error {
	if exists("net/bridge/bridge-nf-call-iptables") {
		return nil
	}
	return &tombolo.OpError{Op: "find the kernel module", Object: "br_netfilter", Err: fmt.Errorf(
		"%w: it is not loaded; run modprobe br_netfilter, and name it in a file in /etc/modules-load.d, so that it is loaded at boot",
		ErrNoNetfilter)}
}
