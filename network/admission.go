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

// admissionPart is the part with our rules in iptables' chain FORWARD, which make the host's own firewall accept the
// pods' packets. All networks share these rules.
type admissionPart struct{}

func (admissionPart) look(ctx context.Context, n *site) error {
	conn := n.s.foreignFirewall(n.rec.AdminChain)
	return n.lookAtRules("the rules in FORWARD", func() (bool, error) { return conn.Ready(ctx) },
		func() ([]tombolo.Difference, error) { return conn.Check(ctx) })
}

func (admissionPart) make(ctx context.Context, n *site) (bool, error) {
	_, err := n.s.foreignFirewall(n.rec.AdminChain).Ensure(ctx)
	return false, err
}

// refuseCertainObstacles returns an error if settings certainly stop the pods' packets and Tombolo cannot change these
// settings. firewalld reports whether firewalld is the only obstacle.
func refuseCertainObstacles(ctx context.Context, s *session, rec *state.Network) (firewalld bool, _ error) {
	list, err := s.obstacles(ctx, rec)
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

// refuseObstacles returns an error if settings would stop the pods' packets, and neither Tombolo nor tombolod can
// change them. tombolod adds a gateway's bridge to a zone of firewalld once the network is on record. coming reports
// whether firewalld is the only obstacle, and tombolod has yet to add the bridge.
func refuseObstacles(ctx context.Context, s *session, rec *state.Network, gateway bool) (zonePending bool, _ error) {
	firewalld, err := refuseCertainObstacles(ctx, s, rec)
	if firewalld && gateway && rec.Uplink == "" && s.Dir.ZonesAttended(rec.GatewayLink()) {
		return true, nil
	}
	return false, err
}

// awaitZone waits, for at most 8 s, until tombolod has configured firewalld for the network's pods. firewalld takes
// some 0.1 s for that, and longer with many rules. During the wait, the record lacks the hash of the configuration.
// So if this ADD fails, the next ADD builds the network again, and waits too.
func awaitZone(ctx context.Context, s *session, rec *state.Network) error {
	finished := rec.ConfigHash
	rec.ConfigHash = ""
	err := s.Dir.SaveNetwork(rec)
	rec.ConfigHash = finished
	if err != nil {
		return stateError(err)
	}

	_ = poll(ctx, 20*time.Millisecond, 8*time.Second, func() (done bool, _ error) {
		var firewalld bool
		firewalld, err = refuseCertainObstacles(ctx, s, rec)
		return !firewalld || !s.Dir.ZonesAttended(rec.GatewayLink()), nil
	})
	return err
}

// foreignFirewall returns the connection to other programs' firewalls, over the same socket.
func (s *session) foreignFirewall(adminChain string) *foreign.Conn {
	return foreign.On(s.Firewall.Socket(), &foreign.Config{Mark: s.Mark, AdminChain: adminChain})
}

// refuseCertainObstacles lists the parts of other programs' firewalls that drop or may drop packets of a network's
// pods, and that we do not change. It returns none if the pods' router is on the LAN and bridged packets skip the
// firewall: then no rule of the host sees the pods' packets.
func (s *session) obstacles(ctx context.Context, rec *state.Network) ([]foreign.Obstacle, error) {
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

	return s.foreignFirewall(rec.AdminChain).Obstacles(ctx, foreign.Path{Bridge: link, Prefixes: rec.Subnets})
}

// sharedNIC returns the name of the NIC that the network's bridge shares or will share, or "" if there is none.
func (s *session) sharedNIC(ctx context.Context, rec *state.Network) (string, error) {
	if rec.Uplink == "" {
		return "", nil
	}

	nic, err := s.shares().Find(ctx, shareOf(rec))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil // uplinkPart reports the missing NIC
	}

	if err != nil || nic.Master != 0 {
		return "", err
	}
	return nic.Name, nil
}

// filtersBridged reports whether packets of IPv4, or else of IPv6, pass the firewall when the network's bridge
// forwards them. NFCall is nil if the network was not created yet and its configuration leaves the setting open.
func filtersBridged(rec *state.Network, ipv4 bool) bool {
	own := rec.NFCall == nil && rec.DefaultRoute == exitHost || rec.NFCall != nil && *rec.NFCall
	return passesFirewall(&bridge.BridgeState{NFCallIPTables: own, NFCallIP6Tables: own}, ipv4)
}

// reversePaths describes the rules that drop packets from pods at a shared NIC because of their reverse path. Such a
// rule compares the incoming link, which is the bridge, with the route back, which leads through the NIC. There are
// none if bridged packets do not pass the firewall.
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

	return s.foreignFirewall("").ReversePaths(ctx, rec.Bridge, families...)
}

// Admit sets an ingress policy for the network of an attached pod. The stricter of this policy and Network.Policy
// applies. If adminChain is not empty, Admit also makes iptables call this chain of the operator first, if iptables
// works over nf_tables (foreign.Config). If there is no record of the attachment, or its Add is not complete, the
// error matches ErrNotAttached. Admit need not make other firewalls accept the pod's packets, since the pod's Add has
// done so.
func (c Change) Admit(ctx context.Context, policy nft.Policy, adminChain string) error {
	a, err := c.node.loadAttachment(c.key)
	if err != nil {
		return err
	}

	s, err := c.node.openEntered(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	_, err = prepareForHostPorts(ctx, s, a, func(nw *state.Network) bool {
		changes := nw.ChainedPolicy != policy || nw.AdminChain != adminChain
		nw.ChainedPolicy, nw.AdminChain = policy, adminChain
		return changes
	})
	return err
}
