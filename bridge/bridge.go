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
	// Name is the name of the bridge, of 1 to 15 bytes.
	Name string
	// MAC is the bridge's own MAC. If nil, an existing bridge keeps its MAC, and a new bridge gets a random one. Ensure
	// always pins the MAC. A MAC that is not pinned is the lowest MAC of the bridge's ports. It changes as ports come
	// and go, and then neighbours have an outdated MAC in their caches.
	MAC net.HardwareAddr
	// MTU is the MTU in bytes. The MTU of a new bridge does not follow the MTUs of its ports. If 0, an existing
	// bridge keeps its MTU, and a new one gets 1500.
	MTU int
	// Alias marks the owner of a new bridge, in at most 255 bytes. An existing bridge keeps its alias. If an existing
	// bridge has this alias, Ensure knows that it pinned the MAC earlier. For other bridges, each Ensure pins the MAC
	// again, and the kernel then drops the bridge's neighbour entries. So set Alias, unless the bridge belongs to
	// another program.
	Alias string
	// NoIPv6 makes Ensure create a new bridge without a link-local address. It is for bridges on which the host uses no
	// IPv6.
	NoIPv6 bool
	// Promiscuous makes the bridge pass all frames to the host, whatever their destination (IFF_PROMISC). Like
	// Port.Hairpin, it lets a pod reach itself through a service. Together with NFCall, packets from pods to a service
	// on their own node arrive twice, unless rules drop the copies (nft.Dedup). Nil leaves an existing bridge
	// unchanged. On a new bridge it is off.
	Promiscuous *bool
	// NFCall makes the bridge pass its IPv4 and IPv6 packets through the firewall (IFLA_BR_NF_CALL_IPTABLES and
	// IFLA_BR_NF_CALL_IP6TABLES). Without it, packets between pods skip connection tracking, so replies of a service
	// come from the wrong address. Nil leaves an existing bridge unchanged. On a new bridge it is off.
	//
	// NFCall needs the kernel module br_netfilter, and has no effect without it: see ProbeNetfilter. False has no
	// effect while the sysctls net.bridge.bridge-nf-call-iptables and -ip6tables are on, which apply to all bridges.
	// The kernel turns them on in all network namespaces when br_netfilter is loaded, and later in each new one. While
	// packets pass the firewall, a pod that calls its own published port needs Port.Hairpin.
	NFCall *bool
	// VLANFiltering makes the bridge separate VLANs, as Port.VLAN requires. Existing ports stay in the default VLAN,
	// but the bridge drops their tagged frames from then on. With false, an existing bridge stays unchanged, and a new
	// bridge does not filter VLANs.
	VLANFiltering bool
	// MaxLearned is the maximum number of MACs that the bridge learns from its ports (IFLA_BR_FDB_MAX_LEARNED, Linux
	// 6.7). Older kernels have no limit. Without a limit, a sender that keeps changing its MAC can fill the host's
	// memory. The bridge floods frames to MACs that it could not learn. 0 leaves an existing bridge unchanged. A new
	// bridge then has no limit.
	MaxLearned uint32
}

// ErrNotBridge is wrapped by the errors of Ensure and Remove if a link with the bridge's name is of another kind.
var ErrNotBridge = errors.New("the link is not a bridge")

// Ensure creates the bridge if it is missing, or corrects it, and reports whether it did either. Conn.Link returns the
// bridge's index. Several callers may call Ensure at once.
//
// Ensure does not change the spanning tree protocol. On a new bridge it is off, so a port forwards as soon as it has a
// carrier.
//
// If a link with the name is of another kind, the error matches ErrNotBridge. If the kernel does not support
// VLANFiltering, Ensure creates no bridge, and the error matches vlan.ErrUnsupported.
//
// If nothing differs, Ensure sends one request for a bridge with br.Alias, and two for another bridge. If NFCall is
// requested and the kernel was built without br_netfilter, Ensure does everything else and returns an error that
// matches ErrNoNetfilter. Ensure needs CAP_NET_ADMIN.
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
	switch {
	case len(br.Alias) > aliasMax || strings.ContainsRune(br.Alias, 0):
		return fmt.Errorf("%w: alias %q: want at most %d bytes and no NUL", tombolo.ErrInvalid, br.Alias, aliasMax)
	case br.MTU != 0 && (br.MTU < leastMTU || br.MTU > mostMTU):
		return fmt.Errorf("%w: an MTU of %d, where %d to %d are possible: %w", tombolo.ErrInvalid, br.MTU, leastMTU,
			mostMTU, unix.EINVAL)
	}
	return cmp.Or(checkName(br.Name), checkMACs(br.MAC))
}

// checkMACs returns an error if a MAC is not a unicast MAC. It permits nil.
func checkMACs(list ...net.HardwareAddr) error {
	for _, mac := range list {
		if mac != nil && (len(mac) != 6 || mac[0]&1 != 0) {
			return fmt.Errorf("%w: %s is not a unicast MAC", tombolo.ErrInvalid, mac)
		}
	}
	return nil
}

// leastMTU and mostMTU are the limits of a bridge's MTU, in bytes: ETH_MIN_MTU and ETH_MAX_MTU of
// include/uapi/linux/if_ether.h.
const leastMTU, mostMTU = 68, 65535

// unfinishedGroup is the link group of a bridge between the two requests of createBridge and finish. Two requests are
// necessary, because the kernel does not accept all settings in one. If a caller is killed in between, the next
// caller recognizes the bridge by this group and finishes it. Without the group, the bridge would look like another
// program's.
const unfinishedGroup = 29808

// Unfinished reports whether the link is a bridge that Ensure has not finished creating, because Ensure is still
// running, failed or was killed. Such a bridge has no alias yet. The next Ensure finishes it.
func (l *Link) Unfinished() bool { return l != nil && l.Kind == "bridge" && l.Group == unfinishedGroup }

// createBridge creates the bridge in unfinishedGroup. The bridge is down and has a provisional MTU (differentMTU).
// Ensure adds the other settings with finish and correctBridge. It is no error if another caller has just created it.
func (c *Conn) createBridge(ctx context.Context, br Bridge) error {
	if br.MAC == nil {
		br.MAC = ident.RandomMAC()
	}

	// VLANFiltering is part of this request. So if the kernel refuses it, the kernel creates no bridge.
	r := link.Request{Name: br.Name, MAC: br.MAC, MTU: new(differentMTU(br.newMTU())), Kind: "bridge",
		Group: new(uint32(unfinishedGroup))}
	if br.VLANFiltering {
		r.Data = &driver.Bridge{VlanFiltering: optionalBool(true), VlanProtocol: new(driver.VlanProtocol8021Q)}
	}

	var b nl.Batch
	r.Create(&b, "add bridge", br.Name)
	err := c.nl.Do(ctx, &b)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// finish sets properties that the request to create a bridge does not accept: the alias, and NoIPv6. It also removes
// the bridge from unfinishedGroup. finish must run while the bridge is still down. Several callers may run it at the
// same time.
func (c *Conn) finish(ctx context.Context, br *Bridge, index int) error {
	// Identify the bridge by index, since another link may have the name by now.
	r := link.Request{Index: index, Group: new(uint32(0)),
		NoLinkLocal: br.NoIPv6 && hasIPv6(differentMTU(br.newMTU()))}
	if br.Alias != "" {
		r.Alias = &br.Alias
	}

	err := r.Apply(ctx, c.nl, "set bridge", br.Name)
	if r.NoLinkLocal && errors.Is(err, unix.EAFNOSUPPORT) {
		r.NoLinkLocal = false // the kernel has no IPv6
		err = r.Apply(ctx, c.nl, "set bridge", br.Name)
	}
	return err
}

func (br *Bridge) newMTU() int {
	return cmp.Or(br.MTU, 1500)
}

// differentMTU returns an MTU that differs from mtu by 1. A new bridge is created with this MTU, so that setting the
// real MTU later is a change. Only such a change pins the MTU. An MTU that is not pinned follows the lowest MTU of
// the bridge's ports.
func differentMTU(mtu int) int {
	if mtu > ipv6MinMTU {
		return mtu - 1
	}
	return mtu + 1
}

// refuseNFCall sets br.NFCall to nil if the kernel does not support it. If br.NFCall was true, refuseNFCall returns an
// error that matches ErrNoNetfilter.
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

// correctBridge changes the bridge l so that it matches br, and reports whether it corrected a difference. pinned
// states that the bridge's MAC was set explicitly, so that it does not follow the ports. Netlink does not report this.
// If pinned is false, correctBridge also writes the MAC, which counts as no difference.
func (c *Conn) correctBridge(ctx context.Context, br Bridge, l *Link, pinned bool) (bool, error) {
	changed := len(br.Differences(l)) > 0
	if !changed && pinned {
		return false, nil
	}

	r := link.Request{Index: l.Index, MTU: new(cmp.Or(br.MTU, l.MTU))}
	r.Flags, r.Change = unix.IFF_UP, unix.IFF_UP
	if br.Promiscuous != nil {
		r.Change |= unix.IFF_PROMISC
		if *br.Promiscuous {
			r.Flags |= unix.IFF_PROMISC
		}
	}

	mac := l.MAC
	if br.MAC != nil {
		mac = br.MAC
	}

	if !pinned || !bytes.Equal(mac, l.MAC) {
		// Writing the bridge's own MAC pins it, and deletes the bridge's neighbour entries.
		r.MAC = mac
	}

	if br.NFCall != nil || br.setsMaxLearned(l) || br.VLANFiltering {
		var data driver.Bridge
		if br.NFCall != nil {
			data.NfCallIptables, data.NfCallIp6tables = optionalBool(*br.NFCall), optionalBool(*br.NFCall)
		}

		if br.setsMaxLearned(l) {
			data.FdbMaxLearned = &br.MaxLearned
		}

		if br.VLANFiltering {
			data.VlanFiltering, data.VlanProtocol = optionalBool(true), new(driver.VlanProtocol8021Q)
		}
		r.Data = &data
	}

	err := r.Apply(ctx, c.nl, "set bridge", br.Name)

	return changed && err == nil, err
}

// setsMaxLearned reports whether br requests MaxLearned and the kernel supports it.
func (br *Bridge) setsMaxLearned(l *Link) bool {
	return br.MaxLearned != 0 && l.Bridge.MaxLearned != nil
}

// Remove deletes a bridge. Its ports stay, but without a bridge. It is no error if the bridge does not exist. If a
// link with the name is of another kind, the error matches ErrNotBridge.
func (c *Conn) Remove(ctx context.Context, name string) error {
	l, err := c.bridgeNamed(ctx, name)
	if err != nil {
		return nl.PassAbsent(err)
	}

	if l.Kind != "bridge" {
		return &tombolo.OpError{Op: "delete bridge", Object: name, Err: ErrNotBridge}
	}

	return link.Delete(ctx, c.nl, l.Index, l.Name)
}

// Enslave makes the existing link port.Name a port of port.Bridge, and sets the link up. Use it for a port that lost
// its bridge, or whose bridge was created again. The link gets the port flags of port, and also port.VLAN, port.Alias,
// port.MAC and port.MTU if they are set. Port flags that port does not set, such as hairpin, are cleared. Static
// entries of the forwarding database stay, even without StaticFDB. A link that is already a port of the bridge keeps
// forwarding. Enslave does not change the peer. StaticFDB requires PeerMAC. Without VLAN and StaticFDB, and with
// BridgeIndex, Enslave needs one sendmsg.
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
	if err := c.setDownUnlessPort(ctx, &b, &port); err != nil {
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

// Probe returns an error if the kernel does not support bridges or veth pairs. It creates no links.
func (c *Conn) Probe() error {
	return cmp.Or(link.Probe(c.nl, "bridge"), link.Probe(c.nl, "veth"))
}

// ErrNoNetfilter is wrapped by errors about Bridge.NFCall if the kernel cannot pass bridged packets through the
// firewall. The kernel was built without br_netfilter, or has not loaded it.
var ErrNoNetfilter = errors.New("bridged packets do not pass the firewall")

// ProbeNetfilter returns an error that matches ErrNoNetfilter if the kernel module br_netfilter is not loaded. The
// error text explains how to load it. NFCall has no effect without this module. This package never loads the module.
// When the module is loaded later, NFCall also takes effect on existing bridges.
func ProbeNetfilter() error { return probeNetfilter(sysctl.Exists) }

// probeNetfilter does the work of ProbeNetfilter. It looks for a sysctl that the module adds to each network namespace
// (Linux 5.3). exists reports whether the sysctl with the given path exists.
func probeNetfilter(exists func(path string) bool) error {
	if exists("net/bridge/bridge-nf-call-iptables") {
		return nil
	}
	return &tombolo.OpError{Op: "find the kernel module", Object: "br_netfilter", Err: fmt.Errorf(
		"%w: it is not loaded; run modprobe br_netfilter, and name it in a file in /etc/modules-load.d, so that it "+
			"is loaded at boot",
		ErrNoNetfilter)}
}
