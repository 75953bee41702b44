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

// Add attaches a pod to a network, and makes the network first if it is not there: an interface with addresses and
// routes, limits, and its part in the firewall. Where it fails it has undone what it did. It first undoes what a
// killed Add of the same attachment left; otherwise an attachment that exists is ErrExists. Where the network has
// no address left, it is undone, takes down what CollectDead finds of the network, and tries once more. It needs
// CAP_NET_ADMIN in both namespaces, and CAP_SYS_ADMIN to enter the pod's.
func (n *Node) Add(ctx context.Context, nw *Network, pod *Pod) (*Attachment, error) {
	if err := cmp.Or(nw.check(), pod.check(nw, n.cfg.NetNS)); err != nil {
		return nil, err
	}
	made, err := n.tryAdd(ctx, nw, pod)
	if err != nil && nw.lacking(err) && n.reclaim(ctx, nw) {
		made, err = n.tryAdd(ctx, nw, pod)
	}
	if err == nil && pod.Path != "" && (nw.DHCPv6 && !made.unconfirmed || made.informs) {
		return n.await6(ctx, pod, made)
	}
	return made, err
}

// tryAdd is one try. When it returns, it has given up its locks.
func (n *Node) tryAdd(ctx context.Context, nw *Network, pod *Pod) (*Attachment, error) {
	hash := pod.key(nw).hash()
	a := &adding{entry: entry{node: n, hash: hash, getsMore: pod.Lease != nil || nw.SLAAC}, nw: nw, pod: pod, base: pod.record(nw, hash)}
	origin := n.origin(nw)
	a.base.IPAMType, a.base.DataDir = origin.Type, origin.Dir
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
	defer a.s.Close()
	if a.leasing != nil {
		// Before Close, which may wait for the lock of the host's lease.
		defer a.leasing.unlock()
	}
	if err := n.step("open"); err != nil {
		return nil, err
	}
	made, err := a.run(ctx)
	if err == nil {
		return made, nil
	}
	if a.pending != nil {
		if gone, _ := a.pending.Gone(); gone {
			// It may have failed at anything that was taken down along with its record.
			a.s.Warn("the attachment's record is gone: " + err.Error())
			err = errDeleted()
			// The attachment may have been added again meanwhile. Port, elements and reservations go by its name,
			// so they may be the other ADD's. The DEL took down what this one had made, or the other ADD does.
			if _, loadErr := a.s.Dir.Load(nw.Name, hash); !errors.Is(loadErr, fs.ErrNotExist) {
				_ = a.pending.Close() // of a file that is gone
				return nil, err
			}
		}
	}
	return nil, a.back.run(err)
}

// adding is one Add under way.
type adding struct {
	entry
	nw   *Network
	pod  *Pod
	base *state.Attachment // as it was put on record

	leasing *leasing        // nil unless the address comes by DHCP
	metrics metrics         // of its default routes
	shaped  bandwidth.Shape // its limits as the kernel enforces them

	// Results of its steps so far.
	given given
	plan  *plan
	built *site              // the network
	link  *bridge.Attachment // nil before the pod has it
}

// run does the steps of an Add, in order. A pod has its addresses before its link, unless it leases them by that.
func (a *adding) run(ctx context.Context) (*Attachment, error) {
	if len(a.pod.Ports) > 0 {
		// After all else is undone, the record included.
		a.back.push(func(ctx context.Context) error {
			return closeUnusedLoopback(ctx, a.s, false, a.nw.Bridge, a.nw.GatewayLink())
		})
	}
	steps := []func(context.Context) error{
		a.begin, a.done("record"), a.allocate, a.done("ipam"), a.derive, a.refuseListeners, a.ready, a.done("network"),
		a.attach, a.autoconfigure, a.done("link"),
	}
	if a.leasing != nil {
		steps = []func(context.Context) error{
			a.begin, a.done("record"), a.derive, a.refuseListeners, a.ready, a.done("network"),
			a.recordLease, a.attach, a.done("link"), a.lease, a.done("ipam"),
		}
	}
	// Only at the end do the pod's ports lead to it.
	steps = append(steps, a.enlist, a.flushStale, a.done("firewall"), a.commit, a.done("commit"), a.publishWithheld)
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	return a.made(), nil
}

// done says that steps are done that have a name.
func (a *adding) done(name string) func(context.Context) error {
	return func(context.Context) error { return a.node.step(name) }
}

// refuseListeners is about the ports that the pod is to have.
func (a *adding) refuseListeners(ctx context.Context) error {
	return refuseListeners(ctx, a.pod.ContainerID, a.pod.Ports, a.given.addresses, a.getsMore)
}

// ready sees to it that the network is there as it was derived.
func (a *adding) ready(ctx context.Context) (err error) {
	if a.built, err = ready(ctx, a.s, a.plan.want); err != nil {
		return err
	}
	a.plan.rec.NIC = a.built.sharedNIC()
	if a.link != nil {
		return nil // the pod has sent frames from its MAC already
	}
	if err := a.built.refuseMAC(ctx, a.pod.MAC); err != nil {
		return err
	}
	return a.refuseTaken(ctx)
}

// enlist enters the pod into the firewall's sets.
func (a *adding) enlist(ctx context.Context) error {
	setLimits(&a.plan.rec, a.shaped)
	return a.add(ctx, &a.plan.rec, a.plan.want)
}

func (a *adding) flushStale(ctx context.Context) error {
	return flushStale(ctx, a.s.Links, &a.plan.rec)
}

// commit waits for the port, and puts the attachment on record as it is.
func (a *adding) commit(ctx context.Context) error {
	if err := a.s.Links.Wait(ctx, a.link.Name); err != nil {
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
	err := a.pending.Commit(&a.plan.rec)
	if errors.Is(err, fs.ErrNotExist) {
		return errDeleted()
	}
	return stateError(err)
}

// publishWithheld publishes ports that another attachment of the container had, if its Del found none to pass them
// on to. It first tells attachments of one container of each other, if some are to LANs and others publish ports.
func (a *adding) publishWithheld(ctx context.Context) error {
	rec := &a.plan.rec
	// Another interface of the pod has a default route.
	if a.tookOver || a.metrics != nil || a.leasing != nil && a.leasing.rec.Policy.Priority != a.leasing.asked.Priority {
		if err := a.s.meet(ctx, rec); err != nil {
			return err
		}
	}
	if !withholds(rec) {
		return nil
	}
	return a.s.Publish(ctx, waitingOf(rec))
}

// made is the result of an Add.
func (a *adding) made() *Attachment {
	at := attachmentOf(&a.plan.rec)
	at.BridgeMAC, at.BridgeMTU = a.built.bridge.MAC, a.built.rec.MTU
	if l := a.built.at; a.built.share == nil && l.Index != a.built.bridge.Index {
		at.HostVLAN, at.HostVLANMAC = l.Name, l.MAC
	}
	at.PortMAC, at.MAC = a.link.MAC, a.link.PeerMAC
	at.Addresses, at.DNS = a.given.addresses, a.given.dns
	at.Routes = a.metrics.apply(withDefaults(a.nw.DefaultGateway, at.Addresses, a.given.routes))
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

// given is what a pod was given: its addresses, IPv4 first, routes as they were asked for, and
// name servers.
type given struct {
	addresses []ipam.Address
	routes    []route.Route
	dns       DNS
	informs   bool // DHCPv6 has DNS that routers do not tell
}

// maxRemains is how often an ADD undoes what it finds in its way. Once is enough, unless
// others are killed at the same attachment meanwhile.
const maxRemains = 3

// begin takes the locks that the ADD needs, in their order, and puts the attachment on record before anything is
// made for it, so that also after a kill all that is left has an owner. The record's lock is held from then on, and
// is never waited for.
func (a *adding) begin(ctx context.Context) error {
	for range maxRemains {
		if a.leasing != nil {
			// An ADD of the same that runs has the lease's lock for as long as its server
			// takes: so look first. A Del or the keeper may have it for a while. It comes before the state's.
			if err := a.takeRemainsDown(ctx); err != nil {
				return err
			}
			var err error
			if a.leasing.held, err = a.leasing.dir.Lock(ctx, a.hash); err != nil {
				return failf(ErrTryAgain, "%w", err)
			}
		}
		if err := a.s.Enter(ctx); err != nil {
			return err
		}
		err := a.writeRecord()
		if !errors.Is(err, fs.ErrExist) {
			return err
		}
		// The remains may have a lease to release, and an IPAM plugin to ask.
		a.s.Leave()
		if a.leasing != nil {
			a.leasing.unlock()
		}
		if err := a.takeRemainsDown(ctx); err != nil {
			return err
		}
	}
	return existsAlready(a.pod.key(a.nw))
}

// writeRecord creates the record and locks it. The error matches fs.ErrExist where there
// is one.
func (a *adding) writeRecord() error {
	a.base.Epoch = a.s.Epoch.Token()
	var err error
	if a.pending, err = a.s.Dir.Create(a.base); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return err
		}
		return stateError(err)
	}
	a.back.push(func(context.Context) error { return a.pending.Abandon() })
	return nil
}

// takeRemainsDown undoes what an ADD of this very attachment left that was killed: its
// record's lock is free, and the record says that it never came to its end. So it does with
// what is left of a pod that died without a DEL, whose port went with its namespace: some
// runtimes give the next container the same ID, and send no DEL before. Any other record is
// in the way.
func (a *adding) takeRemainsDown(ctx context.Context) error {
	lock, err := a.s.Dir.LockAttachment(a.nw.Name, a.hash)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil // it has gone by itself
	case err != nil:
		return existsAlready(a.pod.key(a.nw))
	}
	defer lock.Close()
	unfinished, err := a.s.Dir.Unfinished(a.nw.Name, a.hash)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil || !unfinished && !a.s.Died(ctx, a.nw.Name, a.hash):
		return existsAlready(a.pod.key(a.nw))
	case unfinished:
		a.s.Warn("an earlier ADD of this attachment was killed: undoing what it left")
	default:
		a.s.Warn("the pod of this attachment is gone, without a DEL: undoing what it left")
	}
	known := &Known{Bridge: a.nw.Bridge, GatewayLink: a.nw.GatewayLink(), Leased: a.leasing != nil}
	t := a.node.teardown(a.s, a.nw.Name, known)
	return t.takeDown(ctx, t.ownRemains(ctx, a.pod.key(a.nw).owner(), a.hash))
}

func existsAlready(k Key) error {
	return failf(ErrExists, "container %s has an attachment %s to network %q already: DEL it first", k.ContainerID, k.IfName, k.Network)
}
