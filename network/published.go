package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/build"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/network/internal/teardown"
	"github.com/tombolo-cni/tombolo/nft"
)

// What plugins further down a chain ask for, attachments get that are there already. It is on the
// attachment's record, as if its Add had been asked for it, and is there before it is made: by the record, a
// Del finds what a killed call has made.

// Publication is what Publish is asked for.
type Publication struct {
	Ports []HostPort
	// SNAT says whose calls come to the pod from the host's address.
	SNAT nft.SNAT
}

// attached gives the record of an attachment whose Add is done. A plugin of a list has its DEL before that of the one
// whose ADD did not finish, and has given it nothing.
func (n *Node) attached(ctx context.Context, key Key) (*state.Attachment, error) {
	if err := n.usableFor(ctx, key); err != nil {
		return nil, err
	}
	rec, err := n.cfg.Dir.Load(key.Network, key.hash())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fail.Errorf(ErrNotAttached, "container %s has no attachment %s to network %q on record: DEL it and ADD it again", key.ContainerID, key.IfName, key.Network)
	case err != nil:
		return nil, fail.State(err)
	case rec.State != state.Ready:
		return nil, fail.Errorf(ErrNotAttached, "the ADD of container %s did not finish: DEL it and ADD it again", key.ContainerID)
	}
	return rec, nil
}

// change locks the record of an attachment whose Add is done, and has it changed.
func (n *Node) change(ctx context.Context, key Key, do func(s *session.Session, a, next *state.Attachment) error) error {
	if _, err := n.attached(ctx, key); err != nil {
		return err
	}
	lock, err := n.cfg.Dir.LockAttachment(key.Network, key.hash())
	if err != nil {
		return fail.State(err)
	}
	defer lock.Close()
	a, err := n.attached(ctx, key)
	if err != nil {
		return err
	}
	s, err := n.openEntered(ctx)
	if err != nil {
		return err
	}
	defer s.Close()
	next := *a
	return do(s, a, &next)
}

// Publish has ports of the host lead to a pod that is attached already, in place of those that do,
// as if its Add had been asked for them; without any, none does. It undoes itself. An attachment
// that is not on record, or whose Add did not finish, is ErrNotAttached. It needs CAP_NET_ADMIN.
func (n *Node) Publish(ctx context.Context, key Key, what Publication) error {
	return n.change(ctx, key, func(s *session.Session, a, next *state.Attachment) error {
		if len(what.Ports) == 0 {
			return unpublish(ctx, s, a, next)
		}
		if err := refuseUnreachable(what.Ports, a.Addresses); err != nil {
			return err
		}
		if err := refuseListeners(ctx, key.ContainerID, what.Ports, a.Addresses, false); err != nil {
			return err
		}
		next.Published, next.PortSNAT = endpoint.Published(what.Ports), endpoint.SNATName(what.SNAT)
		err := n.publish(ctx, s, a, next)
		if err != nil {
			err = errors.Join(err, teardown.CloseLoopback(context.WithoutCancel(ctx), s, false, next.Bridge, next.GatewayLink()))
		}
		return err
	})
}

func (n *Node) publish(ctx context.Context, s *session.Session, a, next *state.Attachment) error {
	nw, err := build.Reach(ctx, s, next, func(nw *state.Network) bool {
		lacks := next.PortSNAT != "" && !nw.PortSNAT
		nw.PortSNAT = nw.PortSNAT || lacks
		return lacks
	})
	if err != nil {
		return err
	}
	has, asked := endpoint.In(a, nw), endpoint.In(next, nw)
	if len(has.Ports) > 0 && (has.PortSNAT != asked.PortSNAT || !slices.Equal(has.Ports, asked.Ports)) {
		// The next record does not tell of them.
		none := has
		none.Ports, none.PortSNAT = nil, nft.SNATNeeded
		if err := s.Firewall.Update(ctx, has, none); err != nil {
			return err
		}
		has = none
	}
	if err := s.Dir.UpdateLocked(next); err != nil {
		return fail.State(err)
	}
	e := &entry{node: n, s: s, hash: a.Hash(), in: nw, held: &has, getsMore: true, attached: true}
	err = e.add(ctx, next, nil)
	if err == nil && slices.ContainsFunc(next.Published, func(p state.Published) bool { return p.Withheld }) {
		err = s.Dir.UpdateLocked(next)
	}
	if err == nil {
		err = flushStale(ctx, s.Links, next)
	}
	if err != nil {
		ctx = context.WithoutCancel(ctx)
		return errors.Join(err, s.Firewall.Update(ctx, endpoint.In(next, nw), endpoint.In(a, nw)), s.Dir.UpdateLocked(a))
	}
	if endpoint.PublishesIPv4(a) && !endpoint.PublishesIPv4(next) {
		return teardown.CloseLoopback(ctx, s, endpoint.PublishesIPv4(a), a.Bridge, a.GatewayLink())
	}
	return nil
}

// unpublish has no port lead there any more. Those that others of the container have waited for are passed on.
func unpublish(ctx context.Context, s *session.Session, a, next *state.Attachment) error {
	if len(a.Published) == 0 {
		return teardown.CloseLoopback(ctx, s, false, a.Bridge, a.GatewayLink()) // a killed call may have left some of it
	}
	next.Published, next.Waiting, next.PortSNAT = nil, nil, ""
	nw, err := s.Dir.LoadNetwork(a.Network)
	if err != nil {
		return fail.State(err)
	}
	err = fail.Join(
		func() error { return s.Firewall.Update(ctx, endpoint.In(a, nw), endpoint.In(next, nw)) },
		func() error { s.PassPorts(ctx, a.Waiting); return nil },
		func() error { return <-teardown.FlushFlows(ctx, s.Links, a) },
	)
	if err != nil {
		return err
	}
	// As long as the rest is not done, the record says so by having none.
	if err := s.Dir.UpdateLocked(next); err != nil {
		return fail.State(err)
	}
	return teardown.CloseLoopback(ctx, s, endpoint.PublishesIPv4(a), a.Bridge, a.GatewayLink())
}

// Limit gives a pod that is attached already limits in place of those that it has, as if its Add had
// been asked for them; the zero Shape is none. It gives the link that shapes what the pod sends, nil if
// that has no limit. An attachment that is not on record is as with Publish.
func (n *Node) Limit(ctx context.Context, key Key, limits bandwidth.Shape) (by *bridge.Link, _ error) {
	err := n.change(ctx, key, func(s *session.Session, a, next *state.Attachment) error {
		target, conn := recorded.Target(a), bandwidth.On(s.Links.Socket())
		if limits.IsZero() {
			if recorded.Shape(a).IsZero() {
				return nil
			}
			recorded.Limit(next, limits)
			if err := conn.Remove(ctx, target); err != nil {
				return err
			}
			return s.Dir.UpdateLocked(next)
		}
		effective, err := effectiveLimits(s, limits, a.MTU)
		if err != nil {
			return err
		}
		recorded.Limit(next, effective)
		if err := s.Dir.UpdateLocked(next); err != nil {
			return fail.State(err)
		}
		if _, err := conn.Ensure(ctx, target, effective); err != nil {
			return errors.Join(err, conn.Remove(context.WithoutCancel(ctx), target), s.Dir.UpdateLocked(a))
		}
		if next.IFB != "" {
			by, err = s.Links.Link(ctx, next.IFB)
		}
		return err
	})
	return by, err
}

// effectiveLimits gives limits as the kernel enforces them, and warns of what is not as it was asked for.
func effectiveLimits(s *session.Session, asked bandwidth.Shape, mtu int) (bandwidth.Shape, error) {
	effective, adjusted, err := asked.Effective(mtu)
	if err != nil {
		return bandwidth.Shape{}, fail.Errorf(bandwidth.ErrInvalid, "bandwidth: %w", err)
	}
	for _, adj := range adjusted {
		s.Warn("bandwidth: " + adj)
	}
	return effective, nil
}

// Admission is what Admit is asked for.
type Admission struct {
	Policy nft.Policy // of the network; the stricter of this and Network.Policy counts
	// AdminChain is a chain of the operator's that iptables is to call first, where it works over nf_tables:
	// see foreign.Config. Empty is none.
	AdminChain string
}

// Admit gives the network of a pod that is attached already an ingress policy, and has iptables call a chain of the
// operator's. Its Add has other firewalls let pass what the pod sends. An attachment that is not on record is as with
// Publish.
func (n *Node) Admit(ctx context.Context, key Key, how Admission) error {
	a, err := n.attached(ctx, key)
	if err != nil {
		return err
	}
	s, err := n.openEntered(ctx)
	if err != nil {
		return err
	}
	defer s.Close()
	policy := recorded.PolicyName(how.Policy)
	_, err = build.Reach(ctx, s, a, func(nw *state.Network) bool {
		changes := nw.ChainedPolicy != policy || nw.AdminChain != how.AdminChain
		nw.ChainedPolicy, nw.AdminChain = policy, how.AdminChain
		return changes
	})
	return err
}

// Tuned tells of a MAC (nil: the same) and an MTU in bytes (0: the same) that another program
// gives to a pod's interface: the guard, the port and the record follow. A MAC that a lease or a LAN
// knows the pod by is ErrInvalid, and an attachment that is not on record ErrNotAttached. It needs
// CAP_NET_ADMIN.
func (n *Node) Tuned(ctx context.Context, key Key, mac net.HardwareAddr, mtu int) error {
	if len(mac) != 0 && len(mac) != 6 || mtu < 0 {
		return fail.Errorf(ErrInvalid, "MAC %s and MTU %d cannot be an interface's", mac, mtu)
	}
	return n.change(ctx, key, func(s *session.Session, a, next *state.Attachment) error {
		if mac != nil {
			next.MAC = mac.String()
		}
		if next.MAC != a.MAC && (a.Untrusted || a.SLAAC || a.IPAMType == endpoint.Leased) {
			return fail.Errorf(ErrInvalid, "the MAC of interface %s, by which it has its lease or is known on its LAN, cannot be changed from %s to %s: ask for it at its ADD (the capability mac, or args.cni.mac)", a.IfName, a.MAC, next.MAC)
		}
		if mtu > a.MTU && a.MTU > 0 {
			next.MTU = mtu
			if err := s.Links.SetPortMTU(ctx, a.HostIf, mtu); err != nil {
				return err
			}
		}
		if next.MAC == a.MAC && next.MTU == a.MTU {
			return nil
		}
		if next.MAC != a.MAC {
			if err := s.Firewall.Move(ctx, endpoint.Of(a), endpoint.Of(next)); err != nil {
				return err
			}
		}
		return s.Dir.UpdateLocked(next)
	})
}

// CheckAsked compares an attachment with what Publish and Limit were asked for; nil is nothing. What the
// kernel has of it, Check compares. An attachment that is not on record is ErrNotAttached.
func (n *Node) CheckAsked(ctx context.Context, key Key, ports *Publication, limits *bandwidth.Shape) ([]tombolo.Difference, error) {
	a, err := n.attached(ctx, key)
	if err != nil {
		return nil, err
	}
	var found []tombolo.Difference
	add := func(format string, args ...any) {
		found = append(found, tombolo.Difference{Text: fmt.Sprintf(format, args...)})
	}
	if ports != nil {
		if endpoint.SNAT(a.PortSNAT) != ports.SNAT {
			add("calls of its ports come from the host's address as by %q, which is not what was asked for", a.PortSNAT)
		}
		for _, p := range endpoint.Published(ports.Ports) {
			if !slices.ContainsFunc(a.Published, func(has state.Published) bool { has.Withheld = false; return has == p }) {
				add("port %s of the host does not lead to the pod", endpoint.PortText(endpoint.Port(&p)))
			}
		}
	}
	if limits != nil {
		want, _, err := limits.Effective(max(a.MTU, 1))
		if err != nil {
			return nil, err
		}
		if has := recorded.Shape(a); has != want {
			add("the limits are %+v, where %+v was asked for", has, want)
		}
	}
	return found, nil
}
