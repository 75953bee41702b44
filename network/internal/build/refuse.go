package build

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// obstacles says what stops the pods' packets for certain and is out of our reach. firewalld says
// that it is the only one.
func obstacles(ctx context.Context, s *session.Session, rec *state.Network) (firewalld bool, _ error) {
	list, err := s.Obstacles(ctx, rec)
	if err != nil {
		return false, err
	}
	firewalld = true
	var texts []string
	for _, o := range list {
		if !o.Maybe {
			texts = append(texts, o.String())
			firewalld = firewalld && o.Firewalld
		}
	}
	if len(texts) == 0 {
		return false, nil
	}
	return firewalld, fail.Errorf(fail.ErrObstructed, "%s", strings.Join(texts, "; "))
}

// refuseObstacles says what would stop the pods' packets, and is out of our reach and of tombolod's:
// once the network is on record, that has the bridge of a gateway join a zone of firewalld. coming
// says that it is to.
func refuseObstacles(ctx context.Context, s *session.Session, rec *state.Network, gateway bool) (coming bool, _ error) {
	firewalld, err := obstacles(ctx, s, rec)
	if firewalld && gateway && rec.Uplink == "" && s.Dir.ZonesAttended(rec.GatewayLink()) {
		return true, nil
	}
	return false, err
}

// awaitZone waits for tombolod to have put firewalld out of the way of the network's pods, for 8 s
// at most: that takes firewalld some 0.1 s, and longer with many rules. Until then the record says
// that the network is not built: the next ADD sees to that, if this one fails.
func awaitZone(ctx context.Context, s *session.Session, rec *state.Network) error {
	finished := rec.ConfigHash
	rec.ConfigHash = ""
	err := s.Dir.SaveNetwork(rec)
	rec.ConfigHash = finished
	if err != nil {
		return fail.State(err)
	}
	for range 400 {
		var firewalld bool
		if firewalld, err = obstacles(ctx, s, rec); !firewalld || ctx.Err() != nil || !s.Dir.ZonesAttended(rec.GatewayLink()) {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	return err
}

// refuseOtherMarks holds the networks of a node to one mark, since they share the
// rules that have it.
func refuseOtherMarks(s *session.Session, rec *state.Network) error {
	others, _, err := s.Dir.ListNetworks()
	if err != nil {
		return fail.State(err)
	}
	for _, o := range others {
		if o.Name == rec.Name || o.Mark == 0 || o.Mark == rec.Mark {
			continue
		}
		attachments, _, err := s.Dir.List(o.Name)
		if err != nil {
			return fail.State(err)
		}
		if len(attachments) > 0 {
			return fail.Errorf(fail.ErrConflict, "forwardMark %#x: network %q, which has pods, uses %#x, and all networks of a node share one: give both the same", rec.Mark, o.Name, o.Mark)
		}
	}
	return nil
}

// A kernel that was booted with ipv6.disable=1, or built without IPv6, has none in any
// namespace. Networks of IPv4 alone work there; for one with IPv6 it is said, before
// anything is made that the kernel would refuse with a terse errno, or half of it.

// kernelHasIPv6 looks for what every namespace has of IPv6. Without /proc/sys nothing
// is known, and the kernel may speak for itself.
func kernelHasIPv6() bool { return sysctl.Exists(forwarding6) || !sysctl.Exists(forwarding4) }

// refuseIPv6 is about a network whose pods have addresses in these subnets. An Add calls it
// only where something is to be built, since a network with IPv6 is never found ready on such
// a kernel.
func refuseIPv6(network string, slaac bool, subnets []netip.Prefix) error {
	asked := ""
	if i := slices.IndexFunc(subnets, recorded.IsIPv6); i >= 0 {
		asked = fmt.Sprintf("an address in %s", subnets[i])
	}
	if slaac {
		asked = `ipv6 "slaac"`
	}
	if asked == "" || kernelHasIPv6() {
		return nil
	}
	return fail.Errorf(tombolo.ErrInvalid, "network %q asks for %s, and IPv6 is switched off in this kernel: take it out of the configuration, or boot without ipv6.disable=1 on the kernel's command line (and with a kernel that has IPv6)",
		network, asked)
}

// CouldBe says why a network could not be built, nor a pod of it made. It asks without the lock, and
// changes nothing.
func CouldBe(ctx context.Context, s *session.Session, w *Want) error {
	if err := probe(ctx, s, w); err != nil {
		return err
	}
	// Another firewall may let pass the subnets of pods that there are, and not the bridge.
	rec := w.Record
	rec.Subnets = nil
	if is, err := s.Dir.LoadNetwork(rec.Name); err == nil && is.Bridge == rec.Bridge {
		rec.Subnets = is.Subnets
	}
	if _, err := refuseObstacles(ctx, s, &rec, w.Gateway); err != nil {
		return err
	}
	if err := s.Dir.CheckWritable(); err != nil {
		return fail.State(err)
	}
	if err := refuseIPv6(rec.Name, rec.SLAAC, w.Record.Subnets); err != nil {
		return err
	}
	e, err := s.Dir.Epoch()
	if err != nil {
		e = state.Epoch{} // no record counts
	}
	if _, err := refuseConflicts(ctx, s, w, e.Token()); err != nil || rec.Uplink == "" {
		return err
	}
	return s.Uplinks().Ready(ctx, w.Uplink)
}

// probe asks for the facilities of the kernel that an Add needs.
func probe(ctx context.Context, s *session.Session, w *Want) error {
	own, err := netns.Current()
	if err != nil {
		return err
	}
	own.Close()
	if err := s.Links.Probe(); err != nil {
		return err
	}
	rec := &w.Record
	if rec.VLAN != (state.VLAN{}) {
		if err := s.Links.VLANs().Probe(ctx); err != nil {
			return err
		}
	}
	if err := s.Firewall.Probe(); err != nil {
		return err
	}
	if rec.NFCall == nil && w.Routed || rec.NFCall != nil && *rec.NFCall {
		if err := bridge.ProbeNetfilter(); err != nil {
			remedy := "set bridgeNFCall to false, if no service and no policy concerns pods of one node"
			if rec.DefaultRoute == recorded.ExitHost {
				remedy = `set defaultRoute to "router" and bridgeNFCall to false: through the host, a firewall that drops what conntrack calls invalid stops every connection`
			}
			return fmt.Errorf("bridgeNFCall: %w; or %s", err, remedy)
		}
	}
	return nil
}
