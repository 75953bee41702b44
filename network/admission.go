package network

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// admissionPart is that the host's own firewall lets pods pass: our rule in iptables' FORWARD, which all
// networks share.
type admissionPart struct{}

func (admissionPart) look(ctx context.Context, n *site) error {
	conn := n.s.Foreign(n.rec.AdminChain)
	return n.lookAtRules("the rules in FORWARD", func() (bool, error) { return conn.Ready(ctx) },
		func() ([]tombolo.Difference, error) { return conn.Check(ctx) })
}

func (admissionPart) make(ctx context.Context, n *site) (bool, error) {
	_, err := n.s.Foreign(n.rec.AdminChain).Ensure(ctx)
	return false, err
}

// obstacles says what stops the pods' packets for certain and is out of our reach. firewalld says
// that it is the only one.
func obstacles(ctx context.Context, s *session, rec *state.Network) (firewalld bool, _ error) {
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
	return firewalld, failf(ErrObstructed, "%s", strings.Join(texts, "; "))
}

// refuseObstacles says what would stop the pods' packets, and is out of our reach and of tombolod's:
// once the network is on record, that has the bridge of a gateway join a zone of firewalld. coming
// says that it is to.
func refuseObstacles(ctx context.Context, s *session, rec *state.Network, gateway bool) (coming bool, _ error) {
	firewalld, err := obstacles(ctx, s, rec)
	if firewalld && gateway && rec.Uplink == "" && s.Dir.ZonesAttended(rec.GatewayLink()) {
		return true, nil
	}
	return false, err
}

// awaitZone waits for tombolod to have put firewalld out of the way of the network's pods, for 8 s
// at most: that takes firewalld some 0.1 s, and longer with many rules. Until then the record says
// that the network is not built: the next ADD sees to that, if this one fails.
func awaitZone(ctx context.Context, s *session, rec *state.Network) error {
	finished := rec.ConfigHash
	rec.ConfigHash = ""
	err := s.Dir.SaveNetwork(rec)
	rec.ConfigHash = finished
	if err != nil {
		return stateError(err)
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

// Foreign is what other firewalls have to let pods pass by, over the same socket.
func (s *session) Foreign(adminChain string) *foreign.Conn {
	return foreign.On(s.Firewall.Socket(), &foreign.Config{Mark: s.Mark, AdminChain: adminChain})
}

// Obstacles lists what stops pods of a network, or may stop them, and is out of reach, or left to its owner.
// Nothing of pods whose router is on the LAN is forwarded, unless bridged packets pass the firewall.
func (s *session) Obstacles(ctx context.Context, rec *state.Network) ([]foreign.Obstacle, error) {
	if rec.DefaultRoute == string(ExitRouter) && !filtersBridged(rec, true) && !filtersBridged(rec, false) {
		return nil, nil
	}
	link := rec.GatewayLink()
	if rec.DefaultRoute == exitHost {
		nic, err := s.sharedNIC(ctx, rec)
		if err != nil {
			return nil, err
		}
		link = cmp.Or(nic, link)
	}
	return s.Foreign(rec.AdminChain).Obstacles(ctx, foreign.Path{Bridge: link, Prefixes: rec.Subnets})
}

// sharedNIC returns the name of the NIC that the bridge of a network shares, or is to share; empty if there is none.
func (s *session) sharedNIC(ctx context.Context, rec *state.Network) (string, error) {
	if rec.Uplink == "" {
		return "", nil
	}
	nic, err := s.shares().Find(ctx, shareOf(rec))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil // which uplinkPart reports
	}
	if err != nil || nic.Master != 0 {
		return "", err
	}
	return nic.Name, nil
}

// filtersBridged reports whether packets of IPv4, or of IPv6, that the bridge of a network switches pass the firewall. A
// network that is not made yet leaves NFCall open.
func filtersBridged(rec *state.Network, ipv4 bool) bool {
	own := rec.NFCall == nil && rec.DefaultRoute == exitHost || rec.NFCall != nil && *rec.NFCall
	return passesFirewall(&bridge.BridgeState{NFCallIPTables: own, NFCallIP6Tables: own}, ipv4)
}

// reversePaths names the rules that drop what pods at a shared NIC send, if bridged packets pass the firewall: these come
// in by the bridge, and the way back is by the NIC.
func (s *session) reversePaths(ctx context.Context, rec *state.Network) ([]string, error) {
	var families []uint8
	if filtersBridged(rec, true) {
		families = append(families, unix.NFPROTO_IPV4)
	}
	hasIPv6 := rec.SLAAC || slices.ContainsFunc(rec.Subnets, isIPv6)
	if hasIPv6 && filtersBridged(rec, false) {
		families = append(families, unix.NFPROTO_IPV6)
	}
	if len(families) == 0 {
		return nil, nil
	}
	if nic, err := s.sharedNIC(ctx, rec); err != nil || nic == "" {
		return nil, err
	}
	return s.Foreign("").ReversePaths(ctx, rec.Bridge, families...)
}

// Admit gives the network of a pod that is attached already an ingress policy, of which and Network.Policy the stricter
// counts, and has iptables call a chain of the operator's first, where it works over nf_tables (foreign.Config); empty is
// none. Its Add has other firewalls let pass what the pod sends. An attachment that is not on record is as with
// Publish.
func (c Change) Admit(ctx context.Context, policy nft.Policy, adminChain string) error {
	a, err := c.node.attached(ctx, c.key)
	if err != nil {
		return err
	}
	s, err := c.node.openEntered(ctx)
	if err != nil {
		return err
	}
	defer s.Close()
	_, err = reach(ctx, s, a, func(nw *state.Network) bool {
		changes := nw.ChainedPolicy != policy || nw.AdminChain != adminChain
		nw.ChainedPolicy, nw.AdminChain = policy, adminChain
		return changes
	})
	return err
}
