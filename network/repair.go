package network

import (
	"context"
	"errors"
	"fmt"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/build"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/inspect"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// Repair makes all networks anew that are on record and in use, as their records have them,
// and puts every pod's host side back: after somebody flushed the firewall, deleted a bridge
// or changed it. It is what the next ADD of each network would do. It also deletes the elements
// and links of pods that are gone and that no record tells of, and puts back in pods what Add gave
// them and they lost: that the interface is up, addresses, routes, its MTU if it is larger, and
// parameters. What others have added stays; a lease's address and routes are its keeper's, and a pod
// whose interface is gone is not made anew. It goes on past what it cannot mend. It needs CAP_SYS_ADMIN
// to enter pods.
func (n *Node) Repair(ctx context.Context) error {
	return n.about(ctx, func(s *session.Session) error {
		return errors.Join(build.Repair(ctx, s), mendStrays(ctx, s), mendPods(ctx, s))
	})
}

// RepairNetworks is Repair of some networks alone, without what no pod has, and of the host alone. The others are left as
// they are, unless something was missing that they have a part in, such as the table.
func (n *Node) RepairNetworks(ctx context.Context, networks []string) error {
	if len(networks) == 0 {
		return n.usable(ctx)
	}
	return n.about(ctx, func(s *session.Session) error { return build.Repair(ctx, s, networks...) }, networks...)
}

// LookAtFirewall says what of the firewall is not as the networks with pods need it, as far as
// an ADD would notice, and at which of the kernel's generations that was seen. If nothing is
// lacking, the next ADD need not look. It changes nothing.
func (n *Node) LookAtFirewall(ctx context.Context) (generation uint32, lacking []string, _ error) {
	s, records, err := n.openNetworks(ctx)
	if err != nil || s == nil {
		return 0, nil, err
	}
	defer s.Close()
	return inspect.Firewall(ctx, s, records)
}

// Links are the links of the networks that have pods.
type Links struct {
	Bridges, Ports []int // indexes of those that are there
	// Lacking says, by network, what of the host's links, addresses and routes is not as pods
	// need it. RepairNetworks puts it right.
	Lacking map[string][]string
}

// LookAtLinks compares the host's links, addresses and routes with the records. It looks into
// no pod, and changes nothing.
func (n *Node) LookAtLinks(ctx context.Context) (*Links, error) {
	s, records, err := n.openNetworks(ctx)
	if err != nil || s == nil {
		return &Links{}, err
	}
	defer s.Close()
	l := &Links{}
	l.Bridges, l.Ports, l.Lacking, err = inspect.Links(ctx, s, records)
	return l, err
}

// FirewallObstacles lists, by network, what stops pods, or may stop them, and is out of reach, or left to its owner.
func (n *Node) FirewallObstacles(ctx context.Context) (map[string][]foreign.Obstacle, error) {
	s, records, err := n.openNetworks(ctx)
	if err != nil || s == nil {
		return nil, err
	}
	defer s.Close()
	list := map[string][]foreign.Obstacle{}
	for _, rec := range records {
		if list[rec.Name], err = s.Obstacles(ctx, rec); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// openNetworks opens the host, under the shared lock, if any network of this epoch of the
// node has attachments, and gives those networks that are on record.
func (n *Node) openNetworks(ctx context.Context) (*session.Session, []*state.Network, error) {
	s, err := n.openKnown(ctx)
	if err != nil {
		return nil, nil, err
	}
	records, _, err := s.Dir.ListNetworks()
	if err == nil && len(records) > 0 {
		if err = s.Enter(ctx); err == nil {
			records, _, err = s.Dir.ListNetworks() // an ADD may have changed one while it had the lock
		}
	}
	var used []*state.Network
	for _, rec := range records {
		if err != nil || rec.Epoch != s.Epoch.Token() {
			continue
		}
		var attachments []*state.Attachment
		if attachments, err = s.Attachments(rec.Name); len(attachments) > 0 {
			used = append(used, rec)
		}
	}
	if err != nil || len(used) == 0 {
		s.Close()
		return nil, nil, err
	}
	return s, used, nil
}

// mendStrays deletes what belongs to nobody. No Add is at work meanwhile.
func mendStrays(ctx context.Context, s *session.Session) error {
	if err := s.EnterAlone(ctx); err != nil {
		return err
	}
	defer s.Leave()
	networks, err := s.Dir.Networks()
	if err != nil {
		return fail.State(err)
	}
	known := map[string]bool{}
	for _, name := range networks {
		attachments, damaged, err := s.Dir.List(name)
		if err != nil {
			return fail.State(err)
		}
		for _, a := range attachments {
			known[a.Hash()] = true
		}
		for _, d := range damaged {
			known[d.Hash] = true
		}
	}
	strays, err := inspect.FindStrays(ctx, s, known, networks)
	if err != nil {
		return err
	}
	if len(strays.Elements)+len(strays.IFBs) == 0 {
		return nil
	}
	var owners []nft.Owner
	for hash := range strays.Elements {
		owners = append(owners, nft.Owner(hash))
	}
	errs := []error{s.Firewall.RemoveOwners(ctx, owners...)}
	shapes := bandwidth.On(s.Links.Socket())
	for hash, ifb := range strays.IFBs {
		errs = append(errs, shapes.Remove(ctx, bandwidth.Target{IFB: ifb, Owner: endpoint.AliasOwner(hash)}))
	}
	return errors.Join(errs...)
}

func mendPods(ctx context.Context, s *session.Session) error {
	networks, err := s.Dir.Networks()
	if err != nil {
		return fail.State(err)
	}
	if len(networks) == 0 {
		return nil
	}
	if err := s.Enter(ctx); err != nil {
		return err
	}
	var errs []error
	for _, name := range networks {
		attachments, err := s.Attachments(name)
		errs = append(errs, err)
		for _, a := range attachments {
			if a.State != state.Ready || a.Moving {
				continue
			}
			if err := repairPod(ctx, s, a); err != nil {
				errs = append(errs, fmt.Errorf("container %s: %w", a.ContainerID, err))
			}
		}
	}
	return errors.Join(errs...)
}

func repairPod(ctx context.Context, s *session.Session, a *state.Attachment) error {
	pod, err := recorded.OpenPod(a.NetNS, a.NetNSCookie)
	if err != nil {
		return nil
	}
	defer pod.Close()
	port, err := inspect.Port(ctx, s, a)
	if err != nil {
		return err
	}
	if port.Routes = recorded.Routes(a); a.IPAMType != endpoint.Leased {
		port.Addresses = recorded.Lasting(a)
	}
	diffs, err := s.Links.Check(ctx, pod, port)
	if err != nil {
		return err
	}
	for _, d := range diffs {
		if d.Object == "interface "+port.Peer && d.What != "MAC" {
			return s.Links.Restore(ctx, pod, port)
		}
	}
	return nil
}
