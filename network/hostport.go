package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/hostport"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
)

// withholdsPorts reports whether an attachment has withheld host ports. Some runtimes pass a container's ports to all
// of its networks. Then only one attachment publishes the ports: the first, or the first that is not on a LAN. Its
// record lists the others as waiting, and their records list the ports as withheld. They get the ports when the
// publishing attachment or its ports are removed.
func withholdsPorts(a *state.Attachment) bool {
	return slices.ContainsFunc(a.Published, func(p state.Published) bool { return p.Withheld })
}

func newWaiting(a *state.Attachment) state.Waiting {
	return state.Waiting{Network: a.Network, Hash: a.Hash(), LAN: a.DefaultRoute != ""}
}

// isOfSameContainer reports whether two different attachments belong to one container. It also compares the namespaces'
// paths, because Docker gives each attachment its own ContainerID.
func isOfSameContainer(a, b *state.Attachment) bool {
	return a.Hash() != b.Hash() && (a.ContainerID == b.ContainerID || a.NetNS == b.NetNS && a.NetNS != "")
}

// siblings lists other attachments of the container to which the attachment a belongs. If a is on a LAN, it lists only
// attachments to networks without a LAN. If a is not on a LAN, it lists only attachments to LANs.
func (s *session) siblings(a *state.Attachment) (list []*state.Attachment, _ error) {
	networks, err := s.otherNetworks(a.Network)
	for _, nw := range networks {
		if (nw.DefaultRoute == "") == (a.DefaultRoute == "") {
			continue
		}
		attachments, listErr := s.attachments(nw.Name)
		err = errors.Join(err, listErr)
		for _, o := range attachments {
			if isOfSameContainer(o, a) {
				list = append(list, o)
			}
		}
	}

	return list, err
}

// linkSiblings compares the attachment a with those that siblings lists. One of the two is always on a LAN, and the
// other is not. If the attachment without a LAN publishes host ports, its Waiting list gets the attachment on the LAN.
// So the latter gets the ports when the former is removed.
func (s *session) linkSiblings(ctx context.Context, a *state.Attachment) error {
	siblings, err := s.siblings(a)
	for _, o := range siblings {
		publishes, lan := a, o
		if a.DefaultRoute != "" {
			publishes, lan = o, a
		}
		isKnown := func(w state.Waiting) bool { return w.Network == lan.Network && w.Hash == lan.Hash() }
		if len(endpoint.Ports(publishes)) > 0 && !slices.ContainsFunc(publishes.Waiting, isKnown) {
			err = errors.Join(err, s.addWaiting(ctx, publishes, newWaiting(lan), busyWait))
		}
	}

	return err
}

// addWaiting adds the attachment w to the Waiting list of has, so that w gets the host ports of has later. If the
// callers of these ports then need source NAT, it first prepares the network. limit is as in changePorts.
func (s *session) addWaiting(ctx context.Context, has *state.Attachment, w state.Waiting, limit time.Duration) error {
	next := *has
	next.Waiting = appendWaiting(has.Waiting, w)
	if endpoint.SNAT(&next) != endpoint.SNAT(has) {
		if _, err := prepareForHostPorts(ctx, s, &next, enablePortSNAT(&next)); err != nil {
			return err
		}
	}
	return s.changePorts(ctx, newWaiting(has), limit,
		func(has *state.Attachment) { has.Waiting = appendWaiting(has.Waiting, w) })
}

// enablePortSNAT returns a function that turns on PortSNAT in a network's record, if the attachment's host ports do not
// have the default kind of source NAT, nft.SNATNeeded. The function reports whether it changed the record.
func enablePortSNAT(a *state.Attachment) func(*state.Network) bool {
	return func(nw *state.Network) bool {
		lacks := endpoint.SNAT(a) != nft.SNATNeeded && !nw.PortSNAT
		nw.PortSNAT = nw.PortSNAT || lacks
		return lacks
	}
}

// appendWaiting returns a copy of list with w at its end, and nowhere else.
func appendWaiting(list []state.Waiting, w state.Waiting) []state.Waiting {
	return append(removeWaiting(list, w), w)
}

func removeWaiting(list []state.Waiting, w state.Waiting) []state.Waiting {
	return slices.DeleteFunc(slices.Clone(list),
		func(o state.Waiting) bool { return o.Network == w.Network && o.Hash == w.Hash })
}

// passPorts publishes the host ports of the attachment removed for the attachments that waited for them. A Del deletes
// removed, or Publish removes its ports. passPorts also deletes removed from the Waiting lists of other records. The
// caller holds the state directory's lock. passPorts only logs errors, since the removal must continue, and Repair
// tries again.
func (s *session) passPorts(ctx context.Context, removed *state.Attachment) {
	if removed == nil {
		return
	}

	for i, w := range removed.Waiting {
		if err := s.publish(ctx, w, removed.Waiting[i+1:]...); err != nil {
			s.warn("pass host ports on to another attachment of the container: " + err.Error())
		}
	}
	if withholdsPorts(removed) || removed.DefaultRoute != "" {
		if err := s.stopWaiting(ctx, removed); err != nil {
			s.warn("have an attachment wait for host ports no more: " + err.Error())
		}
	}
}

// publish publishes the host ports that the record of the attachment w marks as withheld. It leaves out ports that
// another attachment publishes. It records that the attachments in others get the ports after w. publish skips an
// attachment that another call is working on, or that is gone. Repair publishes ports that are still withheld.
func (s *session) publish(ctx context.Context, w state.Waiting, others ...state.Waiting) error {
	a, err := s.Dir.Load(w.Network, w.Hash)
	if err != nil || a.State != state.Ready {
		return nil
	}

	withheld := slices.DeleteFunc(slices.Clone(a.Published), func(p state.Published) bool { return !p.Withheld })
	publish := func(ports ...state.Published) error {
		// Try several times, since another Publish may hold the record's lock for a moment.
		return s.changePorts(ctx, w, busyWait, func(a *state.Attachment) {
			for i, p := range a.Published {
				a.Published[i].Withheld = p.Withheld && !slices.Contains(ports, p)
			}
			for _, o := range others {
				a.Waiting = appendWaiting(a.Waiting, o)
			}
		})
	}
	if len(withheld) == 0 {
		return nil
	}

	isTaken := func(err error) bool { return errors.As(err, new(*nft.ConflictError)) }
	if err = publish(withheld...); isTaken(err) {
		for i := 0; i < len(withheld) && (err == nil || isTaken(err)); i++ {
			err = publish(withheld[i])
		}
	}

	if errors.Is(err, state.ErrBusy) || errors.Is(err, fs.ErrNotExist) || isTaken(err) {
		return nil
	}

	return err
}

// stopWaiting deletes an attachment from the Waiting lists of the container's other attachments. If it stayed there
// after its Del, the end of another attachment could lead host ports to its addresses. These may then belong to another
// pod.
func (s *session) stopWaiting(ctx context.Context, removed *state.Attachment) error {
	w := newWaiting(removed)
	list, err := s.allAttachments()
	for _, has := range list {
		if isOfSameContainer(has, removed) && len(removeWaiting(has.Waiting, w)) < len(has.Waiting) {
			err = errors.Join(err, s.changePorts(ctx, newWaiting(has), 0,
				func(has *state.Attachment) { has.Waiting = removeWaiting(has.Waiting, w) }))
		}
	}
	return err
}

// busyWait limits the wait for a call that holds a record for a moment.
const busyWait = 100 * time.Millisecond

// changePorts calls change with an attachment's record, and then updates the host ports in the firewall and the record.
// limit is how long it waits for another call that has locked the record. After that, the error matches state.ErrBusy.
func (s *session) changePorts(ctx context.Context, w state.Waiting, limit time.Duration,
	change func(*state.Attachment)) (err error) {
	do := func(a *state.Attachment) error {
		n, err := s.Dir.LoadNetwork(w.Network)
		if err != nil {
			return err
		}

		before := endpoint.In(a, n)
		change(a)
		after := endpoint.In(a, n)
		if err := s.Firewall.Update(ctx, before, after); err != nil {
			return err
		}

		if err := s.Dir.UpdateLocked(a); err != nil {
			return errors.Join(err, s.Firewall.Update(ctx, after, before))
		}

		return nil
	}

	_ = poll(ctx, 5*time.Millisecond, limit, func() (done bool, _ error) {
		err = s.withLockedRecord(w.Network, w.Hash, do)
		return !errors.Is(err, state.ErrBusy), nil
	})
	return err
}

// refuseListeners returns an error if a socket of the host uses one of the requested host ports.
func refuseListeners(ctx context.Context, containerID string, requested []nft.Port, has []ipam.Address,
	mayHaveMore bool) error {
	found, err := findListeners(ctx, containerID, requested, has, mayHaveMore)
	if err != nil || len(found) == 0 {
		return err
	}
	return failf(ErrConflict, "publish port %d of the host: %s: %s", found[0].Local.Port(), found[0],
		listenerAdvice(found[0]))
}

// findListeners finds sockets of the host on the requested ports: once published, the pod would get their packets. It
// looks for a port without a host address in the families of the pod's addresses. If mayHaveMore is true, the pod may
// get addresses later, by a lease or SLAAC, so findListeners looks in both families. It leaves out sockets that only
// reserve the ports for the container's runtime (hostport.NotHeldFor).
func findListeners(ctx context.Context, containerID string, requested []nft.Port, has []ipam.Address,
	mayHaveMore bool) ([]hostport.Listener, error) {
	if len(requested) == 0 {
		return nil, nil
	}

	ports := slices.Clone(requested)
	of4 := func(a ipam.Address) bool { return a.Prefix.Addr().Is4() }
	of6 := func(a ipam.Address) bool { return !of4(a) }
	if has4, has6 := slices.ContainsFunc(has, of4), slices.ContainsFunc(has, of6); has4 != has6 && !mayHaveMore {
		all := netip.IPv6Unspecified()
		if has4 {
			all = netip.IPv4Unspecified()
		}
		for i := range ports {
			ports[i].HostAddr = cmp.Or(ports[i].HostAddr, all)
		}
	}

	found, err := hostport.Listeners(ctx, nil, ports...)
	return hostport.NotHeldFor(containerID, found), err
}

// listenerAdvice returns advice for the operator about a socket that uses a requested host port.
func listenerAdvice(l hostport.Listener) string {
	text := "stop it, or choose another hostPort"
	switch {
	case l.Link == "lo" && l.Local.Addr().IsUnspecified(): // the host reaches all of its own addresses through lo
	case l.Link != "":
		text += ", or a hostIP that is an address of another link than " + l.Link
	case !l.Local.Addr().IsUnspecified():
		text += ", or a hostIP that is another address of the host"
	}

	// The socket may belong to a UDP client, since a client that binds before it connects looks like a server. If the
	// port is in the kernel's range of ports for clients, add advice for this case.
	const portRange = "net/ipv4/ip_local_port_range"
	var first, last uint16
	bounds, err := sysctl.Read(portRange)
	if n, _ := fmt.Sscan(bounds, &first, &last); err == nil && n == 2 && l.Protocol == nft.UDP &&
		first <= l.Local.Port() && l.Local.Port() <= last {
		text += fmt.Sprintf(
			"; if that is a client, whose port the kernel chose out of net.ipv4.ip_local_port_range (%d-%d): try "+
				"again, and add %d to net.ipv4.ip_local_reserved_ports, so that no other client gets it",
			first, last, l.Local.Port())
	}

	return text
}

// maxRanges limits the number of ranges of host ports in a record.
const maxRanges = 4096

// checkPorts returns an error if a port is invalid, or if the ports form too many ranges for a record.
func checkPorts(ports []nft.Port) error {
	for _, p := range ports {
		if err := p.Check(); err != nil {
			return failf(ErrInvalid, "publish: %w", err)
		}
	}

	if n := len(endpoint.Published(ports)); n > maxRanges {
		return failf(ErrInvalid,
			"publish %d ranges of ports of the host: a pod has up to %d, each of ports that follow one another and "+
				"lead to ports that do: publish fewer, or in a row", n, maxRanges)
	}
	return nil
}

// refuseUnreachable returns an error if a requested port cannot lead to the pod: the pod has no address, or none of the
// family of the port's host address.
func refuseUnreachable(ports []nft.Port, addresses []ipam.Address) error {
	for _, p := range ports {
		if p.HostAddr.IsValid() && !slices.ContainsFunc(addresses,
			func(a ipam.Address) bool { return a.Prefix.Addr().Is4() == p.HostAddr.Is4() }) {
			return failf(ErrInvalid, "publish port %s: the pod has no address of that family", p)
		}
		if len(addresses) == 0 {
			return failf(ErrInvalid, "publish port %s: the pod has no address", endpoint.PortText(p))
		}
	}

	return nil
}

// flushStale deletes the conntrack entries of UDP flows to an attachment's host ports, if the flows lead elsewhere.
func flushStale(ctx context.Context, links *bridge.Conn, rec *state.Attachment) error {
	conn, err := dialFlows(links, rec)
	if conn == nil {
		return err
	}
	defer conn.Close()
	return conn.FlushStale(ctx, endpoint.Addresses(rec), endpoint.Ports(rec)...)
}

// dialFlows opens a connection to the kernel's conntrack table. It returns nil if rec is nil or publishes no UDP port.
// Only a UDP client that keeps sending keeps its old flow. Clients of other protocols open new flows.
func dialFlows(links *bridge.Conn, rec *state.Attachment) (*hostport.Conn, error) {
	udp := func(p nft.Port) bool { return p.Protocol == unix.IPPROTO_UDP }
	if rec == nil || !slices.ContainsFunc(endpoint.Ports(rec), udp) {
		return nil, nil
	}
	return hostport.Dial(nil, links.Routes())
}

// flushFlows deletes the conntrack entries of UDP flows to host ports that an attachment loses. It works in the
// background, and the caller receives the error from the channel. The kernel walks through its whole table, which takes
// some 10 ms. In this time the caller can delete the link, which takes as long.
func flushFlows(ctx context.Context, links *bridge.Conn, rec *state.Attachment) <-chan error {
	done := make(chan error, 1)

	// Open the socket on the caller's thread, in the caller's namespace. Any thread can use it.
	conn, err := dialFlows(links, rec)
	if conn == nil {
		done <- err
		return done
	}

	go func() {
		defer conn.Close()
		done <- conn.Flush(ctx, endpoint.Addresses(rec), endpoint.Ports(rec)...)
	}()
	return done
}

// Publication is the argument of Change.Publish.
type Publication struct {
	Ports []nft.Port
	// SNAT selects the callers whose packets reach the pod with the host's source address.
	SNAT nft.SNAT
}

// Publish makes ports of the host lead to an attached pod, as if its Add had requested them. They replace the pod's
// present ports. If that fails, Publish restores the present ports. Without any ports, Publish only removes the present
// ones, and a later call completes a failed removal. If there is no record of the attachment, or its Add is not
// complete, the error matches ErrNotAttached. Publish needs CAP_NET_ADMIN.
func (c Change) Publish(ctx context.Context, what Publication) error {
	return c.do(ctx, func(s *session, a, next *state.Attachment) error {
		err := c.replacePorts(ctx, s, a, next, what)
		if err == nil && endpoint.PublishesIPv4(next) {
			return nil
		}

		// Without IPv4 ports, close the way from 127.0.0.1 in any case, since a killed call may have opened it.
		published, ctx := err == nil && endpoint.PublishesIPv4(a), context.WithoutCancel(ctx)
		if err != nil {
			s.leave() // the error may have cost the lock
			err = errors.Join(err, s.enter(ctx))
		}
		return errors.Join(err, closeUnusedLoopback(ctx, s, published, a.Bridge, a.GatewayLink()))
	})
}

// replacePorts replaces the ports as Publish does, but does not turn off settings for 127.0.0.1 that are no longer
// needed.
func (c Change) replacePorts(ctx context.Context, s *session, a, next *state.Attachment, what Publication) error {
	if len(what.Ports) == 0 {
		return unpublish(ctx, s, a, next)
	}

	err := cmp.Or(checkPorts(what.Ports), refuseUnreachable(what.Ports, a.Addresses),
		refuseListeners(ctx, c.key.ContainerID, what.Ports, a.Addresses, false))
	if err != nil {
		return err
	}

	next.Published, next.PortSNAT = endpoint.Published(what.Ports), what.SNAT
	if next.DefaultRoute == "" {
		lans, err := s.siblings(next)
		if err != nil {
			return err
		}
		for _, o := range lans {
			next.Waiting = appendWaiting(next.Waiting, newWaiting(o))
		}
	}

	return c.node.publish(ctx, s, a, next)
}

func (n *Node) publish(ctx context.Context, s *session, a, next *state.Attachment) error {
	nw, err := prepareForHostPorts(ctx, s, next, enablePortSNAT(next))
	if err != nil {
		return err
	}

	has, requested := endpoint.In(a, nw), endpoint.In(next, nw)
	if len(has.Ports) > 0 && (has.PortSNAT != requested.PortSNAT || !slices.Equal(has.Ports, requested.Ports)) {
		// Delete the old elements first. The new record does not list them, so a crash after it is written would
		// leave them.
		none := has
		none.Ports, none.PortSNAT = nil, nft.SNATNeeded
		if err := s.Firewall.Update(ctx, has, none); err != nil {
			return err
		}
		has = none
	}

	if err := s.Dir.UpdateLocked(next); err != nil {
		return stateError(err)
	}

	e := &entry{node: n, s: s, hash: a.Hash(), network: nw, guard: &has, getsMore: true, attached: true}
	err = e.add(ctx, next, nil)
	if err == nil && withholdsPorts(next) {
		err = s.Dir.UpdateLocked(next)
	}

	if err == nil {
		err = flushStale(ctx, s.Links, next)
	}

	if err != nil {
		ctx = context.WithoutCancel(ctx)
		return errors.Join(err, s.Firewall.Update(ctx, endpoint.In(next, nw), endpoint.In(a, nw)),
			s.Dir.UpdateLocked(a))
	}

	return nil
}

// unpublish removes all host ports of an attachment, and deletes UDP flows to them. It passes ports on to other
// attachments of the container that wait for them.
func unpublish(ctx context.Context, s *session, a, next *state.Attachment) error {
	if len(a.Published) == 0 {
		return nil
	}

	next.Published, next.Waiting, next.PortSNAT = nil, nil, nft.SNATNeeded
	nw, err := s.Dir.LoadNetwork(a.Network)
	if err != nil {
		return stateError(err)
	}

	err = s.Firewall.Update(ctx, endpoint.In(a, nw), endpoint.In(next, nw))
	s.passPorts(ctx, a)
	if err := errors.Join(err, <-flushFlows(ctx, s.Links, a)); err != nil {
		return err
	}

	// Write the record last: as long as it lists ports, another call repeats the steps above.
	return stateError(s.Dir.UpdateLocked(next))
}
