package network

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// bridgePart implements part for the network's bridge. On another program's bridge, it sets only the properties that
// the configuration requests, sets the bridge up, and pins its MAC (bridge.Bridge).
type bridgePart struct{}

// requestedBridge returns the bridge with the properties that the network's record requests.
func (n *site) requestedBridge() bridge.Bridge {
	mtu := n.rec.MTU
	if n.rec.Uplink != "" {
		mtu = 0 // keep the bridge's MTU: the bridge carries the LAN's frames, and the LAN determines it
	}
	return bridge.Bridge{
		Name: n.rec.Bridge, MTU: mtu, Promiscuous: n.rec.Promiscuous, NFCall: n.rec.NFCall,
		VLANFiltering: !n.rec.VLAN.IsZero(), MaxLearned: learnedLimit(n.bridge),
	}
}

// adaptToOthers changes want so that it also meets the needs of the other networks on the bridge. want gets the largest
// MTU of the networks without an uplink. Promiscuous and NFCall are on if one network needs them. Without this, each
// network would undo the settings of another.
func (n *site) adaptToOthers(want *bridge.Bridge) error {
	others, err := sharers(n.s, n.rec)
	for _, o := range others {
		if o.Epoch != n.rec.Epoch {
			continue
		}
		if want.MTU != 0 && o.Uplink == "" {
			want.MTU = max(want.MTU, o.MTU)
		}
		want.Promiscuous = combineSettings(want.Promiscuous, o.Promiscuous)
		want.NFCall = combineSettings(want.NFCall, o.NFCall)
	}
	return err
}

// combineSettings combines the settings of two networks on one bridge. It returns other if that is on, and otherwise
// own.
func combineSettings(own, other *bool) *bool {
	if other != nil && *other {
		return other
	}
	return own
}

func (bridgePart) look(ctx context.Context, n *site) error {
	want, remedy := n.requestedBridge(), tombolo.RemedyRepair
	if n.bridge.Index == 0 {
		if text, err := n.describeRename(ctx); err != nil {
			return err
		} else if text != "" && !n.quick {
			n.found.list = append(n.found.list, tombolo.Difference{Object: "bridge " + n.rec.Bridge, What: "link",
				Want: n.rec.Bridge, Text: text, Remedy: tombolo.RemedyConfigure})
			return nil
		}

		n.found.addAll(want.Differences(nil), remedy)
		return nil
	}

	if n.bridge.Bridge == nil {
		remedy = tombolo.RemedyConfigure // the name belongs to another link
	}

	diffs := want.Differences(n.bridge)
	if len(diffs) > 0 {
		if err := n.adaptToOthers(&want); err != nil {
			return err
		}
		diffs = want.Differences(n.bridge)
	}

	n.found.addAll(diffs, remedy)
	if n.quick || n.rec.NFCall == nil || !*n.rec.NFCall {
		return nil
	}

	if err := bridge.ProbeNetfilter(); err != nil {
		n.found.advise(tombolo.RemedyConfigure, "%v", err)
	}

	return nil
}

func (bridgePart) make(ctx context.Context, n *site) (changed bool, _ error) {
	var err error
	if n.bridge, err = n.s.link(ctx, n.rec.Bridge); err != nil {
		return false, err
	}

	want, isNew := n.requestedBridge(), n.bridge.Index == 0
	if text, err := n.describeRename(ctx); err != nil {
		return false, err
	} else if text != "" {
		return false, failf(ErrNoLink, "%s", text)
	}

	want.Alias, want.NoIPv6 = endpoint.BridgeAlias, true
	if isNew {
		want.MAC, want.MaxLearned = bridgeMAC(n.s.Epoch.Token(), n.rec.Bridge), maxLearned
	} else if l := n.bridge; want.VLANFiltering && l.Bridge != nil && !l.Bridge.VLANFiltering && !l.Unfinished() &&
		l.Alias != endpoint.BridgeAlias {
		return false,
			failf(ErrNoLink,
				"bridge %s does not keep VLANs apart, and Tombolo did not make it: ip link set %s type bridge "+
					"vlan_filtering 1 vlan_protocol 802.1Q, if no port of it needs tagged frames of VLANs that it is "+
					"not in",
				l.Name, l.Name)
	}

	if err := n.adaptToOthers(&want); err != nil {
		return false, err
	}

	changed, err = n.s.Links.Ensure(ctx, want)
	if errors.Is(err, bridge.ErrNoNetfilter) {
		// Only NFCall failed. Warn, and drop it from the record, so that later calls do not request it again.
		n.s.warn(err.Error())
		n.rec.NFCall, err = nil, nil
	}

	if err == nil {
		n.bridge, err = n.s.Links.Link(ctx, want.Name)
	}

	if err != nil {
		return changed, err
	}

	if isNew && len(n.rec.Gateways) > 0 {
		n.s.placeLoopback(ctx, n.bridge)
	}

	if n.bridge.Alias == endpoint.BridgeAlias {
		n.shieldFromNetworkd()
	}
	return changed, nil
}

// describeRename returns a text with advice if an operator has renamed the network's bridge: another bridge has the
// network's ports while no link has the recorded name. In all other cases it returns "".
func (n *site) describeRename(ctx context.Context) (string, error) {
	for _, a := range n.attachments {
		if n.bridge.Index != 0 || a.State != state.Ready {
			continue
		}

		port, err := n.s.link(ctx, a.HostIf)
		if err != nil {
			return "", err
		}

		if port.Master == 0 {
			continue
		}

		l, err := n.s.Links.LinkByIndex(ctx, port.Master)
		if err == nil && l.Kind == "bridge" {
			return fmt.Sprintf("bridge %[1]s is missing, and its ports are on bridge %[2]s, as if it had been "+
				"renamed; this helps: ip link set %[2]s down; ip link set %[2]s name %[1]s; ip link set %[1]s up; "+
				"tombolo repair", n.rec.Bridge, l.Name), nil
		}

		if nl.PassAbsent(err) != nil {
			return "", err
		}
	}

	return "", nil
}

const ipv6MTU = 1280 // RFC 8200, section 5

// chooseBridge chooses values for the settings in the record that the configuration leaves open. Another program's
// bridge keeps its settings, since it must not be changed without a request. With an uplink, the MTU is the NIC's. Our
// own bridge gets the default settings, and w.DefaultMTU or, if that is 0, the MTU of the default route's link.
func (w *requirement) chooseBridge(ctx context.Context, s *session, rec *state.Network) error {
	l, err := s.link(ctx, rec.Bridge)
	if err != nil {
		return err
	}

	// Regard a bridge whose creation was interrupted as missing, since it has neither its alias nor its MTU yet
	// (bridge.Conn.Ensure).
	foreign := l.Index != 0 && !l.Unfinished() && l.Kind == "bridge" && l.Alias != endpoint.BridgeAlias
	switch {
	case rec.MTU != 0:
	case rec.Uplink != "":
		nic, err := s.shares().Find(ctx, shareOf(rec))
		if err != nil {
			return err
		}
		rec.MTU = nic.MTU
	case foreign:
		rec.MTU = l.MTU
	}

	if foreign {
		return nil
	}

	rec.Promiscuous, rec.NFCall = cmp.Or(rec.Promiscuous, new(bool)), cmp.Or(rec.NFCall, new(w.Routed))
	if rec.MTU = cmp.Or(rec.MTU, w.DefaultMTU); rec.MTU == 0 {
		rec.MTU, err = s.Links.DefaultMTU(ctx, rec.Bridge)
	}
	return err
}

// leaveBridge removes the network from its previous bridge, VLAN and uplink, if the configuration now names other ones.
// It deletes the previous bridge if Tombolo created it and nothing else uses it. refuseConflicts has checked that no
// pod loses its bridge.
func leaveBridge(ctx context.Context, s *session, w *requirement) error {
	before, err := s.Dir.LoadNetwork(w.Record.Name)
	if err != nil || before.Epoch != s.Epoch.Token() {
		return nil
	}

	if before.Uplink != w.Record.Uplink || before.GatewayLink() != w.Record.GatewayLink() {
		err = removeShare(ctx, s, before)
	}
	if err == nil && before.GatewayLink() != w.Record.GatewayLink() {
		err = removeBridge(ctx, s, before)
	}
	return err
}

// maxLearned limits how many MACs our bridges learn. It is the size of a large switch's table. Without the options
// macspoofchk, guard and lanGuard, a pod may send frames from any number of MACs. Multicast groups have no limit, since
// mcast_max_groups does not help: the kernel checks it only after it has added the group to the bridge's table.
const maxLearned = 16384

// learnedLimit returns the limit of learned MACs to set on an existing bridge, or 0 to leave the limit unchanged.
// Another program's bridge keeps its limit, and so does a bridge of ours if an operator has set a limit. A bridge whose
// creation was interrupted counts as ours, although it has no alias yet.
func learnedLimit(l *bridge.Link) uint32 {
	if l.Alias != endpoint.BridgeAlias && !l.Unfinished() || l.Bridge == nil || l.Bridge.MaxLearned == nil ||
		*l.Bridge.MaxLearned != 0 {
		return 0
	}
	return maxLearned
}

// bridgeMAC returns the MAC of a new bridge. It depends only on the bridge's name and the epoch, which usually changes
// only with a boot. If a bridge that is created again had a new MAC, pods would send to the old one for half a minute.
func bridgeMAC(epoch, name string) net.HardwareAddr {
	sum := sha256.Sum256([]byte(epoch + " " + name))
	sum[0] = sum[0]&^1 | 2 // unicast, locally administered
	return sum[:6]
}

// defaultVLAN returns the VLAN of ports whose networks have no VLAN setting. On a bridge of ours that separates VLANs,
// this is VLAN 1. On any other bridge it is the zero Membership: there is only one VLAN, or the bridge's owner
// decides.
func defaultVLAN(br *bridge.Link) (m vlan.Membership) {
	if br.Bridge != nil && br.Bridge.VLANFiltering && br.Alias == endpoint.BridgeAlias {
		m.ID = 1
	}
	return m
}

// eachInDefaultVLAN calls the function do for the links that a network without a VLAN setting needs in the default
// VLAN. If the network has a gateway or an uplink, these are the bridge itself and, if it is a port of the bridge, the
// uplink. The links may be in other VLANs too.
func (n *site) eachInDefaultVLAN(ctx context.Context, do func(index int, name string, m vlan.Membership) error) error {
	m := defaultVLAN(n.bridge)
	if m.IsZero() || len(n.rec.Gateways) == 0 && n.rec.Uplink == "" {
		return nil
	}

	m.KeepDefault = true
	if err := do(n.bridge.Index, n.bridge.Name, m); err != nil {
		return err
	}

	nic, err := n.bridgedNIC(ctx)
	if nic == nil || err != nil {
		return nil // uplinkPart reports the missing NIC
	}

	return do(nic.Index, nic.Name, m)
}

// hostVLAN returns the host's link in the VLAN of a network. ok is false if the network has no VLAN.ID, or if the
// host is not its gateway.
func hostVLAN(rec *state.Network, l *bridge.Link) (_ vlan.Link, ok bool) {
	return vlan.Link{Bridge: l.Index, Name: rec.GatewayLink(), ID: rec.VLAN.ID, MTU: l.MTU, MAC: l.MAC,
			Alias: endpoint.BridgeAlias},
		rec.VLAN.ID != 0 && len(rec.Gateways) > 0
}

// taggedVLANs returns the VLANs whose frames have tags on the network's uplink. Frames of the default VLAN have none.
func taggedVLANs(rec *state.Network) vlan.Ranges {
	m := rec.VLAN
	if m.ID != 0 {
		m.Trunk = append(slices.Clip(m.Trunk), vlan.Range{First: m.ID, Last: m.ID})
	}
	return m.Trunk
}

// vlanPart implements part for the host's link in the network's VLAN, and for the VLANs of the bridge itself and of the
// uplink.
type vlanPart struct{}

func (vlanPart) look(ctx context.Context, n *site) error {
	if n.bridge.Index == 0 {
		return nil
	}

	vlans := n.s.Links.VLANs()
	if n.rec.VLAN.IsZero() {
		return n.eachInDefaultVLAN(ctx, func(index int, name string, m vlan.Membership) error {
			diffs, err := vlans.Check(ctx, index, name, m)
			n.found.addAll(diffs, tombolo.RemedyRepair)
			return err
		})
	}

	if want, ok := hostVLAN(n.rec, n.bridge); ok {
		diffs, err := vlans.CheckLink(ctx, want)
		if err != nil {
			return err
		}
		n.found.addAll(diffs, tombolo.RemedyRepair)
	}

	nic, err := n.bridgedNIC(ctx)
	if nic == nil || err != nil {
		return nil // uplinkPart reports the missing NIC
	}

	outside, err := vlans.Outside(ctx, nic.Index, taggedVLANs(n.rec)...)
	if len(outside) > 0 {
		n.found.addAll([]tombolo.Difference{{Object: "uplink " + n.rec.Uplink, What: "VLANs",
			Want: vlan.Ranges(outside).String()}}, tombolo.RemedyRepair)
	}

	return err
}

func (vlanPart) make(ctx context.Context, n *site) (changed bool, _ error) {
	joined, err := ensureVLANs(ctx, n)
	if err == nil {
		err = n.findGatewayLink(ctx)
	}
	if err == nil && joined && n.gatewayLink.Index != n.bridge.Index && n.gatewayLink.Alias == endpoint.BridgeAlias {
		n.s.placeLoopback(ctx, n.gatewayLink)
	}
	return joined, err
}

func ensureVLANs(ctx context.Context, n *site) (changed bool, _ error) {
	vlans := n.s.Links.VLANs()
	if n.rec.VLAN.IsZero() {
		err := n.eachInDefaultVLAN(ctx, func(index int, _ string, m vlan.Membership) error {
			joined, err := vlans.Ensure(ctx, index, m)
			changed = changed || joined
			return err
		})
		return changed, err
	}

	if want, ok := hostVLAN(n.rec, n.bridge); ok {
		var err error
		if changed, err = vlans.EnsureLink(ctx, want); err != nil {
			return false, err
		}
	}

	nic, err := n.bridgedNIC(ctx)
	if nic == nil || err != nil {
		return changed, err
	}

	joined, err := vlans.Join(ctx, nic.Index, taggedVLANs(n.rec)...)
	return changed || joined, err
}

// bridgedNIC returns the network's uplink if it is a port of the bridge, and otherwise nil. If the NIC is missing, the
// error matches fs.ErrNotExist.
func (n *site) bridgedNIC(ctx context.Context) (*bridge.Link, error) {
	if n.rec.Uplink == "" {
		return nil, nil
	}
	nic, err := n.s.Links.Link(ctx, n.rec.Uplink)
	if err != nil || nic.Master != n.bridge.Index {
		return nil, err
	}
	return nic, nil
}

// shieldFromNetworkd writes a configuration file that makes systemd-networkd ignore the bridge, the host's link in the
// VLAN, and the pods' ports and ifbs. Without the file, if an operator's file matches every link, each start of
// systemd-networkd would remove the ports from the bridge. Call it only for a bridge that Tombolo made.
func (n *site) shieldFromNetworkd() {
	hash := strings.Repeat("[0-9a-f]", 11) // the hash in the names of a port and of its ifb
	err := shieldLinks(n.rec.Bridge, n.rec.Bridge, n.rec.GatewayLink(), "veth"+hash, "ifb"+hash)
	if err != nil {
		n.s.warn("systemd-networkd may take pods off bridge " + n.rec.Bridge + " when it starts: " + err.Error())
	}
}

// shieldLinks writes the file of the link name, which makes systemd-networkd ignore links with the given names or
// patterns. It does nothing if networkdFile returns "", or if name contains special characters.
func shieldLinks(name string, links ...string) error {
	path := networkdFile(name)
	if path == "" || strings.ContainsAny(name, `*?[]!\'"`) {
		return nil
	}

	text := fmt.Sprintf("# Made by Tombolo. \"tombolo remove\" and \"tombolo uplink restore\" delete it.\n"+
		"[Match]\nName=%s\n\n[Link]\nUnmanaged=yes\n", strings.Join(links, " "))
	if have, err := file.Read(path, len(text)); err == nil && string(have) == text {
		return nil
	}

	temp := path + ".tmp"
	return errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(temp, []byte(text), 0o644),
		os.Chmod(temp, 0o644), os.Rename(temp, path))
}

// networkdFile returns the path of a link's file for systemd-networkd, which reads the directory /run/systemd/network
// when it starts (systemd.network(5)). A boot empties this directory. The name sorts before the usual names of
// operators' files. networkdFile returns "" if systemd-networkd's directory /run/systemd/netif is missing, or if the
// calling thread's network namespace is not the namespace of pid 1.
func networkdFile(name string) string {
	var own, first unix.Stat_t
	err := errors.Join(unix.Stat("/proc/thread-self/ns/net", &own), unix.Stat("/proc/1/ns/net", &first))
	if _, statErr := os.Stat("/run/systemd/netif"); err != nil || statErr != nil || own.Ino != first.Ino {
		return ""
	}
	return filepath.Join("/run/systemd/network", "05-tombolo-"+name+".network")
}
