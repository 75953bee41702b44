package build

import (
	"context"
	"fmt"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

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
