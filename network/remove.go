package network

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/uplink"
)

// Dead is an attachment whose pod died without a Del.
type Dead struct {
	*Attachment
	// Why describes the evidence that the pod is gone.
	Why string
	// Kept is the reason why CollectDead left the attachment alone nevertheless. It is nil if CollectDead removed the
	// attachment or, with dryRun, would try to remove it.
	Kept error
}

// MarshalJSON returns the attachment's record, with the fields Why and Kept.
func (d Dead) MarshalJSON() ([]byte, error) {
	kept := ""
	if d.Kept != nil {
		kept = d.Kept.Error()
	}
	return json.Marshal(struct {
		*state.Attachment
		Why  string `json:"why"`
		Kept string `json:"kept,omitempty"`
	}{d.Attachment.onRecord(), d.Why, kept})
}

// CollectDead removes attachments whose pods are gone, and returns them. A killed runtime leaves such attachments. If
// network is empty, CollectDead looks at all networks. If the network is not on record, the error matches ErrInvalid.
// If all records are of an earlier epoch, usually an earlier boot, CollectDead deletes the records, and returns none.
//
// A pod is gone if two conditions hold. Its port is gone, or about to be deleted together with its namespace. And its
// recorded path does not lead to the pod's namespace. One condition alone is not enough. A path that cannot be opened
// may belong to another mount namespace. An operator may have deleted the port.
//
// CollectDead skips attachments that another call is working on. It releases addresses as Del does. If an attachment
// cannot be removed, its field Kept has the reason. With dryRun nothing is changed.
//
// It needs CAP_NET_ADMIN, and CAP_SYS_ADMIN to distinguish namespaces.
func (n *Node) CollectDead(ctx context.Context, network string, dryRun bool) ([]Dead, error) {
	networks, err := n.cfg.Dir.Networks()
	if err != nil {
		return nil, stateError(err)
	}

	if network != "" {
		if !slices.Contains(networks, network) {
			return nil, failf(ErrInvalid, "%w", state.UnknownNetwork(networks, network))
		}
		networks = []string{network}
	}

	_, err = n.cfg.Dir.Epoch()
	switch {
	case errors.Is(err, state.ErrStale):
		if dryRun {
			return nil, nil
		}
		// The recorded epoch is over, usually by a reboot. enter begins a new one, and deletes the records of networks
		// and attachments.
		return nil, n.withSession(func(s *session) error { return s.enter(ctx) })
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil // the epoch of the records is unknown
	case err != nil:
		return nil, stateError(err)
	}

	s, err := n.openKnown()
	if err != nil {
		return nil, err
	}
	defer s.close()
	if err := s.inOwnNamespace(); err != nil {
		return nil, err
	}

	var list []Dead
	var errs []error
	for _, name := range networks {
		found, err := n.teardown(s, name, nil).collectDead(ctx, dryRun)
		list, errs = append(list, found...), append(errs, err)
	}

	return list, errors.Join(errs...)
}

// nameDead adds advice to an error that matches ErrAttached if some of the network's attachments are dead.
func (n *Node) nameDead(ctx context.Context, network string, refused error) error {
	if !errors.Is(refused, ErrAttached) {
		return refused
	}
	dead, err := n.CollectDead(ctx, network, true)
	if err != nil || len(dead) == 0 {
		return refused
	}
	return failf(ErrAttached, "%w; tombolo gc reclaims %s", refused,
		printable.Count(len(dead), "attachment whose pod is gone", "attachments whose pods are gone"))
}

// reclaimTimeout limits the time that an Add spends on removing dead attachments.
const reclaimTimeout = 10 * time.Second

// lacksAddress reports whether an Add failed for lack of an address that a dead pod may hold. An IPAM plugin reports a
// full pool only by its own message. So lacksAddress reports true for every error of an allocator that runs a plugin.
func (nw *Network) lacksAddress(err error) bool {
	return errors.Is(err, ipam.ErrPoolFull) || errors.Is(err, ipam.ErrAddressTaken) ||
		errors.Is(err, errAllocator) && nw.Allocator.Slow()
}

// errAllocator is wrapped by the errors that an allocator's Add returned.
var errAllocator = errors.New("no address")

// reclaim removes the network's dead attachments. It reports whether it removed any, so that Add should try again. It
// only logs errors. The Add has undone its changes and released its locks before.
func (n *Node) reclaim(ctx context.Context, nw *Network) bool {
	if ctx.Err() != nil {
		return false
	}

	ctx, cancel := context.WithTimeout(ctx, reclaimTimeout)
	defer cancel()
	dead, err := n.CollectDead(ctx, nw.Name, false)
	if err != nil {
		n.cfg.Log.Warn("reclaim what dead pods hold: " + err.Error())
	}

	freed := false
	for _, d := range dead {
		if d.Kept != nil {
			n.cfg.Log.Warn("reclaim what the pod of container " + d.ContainerID + " holds, which is gone: " +
				d.Kept.Error())
			continue
		}
		n.cfg.Log.Warn("the pod of container " + d.ContainerID + " is gone, without a DEL: " + d.Why + "; reclaimed")
		freed = true
	}

	return freed
}

// hasDied reports whether the pod of an attachment on record is gone: the record is readable, and its port no longer
// exists.
func (s *session) hasDied(ctx context.Context, network, hash string) bool {
	if _, err := s.Dir.Load(network, hash); err != nil {
		return false
	}
	_, err := s.Links.Link(ctx, ident.Port(hash))
	return errors.Is(err, fs.ErrNotExist)
}

// whyDead returns the evidence that an attachment's pod is gone. It returns "" if there is none.
func whyDead(ctx context.Context, s *session, rec *state.Attachment) (string, error) {
	port, now := ident.Port(rec.Hash()), "is gone"
	switch _, err := s.Links.Link(ctx, port); {
	case err == nil:
		if goes, err := link.LosesOtherEnd(nl.Of(s.Links.Socket()), port); !goes {
			return "", err
		}
		now = "is about to go"
	case !errors.Is(err, fs.ErrNotExist):
		return "", err
	}

	where, err := namespaceLost(rec)
	if where == "" || err != nil {
		return "", err
	}

	// Search for a renamed port last, since the search lists all links.
	if renamed, err := s.isRenamed(ctx, rec.Hash()); renamed || err != nil {
		return "", err
	}

	return fmt.Sprintf("its port %s %s, and %s", port, now, where), nil
}

// namespaceLost returns the reason if the path in an attachment's record does not lead to the pod's namespace. It
// returns "" if the path leads there, or possibly does.
func namespaceLost(rec *state.Attachment) (string, error) {
	if rec.NetNS == "" {
		return "its record is damaged", nil
	}

	pod, err := netns.Open(rec.NetNS)
	if err != nil {
		// These errors mean that the path leads to no namespace. Other errors concern this process, such as a lack of
		// file descriptors, and prove nothing.
		paths := []error{fs.ErrNotExist, netns.ErrNotNetNS, fs.ErrPermission, unix.ENOTDIR, unix.ESRCH, unix.ELOOP,
			unix.ENAMETOOLONG}
		if slices.ContainsFunc(paths, func(about error) bool { return errors.Is(err, about) }) {
			return fmt.Sprintf("its namespace: %v", err), nil
		}
		return "", err
	}
	defer pod.Close()
	if rec.NetNSCookie == 0 {
		return "", nil // no namespace is on record yet, so this may be the pod's
	}

	cookie, err := pod.Cookie()
	if err != nil || cookie == rec.NetNSCookie {
		return "", err
	}

	return rec.NetNS + " is now another namespace", nil
}

// inOwnNamespace returns an error if the session is in another network namespace than the recorded networks. There it
// would find none of their ports, and take all pods for dead.
func (s *session) inOwnNamespace() error {
	epoch, err := s.Dir.Epoch()
	if err != nil {
		return nil // no record is valid
	}

	cookie, err := state.NetNSCookie()
	if err == nil && epoch.NetNS != 0 && cookie != epoch.NetNS {
		err = failf(ErrState,
			"the networks on record are in another network namespace, so this one does not show which pods are alive: "+
				"run this in the host's")
	}
	return err
}

// stubRecord returns a substitute for an unreadable record. The hash suffices to find the attachment's objects in the
// kernel. Container and interface come from the attachment's reservation, if there is one.
func (t *teardown) stubRecord(hash string) *state.Attachment {
	rec := &state.Attachment{State: state.Adding, Network: t.Network, Short: hash}
	rec.DataDir = t.Session.Dir.Path() + "/ipam"
	if n, err := t.Session.Dir.LoadNetwork(t.Network); err == nil {
		rec.Bridge, rec.VLAN, rec.DataDir = n.Bridge, n.VLAN, cmp.Or(n.PoolDir, rec.DataDir)
	}

	dir := rec.DataDir + "/" + t.Network
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		data, _ := file.Read(dir+"/"+e.Name(), file.MaxRecord)
		id, ifName, _ := strings.Cut(strings.TrimSpace(string(data)), "\r\n")
		if ident.Hash(t.Network, id, ifName) == hash {
			rec.ContainerID, rec.IfName, rec.IPAMType = id, ifName, "host-local"
		}
	}

	return rec
}

// unreleasable returns an error with the reason if no allocator can take the attachment's addresses back. It returns
// nil for an attachment with a DHCP lease, which needs no allocator.
func (t *teardown) unreleasable(rec *state.Attachment) error {
	switch {
	case rec.IPAMType == endpoint.Leased:
		return nil
	case rec.NetNS == "" && rec.IPAMType == "":
		return errors.New("neither the allocator of its address nor its container is known: have the runtime call GC")
	}
	_, err := t.node.allocator(t.Network, &Origin{rec.IPAMType, rec.DataDir})
	return err
}

// collectDead removes the dead attachments of the network, and turns route_localnet off where no pod needs it. It
// returns all dead attachments, even if it could not remove them. With dryRun it removes nothing. For a damaged record,
// it uses stubRecord.
func (t *teardown) collectDead(ctx context.Context, dryRun bool) ([]Dead, error) {
	records, unread, err := t.Session.Dir.List(t.Network)
	errs := []error{stateError(err)}
	for _, d := range unread {
		t.Session.warn(d.Error())
		if d.Hash != "" && (errors.Is(d, state.ErrDamaged) || errors.Is(d, state.ErrVersion)) {
			records = append(records, t.stubRecord(d.Hash))
		}
	}

	var found []Dead
	var removed []*state.Attachment
	for _, rec := range records {
		d, err := t.collectIfDead(ctx, rec, dryRun)
		errs = append(errs, err)
		if d == nil {
			continue
		}
		if found = append(found, *d); d.Kept == nil && !dryRun {
			removed = append(removed, d.rec)
		}
	}

	errs = append(errs, closeLoopbackAfter(ctx, t.Session, t.Known, removed...))
	t.Session.leave()
	return found, errors.Join(errs...)
}

// collectIfDead removes one attachment if its pod is gone. It returns the attachment, with a reason in Kept if it was
// not removed. It returns nil if the pod does not look dead, or if another call works on the attachment. It checks
// again under the record's lock, which an ADD holds until the record is complete. With dryRun, or if no allocator can
// take the addresses back, it removes nothing.
func (t *teardown) collectIfDead(ctx context.Context, rec *state.Attachment, dryRun bool) (*Dead, error) {
	if evidence, err := whyDead(ctx, t.Session, rec); evidence == "" {
		return nil, err
	}

	lock, err := t.Session.Dir.LockAttachment(t.Network, rec.Hash())
	if err != nil && (rec.NetNS != "" || errors.Is(err, state.ErrBusy) || errors.Is(err, fs.ErrNotExist)) {
		return nil, nil // a call is or was working on it; a damaged record may be no file, which cannot be locked
	}
	defer lock.Close()
	switch now, err := t.Session.Dir.Load(t.Network, rec.Hash()); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err == nil:
		rec = now
	}

	evidence, err := whyDead(ctx, t.Session, rec)
	if evidence == "" {
		return nil, err
	}

	d := &Dead{attachmentOf(rec), evidence, t.unreleasable(rec)}
	if dryRun || d.Kept != nil {
		return d, nil
	}

	// Limit the wait for the lock of a lease. tombolod holds that lock only while it writes the lease's record.
	ctx, cancel := context.WithTimeout(ctx, collectWait)
	defer cancel()
	r := t.ownRemains(ctx, keyOf(rec).owner(), rec.Hash())
	r.rec = rec
	r.stillReserved = t.reservedAgain(ctx, r)
	d.Kept = t.takeDown(ctx, r)
	return d, nil
}

// removeNetwork removes the objects of a network that Collect leaves: see Node.Remove.
func removeNetwork(ctx context.Context, s *session, name string) error {
	leases, err := leasesOf(s, name)
	if err := cmp.Or(err, s.enterAlone(ctx)); err != nil {
		return err
	}

	rest, err := s.inventory(ctx, name, leases)
	if err != nil {
		return err
	}

	maps.DeleteFunc(rest.all, func(_ string, r *remains) bool { return r.hasElementsOnly() })
	if len(rest.all) > 0 {
		return failf(ErrAttached, "network %q has %s: remove the pods first", name,
			printable.Count(len(rest.all), "attachment", "attachments"))
	}

	rec, err := s.Dir.LoadNetwork(name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, state.ErrDamaged) {
		// Continue without a record. There may still be rules, if the state was lost, or a directory that a failed
		// Add made.
		rec, err = &state.Network{}, nil
	}

	others, othersErr := s.otherNetworks(name)
	err = cmp.Or(stateError(err), othersErr)
	sharesNIC := func(o *state.Network) bool { return o.Bridge == rec.Bridge && o.Uplink != "" }
	if err == nil && rec.Uplink != "" && !slices.ContainsFunc(others, sharesNIC) {
		n := &site{s: s, rec: rec}
		if err = n.find(ctx); err == nil && n.share != nil {
			err = s.refuseCutOff(ctx, n.bridge, rec.Uplink, n.share.Port)
		}
	}

	if err != nil {
		return err
	}

	if len(others) == 0 { // delete our rules in other programs' chains too
		err = errors.Join(stopForwarding(rec), s.foreignFirewall("").Remove(ctx))
	}
	return s.deleteNetwork(ctx, name, rec, err)
}

// deleteNetwork deletes a network's rules, links and reservations, and turns off settings that no pod needs. It deletes
// the network's own directory of reservations, since none is in use without attachments. A directory that the
// configuration names is the operator's, and stays. If all of this succeeds and earlier is nil, deleteNetwork deletes
// the network's record.
func (s *session) deleteNetwork(ctx context.Context, name string, rec *state.Network, earlier error) error {
	err := errors.Join(earlier, s.Firewall.RemoveNetwork(ctx, name),
		closeUnusedLoopback(ctx, s, false, rec.Bridge, rec.GatewayLink()), removeShare(ctx, s, rec),
		removeBridge(ctx, s, rec), stateError(os.RemoveAll(s.Dir.Path()+"/ipam/"+name)))
	if err != nil {
		return err
	}
	return s.Dir.RemoveNetwork(name)
}

// Known returns an error if a network is unknown, as when its name is mistyped: it is not on record, and has no leases
// and no objects in the kernel. The error matches ErrInvalid, and lists the names of the recorded networks.
func (u Upkeep) Known(ctx context.Context, name string) error {
	return u.node.withSession(func(s *session) error {
		names, err := s.Dir.Networks()
		if err != nil || slices.Contains(names, name) {
			return stateError(err)
		}

		leases, err := leasesOf(s, name)
		has, hasErr := s.Firewall.HasNetwork(ctx, name)
		if err := cmp.Or(err, hasErr); has || err != nil {
			return err
		}

		if rest, err := s.inventory(ctx, name, leases); err != nil || len(rest.all) > 0 {
			return err
		}
		return failf(ErrInvalid, "%w", state.UnknownNetwork(names, name))
	}, name)
}

// removeBridge deletes the network's bridge if we made it and it has no other network, no port and no taken NIC. With
// the bridge, it deletes the bridge's file for systemd-networkd. If the bridge stays, removeBridge deletes the host's
// link in the network's VLAN, unless another network on the bridge has that VLAN. The uplink stays in its VLANs: its
// owner may have put it there. Without a VLAN, removeBridge deletes those gateways' addresses that no other network
// needs, unless pods of another program are on the bridge.
func removeBridge(ctx context.Context, s *session, rec *state.Network) error {
	l, err := s.link(ctx, rec.Bridge)
	if err != nil || l.Index == 0 {
		return err
	}

	if l.Kind != "bridge" {
		return failf(bridge.ErrNotBridge, "%s is no longer a bridge but of kind %q: it is left alone", rec.Bridge,
			l.Kind)
	}

	shared, err := sharers(s, rec)
	ports, portsErr := s.Links.Ports(ctx, l.Index)
	err = cmp.Or(err, portsErr)
	var taken *uplink.Record // the bridge of a takeover has the host's addresses
	if err == nil && rec.Uplink != "" {
		taken, err = s.loadTake(rec.Uplink)
	}

	if err != nil {
		return err
	}

	if len(shared) == 0 && len(ports) == 0 && l.Alias == endpoint.BridgeAlias && taken == nil {
		// Without systemd-networkd, networkdFile returns "". file.Remove ignores this path, and a missing file.
		return errors.Join(s.Links.Remove(ctx, rec.Bridge), file.Remove(networkdFile(rec.Bridge)))
	}

	isInVLAN := func(o *state.Network) bool { return o.VLAN.ID == rec.VLAN.ID }
	if host, ok := hostVLAN(rec, l); ok && !slices.ContainsFunc(shared, isInVLAN) {
		return s.Links.VLANs().RemoveLink(ctx, host)
	}

	if !rec.VLAN.IsZero() || hasPods(ctx, s, ports) {
		return nil
	}

	for _, gw := range rec.Gateways {
		if slices.ContainsFunc(shared, func(o *state.Network) bool { return slices.Contains(o.Gateways, gw) }) {
			continue
		}
		if err := s.Links.Addresses().Remove(ctx, addr.Address{Prefix: gw, Link: l.Index}); err != nil {
			return err
		}
	}

	return nil
}

// refuseCutOff returns an error if a bridge that is about to lose its uplink has ports of other programs, such as
// virtual machines. own is the name of the port that connects the bridge to its uplink.
func (s *session) refuseCutOff(ctx context.Context, nicLink *bridge.Link, nic, own string) error {
	ports, err := s.Links.Ports(ctx, nicLink.Index)
	var foreign []string
	for _, p := range ports {
		if p.Name != own && !strings.HasPrefix(p.Alias, endpoint.AliasPrefix) {
			foreign = append(foreign, p.Name)
		}
	}

	if err != nil || len(foreign) == 0 {
		return err
	}

	return failf(ErrAttached,
		"bridge %s has ports of other programs, which would no longer reach the LAN of %s: %s: take them off first "+
			"(ip link set %[4]s nomaster)",
		nicLink.Name, nic, strings.Join(foreign, ", "), foreign[0])
}

// hasPods reports whether one of the ports is a veth that is not ours and leads into another namespace.
func hasPods(ctx context.Context, s *session, ports []bridge.Link) bool {
	return slices.ContainsFunc(ports, func(p bridge.Link) bool {
		if _, own := endpoint.ParseAlias(p.Alias); own || p.Kind != "veth" {
			return false
		}
		peer, err := s.Links.LinkByIndex(ctx, p.Peer)
		return err != nil || peer.Peer != p.Index || peer.Kind != p.Kind
	})
}

// sharers returns the other networks on the same bridge.
func sharers(s *session, rec *state.Network) ([]*state.Network, error) {
	others, err := s.otherNetworks(rec.Name)
	return slices.DeleteFunc(others, func(o *state.Network) bool { return o.Bridge != rec.Bridge }), err
}

// refusePodsBehind returns an error if networks with the uplink nic have attachments, since these would lose their
// LAN.
func refusePodsBehind(s *session, nic string) error {
	networks, _, err := s.Dir.ListNetworks()
	for _, n := range networks {
		if n.Uplink != nic {
			continue
		}

		attachments, _, err := s.Dir.List(n.Name)
		if err != nil {
			return stateError(err)
		}
		if len(attachments) > 0 {
			return failf(ErrAttached, "uplink %s: network %q has %s on it: remove the pods first", nic, n.Name,
				printable.Count(len(attachments), "attachment", "attachments"))
		}
	}

	return stateError(err)
}
