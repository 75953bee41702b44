package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/bridge/share"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// restore creates the missing parts of a network from its record, repairs the host's side of its pods, and saves the
// record. It reports whether an object was missing that other networks share. After a failure it clears the record's
// ConfigHash, so that the network's next Add repairs it. Without that, the Add might find the network complete after
// another network's repair of shared objects.
func (n *site) restore(ctx context.Context) (changed bool, _ error) {
	changed, err := n.make(ctx)
	if err != nil {
		n.rec.ConfigHash = ""
		err = fmt.Errorf("network %s: %w", n.rec.Name, err)
	}

	// Save the record even without a failure, since parts may have changed it, such as Routers4 and HostMAC.
	return changed, errors.Join(err, stateError(n.s.Dir.SaveNetwork(n.rec)))
}

// repairNetworks repairs the networks that have attachments, and calls reopen for the others. If the list some is not
// empty, it repairs only the networks in this list. If an object was missing that networks share, it repairs the other
// networks too. With an empty list it also gives back NICs whose takeover was interrupted. Finally it publishes
// withheld host ports that are free now.
func repairNetworks(ctx context.Context, s *session, some ...string) error {
	if err := s.enterAlone(ctx); err != nil {
		return err
	}

	records, damaged, err := s.Dir.ListNetworks()
	errs := []error{stateError(err)}
	for _, d := range damaged {
		errs = append(errs, d)
	}

	if len(some) == 0 {
		errs = append(errs, finishTakes(ctx, s))
	}

	r := &repair{s: s}
	var others []*state.Network
	for _, rec := range records {
		if len(some) > 0 && !slices.Contains(some, rec.Name) {
			others = append(others, rec)
			continue
		}
		errs = append(errs, r.network(ctx, rec))
	}

	if r.changed {
		for _, rec := range others {
			errs = append(errs, r.network(ctx, rec))
		}
	}

	errs = append(errs, declareMended(ctx, s, r.mended...))
	for _, a := range r.followers {
		if withholdsPorts(a) {
			// Publish ports that are free by now: the DEL that should have passed them on may have been killed.
			errs = append(errs, s.publish(ctx, newWaiting(a)))
		}
	}

	return errors.Join(errs...)
}

// repair is the state of one repair in progress.
type repair struct {
	s         *session
	mended    []*site             // the repaired networks
	followers []*state.Attachment // their attachments, which may be due to get withheld host ports
	changed   bool                // something was missing that other networks share
}

func (r *repair) network(ctx context.Context, rec *state.Network) error {
	if rec.Epoch != r.s.Epoch.Token() {
		return nil // the record is of an earlier epoch: the next ADD builds the network
	}

	attachments, err := r.s.attachments(rec.Name)
	if err != nil {
		return err
	}

	if len(attachments) == 0 {
		return reopen(ctx, r.s, rec.Name)
	}

	n := &site{s: r.s, rec: rec, attachments: attachments}
	changed, err := n.restore(ctx)
	r.changed = r.changed || changed
	if err != nil {
		return err
	}

	r.mended, r.followers = append(r.mended, n), append(r.followers, attachments...)
	_, err = refuseCertainObstacles(ctx, r.s, rec)
	return err
}

// Repair restores all recorded networks that have pods, and the host's side of every pod. It is needed after another
// program flushed the firewall, or deleted or changed a bridge. The next ADD of each network would repair it too.
// Repair also deletes the elements and IFB links of pods that are gone and not on record. It gives back NICs whose
// takeover was interrupted (Uplinks.Take).
//
// Repair changes nothing inside a pod, with one exception. If a pod's default route leads to the host, the pod's
// neighbour entry of the host gets the host's present MAC. After a failure Repair continues, and returns all errors.
func (n *Node) Repair(ctx context.Context) error {
	return n.withSession(func(s *session) error {
		if err := s.inOwnNamespace(); err != nil {
			return err // a repair would create the network in the wrong namespace
		}
		err := repairNetworks(ctx, s)
		_, straysErr := mendStrays(ctx, s)
		return errors.Join(err, straysErr)
	})
}

// Upkeep provides methods for a program that repairs a node automatically, such as tombolod.
type Upkeep struct{ node *Node }

// Upkeep returns the methods for programs that find and repair a node's faults automatically.
func (n *Node) Upkeep() Upkeep { return Upkeep{n} }

// Repair repairs the named networks as Node.Repair does, but does not search for objects without a pod, and gives no
// NICs back. It repairs other networks only if an object was missing that networks share, such as the firewall's table.
// Without names it does nothing.
func (u Upkeep) Repair(ctx context.Context, networks []string) error {
	if len(networks) == 0 {
		return nil
	}
	return u.node.withSession(func(s *session) error { return repairNetworks(ctx, s, networks...) }, networks...)
}

// Firewall returns the faults of the firewall, as far as an ADD would notice them. It looks at the networks that have
// pods, or rules that no longer fit the host's own forwarding. It also returns nf_tables' generation at that time, or 0
// if it is unknown or there are no such networks. If there are no faults, the next ADD need not check the tables.
// Firewall changes nothing in the kernel.
func (u Upkeep) Firewall(ctx context.Context) (generation uint32, lacking []string, _ error) {
	err := u.node.withNetworks(ctx, func(s *session, records []*state.Network) error {
		for _, rec := range records {
			n := &site{s: s, rec: rec, quick: true}
			if err := n.look(ctx, []part{firewallPart{}, admissionPart{}}); err != nil {
				return err
			}
			for _, d := range n.found.list {
				lacking = appendNew(lacking, d.String())
			}
		}

		if now := s.rules().Generation(); now != nil {
			generation = *now
		}
		return nil
	})
	return generation, lacking, err
}

// Obstacles lists, by network, settings on the host that stop pods, or may stop them. Tombolo cannot change these
// settings, or leaves them to their owner.
func (u Upkeep) Obstacles(ctx context.Context) (map[string][]foreign.Obstacle, error) {
	list := map[string][]foreign.Obstacle{}
	err := u.node.withNetworks(ctx, func(s *session, records []*state.Network) (err error) {
		for _, rec := range records {
			if list[rec.Name], err = s.obstacles(ctx, rec); err != nil {
				return err
			}
		}
		return nil
	})
	return list, err
}

// RemoveStrays deletes firewall elements and IFB links that have neither a record nor a port, and elements of addresses
// that a pod no longer has. Such elements come back when a program loads an older copy of our tables. RemoveStrays
// reports whether it found any elements. It takes the state directory's exclusive lock.
func (u Upkeep) RemoveStrays(ctx context.Context) (found bool, _ error) {
	err := u.node.withSession(func(s *session) (err error) { found, err = mendStrays(ctx, s); return err })
	return found, err
}

// withNetworks opens a session under the shared lock, and calls the function do with networks recorded in this epoch,
// which usually is this boot. Each has attachments, or rules that no longer fit the host's own forwarding
// (forwardingChanged). If there are none, it does not call do.
func (n *Node) withNetworks(ctx context.Context, do func(*session, []*state.Network) error) error {
	return n.withSession(func(s *session) error {
		records, _, err := s.Dir.ListNetworks()
		if err == nil && len(records) > 0 {
			// List again, since an ADD may have changed a record before this session got the lock.
			if err = s.enter(ctx); err == nil {
				records, _, err = s.Dir.ListNetworks()
			}
		}

		var used []*state.Network
		for _, rec := range records {
			if err != nil || rec.Epoch != s.Epoch.Token() {
				continue
			}
			var attachments []*state.Attachment
			if attachments, err = s.attachments(rec.Name); len(attachments) > 0 || forwardingChanged(rec) {
				used = append(used, rec)
			}
		}

		if err != nil || len(used) == 0 {
			return err
		}
		return do(s, used)
	})
}

// mendStrays deletes the firewall elements and IFB links of attachments that have neither a record nor a port. It also
// deletes the elements of addresses that a pod no longer has. Such elements come back when a program loads an older
// copy of our tables. mendStrays reports whether it found any elements. It takes the state directory's exclusive lock,
// so each Add in progress has its record.
func mendStrays(ctx context.Context, s *session) (found bool, _ error) {
	if err := s.enterAlone(ctx); err != nil {
		return false, err
	}

	all, err := s.inventory(ctx, "", nil)
	if err != nil {
		return false, err
	}

	var owners []nft.Owner
	var errs []error
	for _, r := range all.strays() {
		if r.hasOldElements() {
			errs, found = append(errs, s.dropOldElements(ctx, r)), true
			continue
		}

		if r.portName != "" {
			continue // the link belongs to a pod
		}

		if r.elementNetwork != "" {
			owners, found = append(owners, nft.Owner(r.hash)), true
		}

		if r.ifb != "" {
			errs = append(errs, bandwidth.On(s.Links.Socket()).Remove(ctx,
				bandwidth.Target{IFB: r.ifb, Owner: endpoint.AliasOwner(r.hash)}))
		}
	}

	if len(owners) > 0 {
		errs = append(errs, s.Firewall.RemoveOwners(ctx, owners...))
	}

	return found, errors.Join(errs...)
}

// hasOldElements reports whether the firewall has elements of addresses that the attachment no longer has.
func (r *remains) hasOldElements() bool {
	isOld := func(a netip.Addr) bool { return !slices.Contains(r.addresses, a) }
	return r.rec != nil && r.rec.State == state.Ready && !r.rec.Moving && slices.ContainsFunc(r.elementAddresses, isOld)
}

// dropOldElements deletes the firewall elements of addresses that the attachment no longer has.
func (s *session) dropOldElements(ctx context.Context, r *remains) error {
	nw, err := s.Dir.LoadNetwork(r.rec.Network)
	if err != nil {
		return stateError(err)
	}
	next := endpoint.In(r.rec, nw)
	old := next
	old.Addrs = r.elementAddresses
	return s.Firewall.Move(ctx, old, next)
}

// Host updates the facts about the host that the firewall's rules use (nft.Conn.SetHost). Without rules it does
// nothing.
func (u Upkeep) Host(ctx context.Context) error {
	return u.node.withSession(func(s *session) error { return s.setHost(ctx) })
}

// Links describes the links of the networks that have pods, or rules that no longer fit the host's own forwarding.
type Links struct {
	Bridges, Ports []int // indexes of the links that exist; Bridges includes the host's links in VLANs
	// Uplinks maps the names of the networks' NICs to their indexes, or to 0 if a NIC does not exist. Pairs are the
	// indexes of both ends of the veth pairs that connect shared NICs to bridges.
	Uplinks  map[string]int
	Pairs    []int
	Services int // the index of kube-ipvs0, or 0 if it does not exist
	// Lacking lists, by network, the faults of the host's links, addresses, routes, kernel parameters and tc filters.
	Lacking map[string][]string
}

// Links compares the host's links, addresses, routes and parameters with the records. It does not look inside pods, and
// changes nothing in the kernel except the facts about the host in the rules (nft.Conn.SetHost). It ignores missing
// ports, since their pods are gone.
func (u Upkeep) Links(ctx context.Context) (*Links, error) {
	l := &Links{Lacking: map[string][]string{}, Uplinks: map[string]int{}}
	err := u.node.withNetworks(ctx, func(s *session, records []*state.Network) error {
		veths, err := s.Links.Veths(ctx)
		ports := map[string]*bridge.Link{}
		for i := range veths {
			ports[veths[i].Name] = &veths[i]
		}

		services, servicesErr := s.link(ctx, link.ServiceLink)
		if err := cmp.Or(err, servicesErr, s.setHost(ctx)); err != nil {
			return err
		}

		l.Services = services.Index
		for _, rec := range records {
			if err := l.lookAt(ctx, &site{s: s, rec: rec}, ports); err != nil {
				return err
			}
		}
		return nil
	})
	return l, err
}

// uplink adds the network's NIC, and the veth pair of a shared NIC, to Uplinks and Pairs.
func (l *Links) uplink(ctx context.Context, n *site) error {
	if n.rec.Uplink == "" {
		return nil
	}

	l.Uplinks[n.uplink.nic.Name] = n.uplink.nic.Index
	if !n.uplink.shared {
		return nil
	}

	outer, port := share.Pair(n.rec.Bridge)
	for _, name := range []string{outer, port} {
		end, err := n.s.link(ctx, name)
		if err != nil {
			return err
		}
		if end.Index != 0 {
			l.Pairs = append(l.Pairs, end.Index)
		}
	}

	return nil
}

func (l *Links) lookAt(ctx context.Context, n *site, ports map[string]*bridge.Link) error {
	var err error
	if n.attachments, err = n.s.attachments(n.rec.Name); err != nil {
		return err
	}

	// Look only at parts about which the kernel announces changes, with its messages about links, addresses, routes,
	// sysctls of links, and filters.
	if err := n.look(ctx, []part{bridgePart{}, uplinkPart{}, vlanPart{}, nextHopPart{}, forwardingPart{}, gatewayPart{},
		loopbackPart{}}); err != nil {
		return err
	}

	if n.bridge.Index != 0 {
		l.Bridges = append(l.Bridges, n.bridge.Index)
	}

	if n.gatewayLink.Index != 0 && n.gatewayLink.Index != n.bridge.Index && n.share == nil {
		l.Bridges = append(l.Bridges, n.gatewayLink.Index)
	}

	if err := l.uplink(ctx, n); err != nil {
		return err
	}

	for _, a := range n.attachments {
		port := ports[a.HostIf]
		if port == nil {
			continue
		}

		l.Ports = append(l.Ports, port.Index)
		if a.State != state.Ready || a.Bridge != n.rec.Bridge || n.bridge.Index == 0 {
			continue
		}

		diffs, err := portDifferences(ctx, n.s, a, port, n.bridge)
		if len(diffs) > 0 {
			diffs, err = recheckPort(ctx, n.s, a, n.bridge)
		}

		if err != nil {
			return err
		}

		n.found.addAll(diffs, "")
	}

	if len(n.found.list) > 0 {
		l.Lacking[n.rec.Name] = printable.Texts(n.found.list)
	}

	return nil
}
