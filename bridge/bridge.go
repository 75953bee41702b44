package bridge

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strings"

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
	// MAC is the bridge's own MAC. Nil keeps the MAC of an existing bridge, and gives a new one a random MAC. Either
	// way the MAC is pinned. Otherwise a bridge takes the lowest MAC among its ports, and invalidates its neighbours'
	// caches as ports come and go.
	MAC net.HardwareAddr
	// MTU, in bytes, is pinned too, and does not follow the ports. 0 keeps the MTU of an existing bridge, and means
	// 1500 for a new one.
	MTU int
	// Alias is set on a new bridge, and marks its owner, in at most 255 bytes. An existing bridge keeps its alias. If
	// the alias matches, Ensure knows that it created the bridge and pinned its MAC. For other bridges, each Ensure
	// pins the MAC again, and the kernel then drops the bridge's neighbours. So set it, unless the bridge is another
	// program's.
	Alias string
	// NoIPv6 creates a new bridge without a link-local address, for networks without IPv6.
	NoIPv6 bool
	// Promiscuous makes the bridge pass all frames to the host, for any destination (IFF_PROMISC). It replaces
	// hairpin ports. With NFCall, packets from pods to a service on their own node then arrive twice, unless rules
	// drop the copies. Nil changes nothing; it is off on a new bridge.
	Promiscuous *bool
	// NFCall makes this bridge pass its IPv4 and IPv6 packets through the firewall (IFLA_BR_NF_CALL_IPTABLES and
	// IFLA_BR_NF_CALL_IP6TABLES). Without it, packets between pods skip connection tracking, and a service's replies
	// come from the wrong address. Nil changes nothing; it is off on a new bridge.
	//
	// It needs the kernel module br_netfilter, and has no effect without it: see ProbeNetfilter. False has no effect
	// while the parameters net.bridge.bridge-nf-call-iptables and -ip6tables are on, which apply to all bridges. The
	// kernel turns them on in each new namespace once br_netfilter is loaded. While packets pass the firewall, a pod
	// that calls its own published port needs Port.Hairpin.
	NFCall *bool
	// VLANFiltering makes the bridge separate VLANs, as Port.VLAN requires. False changes nothing; it is off on a new
	// bridge. Existing ports stay in the default VLAN, and from then on the bridge drops their tagged frames.
	VLANFiltering bool
	// MaxLearned is the number of MACs that the bridge learns from its ports (IFLA_BR_FDB_MAX_LEARNED, Linux 6.7;
	// older kernels have no limit). Without a limit, a sender with ever new MACs fills the host's memory. Frames to a
	// MAC that did not fit go to all ports. 0 changes nothing; a new bridge has no limit.
	MaxLearned uint32
}

// ErrNotBridge is the cause of an error of Ensure if another kind of link has the name.
var ErrNotBridge = errors.New("the link is not a bridge")

// Ensure creates the bridge if it is missing, configures it, and reports whether it changed anything. Conn.Link
// returns its index. Several callers may call Ensure at once.
//
// The spanning tree protocol stays off, as it is on a new bridge, so that a port forwards as soon as it has a
// carrier.
//
// If the kernel refuses a property of a new bridge, there is no bridge afterwards. Without support for VLANFiltering,
// the error matches vlan.ErrUnsupported.
//
// For a bridge that Ensure itself created (see Alias) and that is right, it sends one request; for another program's,
// two. If NFCall is requested and the kernel was built without br_netfilter, Ensure does everything else and returns
// ErrNoNetfilter. It needs CAP_NET_ADMIN.
func (c *Conn) Ensure(ctx context.Context, br Bridge) (changed bool, _ error) {
	if err := br.validate(); err != nil {
		return false, &tombolo.OpError{Op: "ensure bridge", Object: br.Name, Err: err}
	}

	l, err := c.bridgeNamed(ctx, br.Name)
	created := false
	if errors.Is(err, fs.ErrNotExist) {
		if err = c.createBridge(ctx, br); err == nil {
			ctx = context.WithoutCancel(ctx) // leave no half of a bridge behind
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
		return created, c.explainVLANs(ctx, &br, err)
	}

	if l.Kind != "bridge" {
		return created, &tombolo.OpError{Op: "ensure bridge", Object: br.Name, Err: fmt.Errorf(
			"%w: it is %s; choose another name for the bridge, or delete the link", ErrNotBridge, describeKind(l))}
	}

	refused := br.refuseNFCall(l)
	pinned := br.Alias != "" && br.Alias == l.Alias && !created
	changed, err = c.correctBridge(ctx, br, l, pinned)
	return created || changed, cmp.Or(c.explainVLANs(ctx, &br, err), refused)
}

// explainVLANs adds vlan.ErrUnsupported to an error of the kernel if VLANFiltering is its cause.
func (c *Conn) explainVLANs(ctx context.Context, br *Bridge, err error) error {
	if br.VLANFiltering && errors.Is(err, unix.EOPNOTSUPP) {
		return errors.Join(err, c.VLANs().Probe(ctx))
	}
	return err
}

func (br *Bridge) validate() error {
	if err := checkName(br.Name); err != nil {
		return err
	}
	if len(br.Alias) > aliasMax || strings.ContainsRune(br.Alias, 0) {
		return fmt.Errorf("%w: alias %q: want at most %d bytes and no NUL", tombolo.ErrInvalid, br.Alias, aliasMax)
	}
	if br.MTU != 0 && (br.MTU < leastMTU || br.MTU > mostMTU) {
		return fmt.Errorf("%w: an MTU of %d, where %d to %d are possible: %w", tombolo.ErrInvalid, br.MTU, leastMTU,
			mostMTU, unix.EINVAL)
	}
	if br.MAC != nil && (len(br.MAC) != 6 || br.MAC[0]&1 != 0) {
		return fmt.Errorf("%w: %s is not a unicast MAC", tombolo.ErrInvalid, br.MAC)
	}
	return nil
}

// MTUs of a bridge, in bytes: ETH_MIN_MTU and ETH_MAX_MTU of include/uapi/linux/if_ether.h.
const leastMTU, mostMTU = 68, 65535

// unfinishedGroup is the link group of a bridge between its creation and the request for settings that the creating
// request does not accept. If a caller is killed in between, the next one recognizes the bridge by this group and
// finishes it. It would otherwise look like another program's bridge.
const unfinishedGroup = 29808

// Unfinished reports whether the link is a bridge that a Conn.Ensure is still creating, or was killed while creating.
// It has no alias yet, and Ensure finishes it.
func (l *Link) Unfinished() bool { return l != nil && l.Kind == "bridge" && l.Group == unfinishedGroup }

// createBridge creates a bridge, which finish completes. If another caller has created it first, that is no error.
func (c *Conn) createBridge(ctx context.Context, br Bridge) error {
	if br.MAC == nil {
		br.MAC = ident.RandomMAC()
	}

	// If the kernel refuses the data, it creates no bridge.
	r := link.Request{Name: br.Name, MAC: br.MAC, MTU: new(otherMTU(br.newMTU())), Kind: "bridge",
		Group: new(uint32(unfinishedGroup))}
	if br.VLANFiltering {
		r.Data = &driver.Bridge{VlanFiltering: enable(true), VlanProtocol: new(driver.VlanProtocol8021Q)}
	}

	var b nl.Batch
	r.Create(&b, "add bridge", br.Name)
	err := c.nl.Do(ctx, &b)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// finish sets the properties that the creating request cannot: the alias, and whether the bridge gets a link-local
// address. It must run before the bridge is up. Several callers may run it at once.
func (c *Conn) finish(ctx context.Context, br *Bridge, index int) error {
	noIPv6 := br.NoIPv6 && hasIPv6(otherMTU(br.newMTU()))
	err := c.setNew(ctx, br, index, noIPv6)
	if noIPv6 && errors.Is(err, unix.EAFNOSUPPORT) {
		err = c.setNew(ctx, br, index, false) // the kernel has no IPv6
	}
	return err
}

// setNew sets the alias and takes the bridge out of unfinishedGroup. It uses the index. If it used the name of a link
// that is gone, the kernel would apply a request with a group to all links of that group.
func (c *Conn) setNew(ctx context.Context, br *Bridge, index int, noIPv6 bool) error {
	var b nl.Batch
	r := link.Request{Index: index, Group: new(uint32(0)), NoLinkLocal: noIPv6}
	if br.Alias != "" {
		r.Alias = &br.Alias
	}
	r.Set(&b, "set bridge", br.Name)
	return c.nl.Do(ctx, &b)
}

// newMTU returns the MTU of a new bridge.
func (br *Bridge) newMTU() int {
	return cmp.Or(br.MTU, 1500)
}

// otherMTU returns an MTU that differs from mtu. A bridge's MTU follows the lowest among its ports until somebody
// changes it. Neither an MTU given at creation nor setting the present one counts as a change. So a bridge is created
// with another MTU.
func otherMTU(mtu int) int {
	if mtu > ipv6MinMTU {
		return mtu - 1
	}
	return mtu + 1
}

// refuseNFCall clears br.NFCall if the kernel would ignore it, and returns an error if it was true.
func (br *Bridge) refuseNFCall(l *Link) error {
	if br.NFCall == nil || l.Bridge.netfilter {
		return nil
	}
	expected := *br.NFCall
	br.NFCall = nil
	if !expected {
		return nil
	}
	return &tombolo.OpError{Op: "ensure bridge", Object: br.Name,
		Err: fmt.Errorf("%w: the kernel was built without CONFIG_BRIDGE_NETFILTER", ErrNoNetfilter)}
}

// correctBridge changes l to match br. The kernel does not tell whether a bridge's MAC is pinned, so the caller must.
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
		// Writing the bridge's own MAC pins it, and flushes its neighbours.
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
	err := c.nl.Do(ctx, &b)
	return changed && err == nil, err
}

// setFlags returns the flags, and a mask of those to change.
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

// limits reports whether br requests a limit and the kernel supports it.
func (br *Bridge) limits(l *Link) bool { return br.MaxLearned != 0 && l.Bridge.MaxLearned != nil }

// Remove deletes a bridge, which releases its ports. A missing bridge is no error. If another kind of link has the
// name, the error is ErrNotBridge.
func (c *Conn) Remove(ctx context.Context, name string) error {
	l, err := c.bridgeNamed(ctx, name)
	if err != nil {
		return nl.PassAbsent(err)
	}

	if l.Kind != "bridge" {
		return &tombolo.OpError{Op: "delete bridge", Object: name, Err: ErrNotBridge}
	}

	var b nl.Batch
	link.Request{Index: l.Index}.Delete(&b, l.Name)
	return nl.PassAbsent(c.nl.Do(ctx, &b))
}

// Enslave makes the link port.Name a port of port.Bridge, and sets it up. It is for a port that was taken off its
// bridge, or whose bridge was created again. The link gets the flags and the alias of port, and its MAC and MTU if
// port has them. Other flags, such as hairpin, are cleared. If the link is a port of the bridge already, it goes on
// forwarding. The peer is not changed. StaticFDB requires PeerMAC. Enslave needs one sendmsg if BridgeIndex is given,
// and two more with StaticFDB.
func (c *Conn) Enslave(ctx context.Context, port Port) error {
	if err := checkName(port.Name); err != nil {
		return &tombolo.OpError{Op: "enslave", Object: port.Name, Err: err}
	}

	if port.StaticFDB && len(port.PeerMAC) != 6 {
		return &tombolo.OpError{Op: "enslave", Object: port.Name,
			Err: fmt.Errorf("%w: a static entry without the MAC that it is for", tombolo.ErrInvalid)}
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

// Probe returns an error if the kernel does not support bridges and veth pairs. It creates none.
func (c *Conn) Probe() error {
	for _, kind := range []string{"bridge", "veth"} {
		if err := link.Probe(c.nl, kind); err != nil {
			return err
		}
	}
	return nil
}

// ErrNoNetfilter is the cause of an error if a bridge is to pass its packets through the firewall (Bridge.NFCall) and
// the kernel, in its present state, is unable to.
var ErrNoNetfilter = errors.New("bridged packets do not pass the firewall")

// ProbeNetfilter returns an ErrNoNetfilter with advice unless the kernel module br_netfilter is loaded, without which
// NFCall has no effect. Nothing here loads the module. Once loaded, it also acts on existing bridges.
func ProbeNetfilter() error { return probeNetfilter(sysctl.Exists) }

// probeNetfilter looks for a parameter that the module adds in each namespace (Linux 5.3).
func probeNetfilter(exists func(path string) bool) error {
	if exists("net/bridge/bridge-nf-call-iptables") {
		return nil
	}
	return &tombolo.OpError{Op: "find the kernel module", Object: "br_netfilter", Err: fmt.Errorf(
		"%w: it is not loaded; run modprobe br_netfilter, and name it in a file in /etc/modules-load.d, so that it "+
			"is loaded at boot",
		ErrNoNetfilter)}
}
