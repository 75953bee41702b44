package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/build"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/inspect"
	"github.com/tombolo-cni/tombolo/network/internal/takeover"
	"github.com/tombolo-cni/tombolo/nft"
)

// Ready says why an Add to a network could not succeed now; nil if it could. leases is how its
// pods lease their addresses, nil if they do not. It changes nothing, and does not take the
// lock, since runtimes ask every few seconds.
func (n *Node) Ready(ctx context.Context, nw *Network, leases *Lease) error {
	if err := n.usable(ctx); err != nil {
		return err
	}
	if err := nw.check(); err != nil {
		return err
	}
	if err := n.probe(ctx, nw); err != nil {
		return err
	}
	if err := n.dir.CheckWritable(); err != nil {
		return fail.State(err)
	}
	if err := build.RefuseIPv6(nw.Name, nw.SLAAC, nw.Subnets); err != nil {
		return err
	}
	if err := n.refuseConflicts(ctx, nw); err != nil {
		return err
	}
	if err := n.uplinkReady(ctx, nw); err != nil {
		return err
	}
	if err := inspect.RefuseContested(n.dir); err != nil {
		return err
	}
	if leases == nil && nw.Allocator != nil {
		err := n.allocatorReady(ctx, nw)
		if errors.Is(err, ipam.ErrPoolFull) && n.couldReclaim(ctx, nw.Name) {
			return nil // an ADD does, and comes only if this says yes
		}
		return err
	}
	if leases == nil {
		return nil
	}
	dir, err := lease.Open(n.leaseDir)
	if err != nil {
		return fail.Errorf(ErrInvalid, "%v", err)
	}
	return requireKeeper(dir, leases)
}

// refuseConflicts looks at pods and networks that there are.
func (n *Node) refuseConflicts(ctx context.Context, nw *Network) error {
	e, err := n.dir.Epoch()
	if err != nil {
		e = state.Epoch{} // no record counts
	}
	s, err := n.open(n.mark)
	if err != nil {
		return err
	}
	defer s.Close()
	w := wantOf(nw, "", n.mark)
	w.Record.Subnets = nw.Subnets
	_, err = build.RefuseConflicts(ctx, s, w, e.Token())
	return err
}

// allocatorReady asks the network's allocator.
func (n *Node) allocatorReady(ctx context.Context, nw *Network) error {
	e, err := n.dir.Epoch()
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, state.ErrStale) && !errors.Is(err, state.ErrDamaged) {
		return fail.State(err)
	}
	// Where this epoch has not begun, its token is another than that of any reservation.
	node := ipam.Node{Epoch: ipam.Epoch{Token: e.Token(), Started: n.dir.Begun(e)}, Hash: nw.hashOf}
	return nw.Allocator.Bind(node).Status(ctx)
}

// probe asks for the facilities of the kernel that an Add needs.
func (n *Node) probe(ctx context.Context, nw *Network) error {
	own, err := netns.Current()
	if err != nil {
		return err
	}
	own.Close()
	br, err := n.dialBridge()
	if err == nil {
		defer br.Close()
		err = br.Probe()
	}
	if err == nil && !nw.VLAN.IsZero() {
		err = br.VLANs().Probe(ctx)
	}
	if err != nil {
		return err
	}
	fw, err := n.dialFirewall(&nft.Config{Mark: n.mark})
	if err == nil {
		defer fw.Close()
		err = fw.Probe()
	}
	if err != nil {
		return err
	}
	if nw.NFCall == nil && nw.Routed || nw.NFCall != nil && *nw.NFCall {
		if err := bridge.ProbeNetfilter(); err != nil {
			remedy := "set bridgeNFCall to false, if no service and no policy concerns pods of one node"
			if nw.Exit == ExitHost {
				remedy = `set defaultRoute to "router" and bridgeNFCall to false: through the host, a firewall that drops what conntrack calls invalid stops every connection`
			}
			return fmt.Errorf("bridgeNFCall: %w; or %s", err, remedy)
		}
	}
	// Another firewall may let pass the subnets of pods that there are, and not the bridge.
	rec := &wantOf(nw, "", n.mark).Record
	if is, err := n.dir.LoadNetwork(nw.Name); err == nil && is.Bridge == nw.Bridge {
		rec.Subnets = is.Subnets
	}
	_, err = build.RefuseObstacles(ctx, n.dir, rec, nw.Gateway)
	return err
}

// uplinkReady says what keeps the uplink from being one, and what became of one that
// is.
func (n *Node) uplinkReady(ctx context.Context, nw *Network) error {
	if nw.Uplink.NIC == "" {
		return nil
	}
	s, err := n.open(n.mark)
	if err != nil {
		return err
	}
	defer s.Close()
	taken, err := s.Uplinks().IsTaken(nw.Uplink.NIC)
	if err != nil {
		return err
	}
	if !taken {
		return s.Uplinks().CouldTake(ctx, ours(nw.Uplink, nw.Bridge))
	}
	diffs, err := s.Uplinks().Differences(ctx, nw.Uplink.NIC, nw.Bridge)
	if err != nil {
		return err
	}
	var list []string
	for _, d := range diffs {
		list = append(list, d.String())
	}
	list = append(list, takeover.LeaseTrouble(n.leaseDir)...)
	if len(list) > 0 {
		return fmt.Errorf("uplink %s: %s", nw.Uplink.NIC, strings.Join(list, "; "))
	}
	return nil
}
