package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
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
	if err := nw.refuseIPv6(nw.Subnets); err != nil {
		return err
	}
	if err := n.uplinkReady(ctx, nw); err != nil {
		return err
	}
	if err := refuseContested(n.dir); err != nil {
		return err
	}
	if leases == nil && nw.Allocator != nil {
		return n.allocatorReady(ctx, nw)
	}
	if leases == nil {
		return nil
	}
	dir, err := lease.Open(n.leaseDir)
	if err != nil {
		return fail.Errorf(ErrInvalid, "%v", err)
	}
	return refuseUnkept(dir, leases)
}

// allocatorReady asks the network's allocator.
func (n *Node) allocatorReady(ctx context.Context, nw *Network) error {
	e, err := n.dir.Epoch()
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, state.ErrStale) && !errors.Is(err, state.ErrDamaged) {
		return fail.State(err)
	}
	// Where this life has no epoch yet, it is another than that of any reservation.
	node := ipam.Node{Epoch: ipam.Epoch{Token: e.Token(), Started: e.Started}, Hash: nw.hashOf}
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
	return refuseObstacles(ctx, n.mark, n.podPath(nw))
}

// podPath is how pods' packets go, as far as is known: another firewall may let pass the subnets
// of those that there are, and not the bridge.
func (n *Node) podPath(nw *Network) nft.Path {
	path := nft.Path{Bridge: nw.Bridge}
	if rec, err := n.dir.LoadNetwork(nw.Name); err == nil && rec.Bridge == nw.Bridge {
		path.Prefixes = rec.Subnets
	}
	return path
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
	taken, err := s.uplinks().IsTaken(nw.Uplink.NIC)
	if err != nil {
		return err
	}
	if !taken {
		return s.uplinks().CouldTake(ctx, ours(nw.Uplink, nw.Bridge))
	}
	list, err := s.uplinks().Differences(ctx, nw.Uplink.NIC, nw.Bridge)
	if err != nil {
		return err
	}
	list = append(list, takeover.LeaseTrouble(n.leaseDir)...)
	if len(list) > 0 {
		return fmt.Errorf("uplink %s: %s", nw.Uplink.NIC, strings.Join(list, "; "))
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
func (nw *Network) refuseIPv6(subnets []netip.Prefix) error {
	asked := ""
	if i := slices.IndexFunc(subnets, isIPv6); i >= 0 {
		asked = fmt.Sprintf("an address in %s", subnets[i])
	}
	if nw.SLAAC {
		asked = `ipv6 "slaac"`
	}
	if asked == "" || kernelHasIPv6() {
		return nil
	}
	return fail.Errorf(ErrInvalid, "network %q asks for %s, and IPv6 is switched off in this kernel: take it out of the configuration, or boot without ipv6.disable=1 on the kernel's command line (and with a kernel that has IPv6)",
		nw.Name, asked)
}
