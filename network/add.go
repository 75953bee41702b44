package network

import (
	"cmp"
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/route"
)

// Add attaches a pod to a network. It creates the network if necessary, and the pod's interface with addresses,
// routes and limits, and adds the pod's elements to the firewall. If Add fails, it undoes its changes.
//
// If an earlier Add of the same attachment was killed, Add first deletes the objects that it left. If the attachment
// exists, the error matches ErrExists. If the network has no free address, Add removes the network's dead
// attachments, as CollectDead does, and tries once more.
//
// Add needs CAP_NET_ADMIN in both namespaces, and CAP_SYS_ADMIN to enter the pod's.
func (n *Node) Add(ctx context.Context, nw *Network, pod *Pod) (*Attachment, error) {
	if err := cmp.Or(nw.check(), pod.check(nw, n.cfg.NetNS)); err != nil {
		return nil, err
	}

	made, err := n.tryAdd(ctx, nw, pod)
	if err != nil && nw.lacksAddress(err) && n.reclaim(ctx, nw) {
		made, err = n.tryAdd(ctx, nw, pod)
	}

	if err == nil && pod.Path != "" && (nw.DHCPv6 && !made.unconfirmed || made.informs) {
		return n.awaitDHCPv6(ctx, pod, made)
	}
	return made, err
}

// tryAdd tries once to add the pod. It has released all locks when it returns.
func (n *Node) tryAdd(ctx context.Context, nw *Network, pod *Pod) (*Attachment, error) {
	hash := pod.key(nw).hash()
	a := &addCall{entry: entry{node: n, hash: hash, getsMore: pod.Lease != nil || nw.SLAAC}, nw: nw, pod: pod,
		rec: pod.record(nw, hash)}
	origin := n.origin(nw)
	a.rec.IPAMType, a.rec.DataDir = origin.Type, origin.Dir
	if pod.Lease != nil {
		var err error
		if a.leasing, err = a.prepareLease(); err != nil {
			return nil, err
		}
	}

	var err error
	if a.s, err = openSession(n.cfg); err != nil {
		return nil, err
	}
	defer a.s.close()
	if a.leasing != nil {
		// Register this after a.s.Close, so that it runs before Close, which may wait for the lock of the host's
		// lease.
		defer a.leasing.unlock()
	}

	if err := n.reportStep("open"); err != nil {
		return nil, err
	}

	made, err := a.run(ctx)
	if err == nil {
		return made, nil
	}

	if a.pending != nil {
		if gone, _ := a.pending.Gone(); gone {
			// The Add may have failed because another call removed the attachment.
			a.s.warn("the attachment's record is gone: " + err.Error())
			err = errDeleted()

			// If there is a record, another ADD has created the attachment anew. Port, elements and reservations are
			// named after the attachment, so they may belong to that ADD: undo nothing. The objects of this ADD are
			// gone: the DEL has deleted them, or the other ADD deletes them as remains.
			if _, loadErr := a.s.Dir.Load(nw.Name, hash); !errors.Is(loadErr, fs.ErrNotExist) {
				_ = a.pending.Close() // ignore the error: the record's file is gone
				return nil, err
			}
		}
	}

	return nil, a.undo.run(err)
}

// addCall is the state of one Add in progress.
type addCall struct {
	entry
	nw  *Network
	pod *Pod
	rec *state.Attachment // the attachment's record, as derived so far

	leasing *leaseCall      // nil unless the address comes by DHCP
	metrics metrics         // metrics of the pod's default routes
	limits  bandwidth.Shape // the pod's limits as enforced by the kernel

	// The results of the steps so far.
	assigned assignment
	required *requirement
	port     bridge.Port
	site     *site              // the network
	link     *bridge.Attachment // nil until the pod has its link
}

// run runs the steps of an Add, in order. A pod gets its addresses before its link, except for those that it gets
// through the link.
func (a *addCall) run(ctx context.Context) (*Attachment, error) {
	if len(a.pod.Ports) > 0 {
		// Undo functions run in reverse order, so this first one runs last, when the record is deleted too.
		a.undo.push(func(ctx context.Context) error {
			return closeUnusedLoopback(ctx, a.s, false, a.nw.Bridge, a.nw.GatewayLink())
		})
	}

	// Publish the pod's host ports at the end, when the pod can answer.
	for _, step := range []func(context.Context) error{
		a.begin, a.reportStep("record"), a.allocate, a.derive, a.refuseListeners, a.ready,
		a.reportStep("network"), a.recordLease, a.attach, a.reportStep("link"), a.obtain, a.addElements, a.flushStale,
		a.reportStep("firewall"), a.commit, a.reportStep("commit"),
		a.publishWithheld,
	} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}

	return a.result(), nil
}

// reportStep returns a step that reports the end of the previous steps to Config.Step.
func (a *addCall) reportStep(name string) func(context.Context) error {
	return func(context.Context) error { return a.node.reportStep(name) }
}

// refuseListeners returns an error if a program of the host listens on a host port that the pod requests.
func (a *addCall) refuseListeners(ctx context.Context) error {
	return refuseListeners(ctx, a.pod.ContainerID, a.pod.Ports, a.assigned.addresses, a.getsMore)
}

// ensureReady ensures that the network exists as planned. Then it refuses the pod's MAC or addresses if another machine
// has them.
func (a *addCall) ready(ctx context.Context) (err error) {
	if a.site, err = ensureReady(ctx, a.s, a.required); err != nil {
		return err
	}

	a.rec.NIC = a.site.sharedNIC()
	if a.link != nil {
		return nil // the pod has sent frames from its MAC before
	}

	if err := a.refuseTwin(ctx); err != nil {
		return err
	}

	if err := a.site.refuseMAC(ctx, a.pod.MAC); err != nil {
		return err
	}
	return a.refuseTaken(ctx)
}

// addElements adds the pod's elements to the firewall's sets.
func (a *addCall) addElements(ctx context.Context) error {
	setLimits(a.rec, a.limits)
	return a.add(ctx, a.rec, a.required)
}

func (a *addCall) flushStale(ctx context.Context) error {
	return flushStale(ctx, a.s.Links, a.rec)
}

// commit waits until the port forwards, and writes the attachment's complete record.
func (a *addCall) commit(ctx context.Context) error {
	if err := a.s.Links.Wait(ctx, a.rec.HostIf); err != nil {
		return err
	}

	if a.leasing != nil {
		if err := a.leasing.commit(ctx, a.s); err != nil {
			return err
		}
	}

	if err := a.refuseAnswered(a.link.PeerMAC); err != nil {
		return err
	}

	err := a.pending.Commit(a.rec)
	if errors.Is(err, fs.ErrNotExist) {
		return errDeleted()
	}

	return stateError(err)
}

// publishWithheld publishes the pod's withheld ports. They belonged to another attachment of the container, and a Del
// of that attachment may have come too early to pass them on. Before that, publishWithheld calls linkSiblings if the
// container seems to have other attachments.
func (a *addCall) publishWithheld(ctx context.Context) error {
	rec := a.rec

	// Each of these conditions is a sign that the container has another attachment. Either this attachment took over
	// host ports, or its default route got another metric because the container has a default route already.
	l := a.leasing
	if a.isTakeover || a.metrics != nil || l != nil && l.rec.Policy.Priority != l.request.Priority {
		if err := a.s.linkSiblings(ctx, rec); err != nil {
			return err
		}
	}

	if !withholdsPorts(rec) {
		return nil
	}
	return a.s.publish(ctx, newWaiting(rec))
}

// result returns the result of Add.
func (a *addCall) result() *Attachment {
	at := attachmentOf(a.rec)
	at.BridgeMAC, at.BridgeMTU = a.site.bridge.MAC, a.site.rec.MTU
	if l := a.site.gatewayLink; a.site.share == nil && l.Index != a.site.bridge.Index {
		at.HostVLAN, at.HostVLANMAC = l.Name, l.MAC
	}

	at.PortMAC, at.MAC = a.link.MAC, a.link.PeerMAC
	at.Addresses, at.DNS = a.assigned.addresses, a.assigned.dns
	at.Routes = a.metrics.apply(withDefaults(a.nw.DefaultGateway, at.Addresses, a.assigned.routes))
	if a.leasing == nil {
		return at
	}

	rec := a.leasing.rec
	if rec.Applied.MTU > 0 {
		at.PodMTU = min(rec.Applied.MTU, at.MTU)
	}

	at.informs, at.unconfirmed = rec.Six != nil && rec.Six.Stateless, a.unconfirmed()
	return at
}

// assignment holds the addresses of a pod, IPv4 first, its routes as requested, and its name servers.
type assignment struct {
	addresses []ipam.Address
	routes    []route.Route
	dns       DNS
	informs   bool // DHCPv6 announces name servers that routers do not
}

// maxRemains limits how often one ADD deletes the remains of killed ADDs. Once is enough, unless other ADDs of the
// same attachment are killed at the same time.
const maxRemains = 3

// begin takes the ADD's locks in their order, and writes the attachment's record before the ADD creates anything. So
// every object has an owner, even after a kill. The ADD holds the record's lock until its end. No other call waits
// for that lock.
func (a *addCall) begin(ctx context.Context) error {
	for range maxRemains {
		if a.leasing != nil {
			// Look for remains first: a running ADD of the same attachment holds the lease's lock until its DHCP
			// server answers. A DEL or the keeper may hold that lock for a while. In the order of locks, the lease's
			// lock comes before the state's lock.
			if err := a.takeRemainsDown(ctx); err != nil {
				return err
			}
			var err error
			if a.leasing.lock, err = a.leasing.dir.Lock(ctx, a.hash); err != nil {
				return failf(ErrTryAgain, "%w", err)
			}
		}

		if err := a.s.enter(ctx); err != nil {
			return err
		}

		err := a.writeRecord()
		if !errors.Is(err, fs.ErrExist) {
			return err
		}

		// Release the locks first, since takeRemainsDown may have to release a lease, or to call an IPAM plugin.
		a.s.leave()
		if a.leasing != nil {
			a.leasing.unlock()
		}

		if err := a.takeRemainsDown(ctx); err != nil {
			return err
		}
	}

	return errAlreadyExists(a.pod.key(a.nw))
}

// writeRecord creates the attachment's record and locks it. If a record exists, the error matches fs.ErrExist.
func (a *addCall) writeRecord() error {
	a.rec.Epoch = a.s.Epoch.Token()
	var err error
	if a.pending, err = a.s.Dir.Create(a.rec); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return err
		}
		return stateError(err)
	}
	a.undo.push(func(context.Context) error { return a.pending.Abandon() })
	return nil
}

// takeRemainsDown deletes the objects that a killed ADD of the same attachment left, and its record. Such a record is
// neither locked nor complete. takeRemainsDown also cleans up after a pod that died without a DEL, whose port was
// deleted with its namespace. Some runtimes reuse the ID for the next container without a DEL. For any other record,
// the error matches ErrExists.
func (a *addCall) takeRemainsDown(ctx context.Context) error {
	lock, err := a.s.Dir.LockAttachment(a.nw.Name, a.hash)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil // the record is gone already
	case err != nil:
		return errAlreadyExists(a.pod.key(a.nw))
	}
	defer lock.Close()
	unfinished, err := a.s.Dir.Unfinished(a.nw.Name, a.hash)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil || !unfinished && !a.s.hasDied(ctx, a.nw.Name, a.hash):
		return errAlreadyExists(a.pod.key(a.nw))
	case unfinished:
		a.s.warn("an earlier ADD of this attachment was killed: undoing what it left")
	default:
		a.s.warn("the pod of this attachment is gone, without a DEL: undoing what it left")
	}

	known := &Known{Bridge: a.nw.Bridge, GatewayLink: a.nw.GatewayLink(), Leased: a.leasing != nil}
	t := a.node.teardown(a.s, a.nw.Name, known)
	return t.takeDown(ctx, t.ownRemains(ctx, a.pod.key(a.nw).owner(), a.hash))
}

func errAlreadyExists(k Key) error {
	return failf(ErrExists, "container %s has an attachment %s to network %q already: DEL it first", k.ContainerID,
		k.IfName, k.Network)
}
