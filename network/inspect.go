package network

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

// NetworkReport lists the differences between a network's record and its bridge, gateways, rules and host settings.
type NetworkReport struct {
	Network     string               `json:"network"`
	Differences []tombolo.Difference `json:"differences"`
}

// Inspection is the result of Inspect.
type Inspection struct {
	Attachments []Report        `json:"attachments"`
	Networks    []NetworkReport `json:"networks,omitempty"` // only networks with differences
	// Uplinks lists the faults of NICs that `tombolo uplink take` made ports of a bridge.
	Uplinks []tombolo.Difference `json:"uplinks,omitempty"`
	// Stray lists our objects in the kernel that belong to no record. It also lists elements of firewall sets with
	// addresses that their attachment does not have.
	Stray []tombolo.Difference `json:"stray,omitempty"`
	// Others describes objects and settings that are no differences, but that may explain a problem. Examples are
	// objects of other programs in our tables, settings of the host, and foreign chains that may drop pods' packets.
	Others []string `json:"others,omitempty"`
	// Damaged lists the records that cannot be read.
	Damaged []tombolo.Difference `json:"damaged,omitempty"`
}

// Differs reports whether there are any differences. It ignores changes inside pods.
func (report *Inspection) Differs() bool {
	return report != nil && (len(report.Networks)+len(report.Uplinks)+len(report.Stray)+len(report.Damaged) > 0 ||
		slices.ContainsFunc(report.Attachments, func(r Report) bool { return len(r.Differences) > 0 }))
}

// note adds a note to Others.
func (report *Inspection) note(format string, args ...any) {
	report.Others = append(report.Others, fmt.Sprintf(format, args...))
}

// Inspect compares all networks and attachments on record with the kernel, inside the pods' namespaces too. It changes
// nothing and waits for no lock. So objects that are created or deleted at the same time may show as differences. For
// an attachment whose Add or move (Change.Moved) is in progress, it reports no differences.
func (n *Node) Inspect(ctx context.Context) (*Inspection, error) {
	s, err := n.openKnown()
	if err != nil {
		return nil, err
	}
	defer s.close()
	if err := s.inOwnNamespace(); err != nil {
		return nil, err
	}
	report := &Inspection{Attachments: []Report{}}
	networks, err := n.cfg.Dir.Networks()
	host, hostErr := s.surroundings(ctx)
	if err := cmp.Or(stateError(err), hostErr); err != nil {
		return nil, err
	}

	for _, name := range networks {
		if err := report.compareNetwork(ctx, s, name, host); err != nil {
			return nil, err
		}
	}

	if _, report.Uplinks, err = s.takeReports(ctx); err != nil {
		return nil, err
	}

	if len(report.Attachments) > 0 {
		publishes := slices.ContainsFunc(report.Attachments, func(r Report) bool {
			return len(r.Attachment.Ports) > 0 && !r.Attachment.rec.Unadmitted
		})
		remarks, err := s.foreignFirewall("").Remarks(ctx, publishes)
		cut, cutErr := s.cutBridges(ctx, "")
		if err := cmp.Or(err, cutErr); err != nil {
			return nil, err
		}
		report.Others = slices.Concat(report.Others, remarks, cut)
	}

	all, err := s.inventory(ctx, "", nil)
	if err != nil {
		return nil, err
	}

	slices.Sort(report.Others)
	report.Stray, report.Others = strayDifferences(all.strays()), append(all.others, slices.Compact(report.Others)...)
	return report, nil
}

// recreateDifference returns a difference for which the remedy is a new attachment, since no repair is possible.
func recreateDifference(text string) []tombolo.Difference {
	return []tombolo.Difference{{Text: text, Remedy: tombolo.RemedyRecreate}}
}

// compareNetwork compares one network and its attachments with the kernel, and adds the results to the report.
func (report *Inspection) compareNetwork(ctx context.Context, s *session, name string, host *surroundings) error {
	attachments, damaged, err := s.Dir.List(name)
	if err != nil {
		return stateError(err)
	}

	for _, d := range damaged {
		report.Damaged = append(report.Damaged, recreateDifference(d.Error())...)
	}

	rec, err := s.Dir.LoadNetwork(name)
	if nl.PassAbsent(err) != nil {
		report.Damaged = append(report.Damaged, recreateDifference(err.Error())...)
	}

	if rec != nil {
		found, err := checkNetwork(ctx, s, rec, attachments)
		if err != nil {
			return err
		}

		n := &site{s: s, rec: rec, attachments: attachments, found: *found}
		if err := report.addSurroundings(ctx, host, n); err != nil {
			return err
		}
		if len(n.found.list) > 0 {
			report.Networks = append(report.Networks, NetworkReport{name, n.found.list})
		}
	}

	for _, a := range attachments {
		var diffs, inside []tombolo.Difference
		switch {
		case a.State != state.Ready:
			err := s.withLockedRecord(a.Network, a.Hash(), func(*state.Attachment) error { return nil })
			if !errors.Is(err, state.ErrBusy) { // ErrBusy means that a call is working on it
				diffs = recreateDifference("its ADD did not finish")
			}
		case rec == nil:
			diffs = recreateDifference("its network has no record")
		case a.NetNSCookie == 0: // Docker is still moving the interface: see Change.Moved
		default:
			p, err := s.find(ctx, rec, a)
			if err != nil {
				return err
			}

			err = p.look(ctx)
			if err == nil {
				p.port.Neighbours = neighbours(a, net.HardwareAddr(rec.HostMAC))
				inside, err = p.inside(ctx)
			}

			p.pod.Close()
			if err != nil {
				return err
			}

			diffs = p.found.list
		}

		report.Attachments = append(report.Attachments, Report{attachmentOf(a), diffs, inside})
	}

	return nil
}

// strayDifferences describes kernel objects of attachments without a record. It also describes elements of firewall
// sets with addresses that their attachment does not have. An attachment with a port may be a running pod. Only its Del
// removes it, or a garbage collection whose list of valid attachments lacks it.
func strayDifferences(list []*remains) []tombolo.Difference {
	found := &findings{}
	for _, r := range list {
		if r.hasOldElements() {
			found.advise(tombolo.RemedyRepair, "elements of endpoint %s of network %s are of addresses that it "+
				"does not have", r.hash, r.elementNetwork)
			continue
		}

		if r.portName != "" {
			found.advise(tombolo.RemedyRecreate, "port %s of network %s has no record", r.portName, r.network)
			continue
		}

		if r.elementNetwork != "" {
			found.advise(tombolo.RemedyRepair, "elements of endpoint %s of network %s have no record", r.hash,
				r.elementNetwork)
		}

		if r.ifb != "" {
			found.advise(tombolo.RemedyRepair, "link %s has no record", r.ifb)
		}
	}

	return found.list
}

// Check compares an attachment with the result of its Add: its port, its limits, its reservations, its network, and its
// elements in the firewall. Inside the pod it compares only the parts that the CNI specification names. These are the
// interface and its MAC, and the addresses and routes of pod.Reported. Without pod.Reported, Check uses the record. A
// default route may lead anywhere, since other plugins move it.
//
// If there is no record of the attachment, or its Add is not complete, the error matches ErrNotAttached. Check changes
// nothing in the kernel, with one exception. If the host's owner has changed which packets the host forwards, Check
// makes the network's rules again, so that they drop none of these packets.
func (n *Node) Check(ctx context.Context, nw *Network, pod *Pod) ([]tombolo.Difference, error) {
	if err := cmp.Or(nw.check(), pod.check(nw, n.cfg.NetNS)); err != nil {
		return nil, err
	}

	found := &findings{}
	err := n.withEntered(ctx, func(s *session) error {
		err := reopen(ctx, s, nw.Name)
		if err != nil {
			return err
		}

		k := &checkCall{s: s, nw: nw, pod: pod}
		if k.rec, err = n.loadAttachment(pod.key(nw)); err != nil {
			return err
		}

		if err := k.attachment(ctx, found); err != nil {
			return err
		}
		return k.reservations(ctx, found)
	})
	return found.list, err
}

// checkCall is the state of one Check in progress.
type checkCall struct {
	s   *session
	nw  *Network
	pod *Pod
	rec *state.Attachment
}

// attachment compares the network and the attachment with their records, and adds the differences to found.
func (k *checkCall) attachment(ctx context.Context, found *findings) error {
	rec, err := k.s.Dir.LoadNetwork(k.nw.Name)
	if err != nil {
		found.add("the record of network %q: %v", k.nw.Name, err)
		return nil
	}

	shared, err := checkNetwork(ctx, k.s, rec, []*state.Attachment{k.rec})
	if err != nil {
		return err
	}

	found.addAll(shared.list, "")
	p, err := k.s.find(ctx, rec, k.rec)
	if err != nil {
		return err
	}

	p.pod.Close()
	p.pod, p.lost, p.keeperOptional = k.pod.NetNS, nil, k.pod.Lease != nil && k.pod.Lease.KeeperOptional
	k.expect(&p.port, found)
	if err := p.look(ctx); err != nil {
		return err
	}

	found.addAll(p.found.list, "")
	p.port.MTU, p.port.Down = 0, len(p.port.Addresses) == 0 // without addresses, the interface may be down
	p.anyDefault = true
	inside, err := p.inside(ctx)
	found.addAll(inside, "")
	return err
}

// expect sets the expected properties of the pod's port and interface. It takes them from the configuration and from
// Pod.Reported.
func (k *checkCall) expect(port *bridge.Port, found *findings) {
	port.Bridge = k.nw.Bridge
	if !k.nw.VLAN.IsZero() {
		port.VLAN = k.nw.VLAN
	}

	port.Hairpin, port.Isolated = k.nw.Hairpin && !sharesNIC(k.rec), k.nw.Isolated
	report := k.pod.Reported
	if report == nil {
		return
	}

	// Do not check the static FDB entry if another plugin has changed the pod's MAC, since the entry still has the
	// MAC from Add.
	port.StaticFDB = port.StaticFDB && bytes.Equal(report.MAC, port.PeerMAC)
	port.PeerMAC = report.MAC
	if text := report.HostMACs[k.rec.HostIf]; text != "" {
		if mac, err := net.ParseMAC(text); err == nil && len(mac) == 6 {
			port.MAC = mac
		} else {
			found.add("prevResult gives the interface %s the MAC %.40q, which is invalid", k.rec.HostIf, text)
		}
	}

	port.Addresses = k.expectedAddresses(report)
	port.Routes = append(subnetRoutes(port.Addresses), routesFor(nil, report.Routes)...)
}

// expectedAddresses returns the reported addresses that the pod's interface should have. Addresses whose interface is
// not reported count only if they are on record. With a lease or SLAAC, addresses come and go, and the report may be
// outdated. Then expectedAddresses leaves out the addresses that are no longer on record, and those that the pod formed
// itself.
func (k *checkCall) expectedAddresses(report *Reported) []netip.Prefix {
	onRecord := func(p netip.Prefix) bool { return slices.Contains(prefixesOf(k.rec.Addresses), p) }
	unplaced := slices.DeleteFunc(slices.Clone(report.Unplaced), func(p netip.Prefix) bool { return !onRecord(p) })
	reported := slices.Concat(report.Addresses, unplaced)
	if k.rec.IPAMType != endpoint.Leased && !k.rec.SLAAC {
		return reported
	}
	return slices.DeleteFunc(reported, func(p netip.Prefix) bool { return autoconfigured(k.rec, p) || !onRecord(p) })
}

// reservations adds a finding if the allocator no longer reserves the pod's addresses. For a slow allocator, it returns
// the error instead. It asks about the addresses that are on record and, if there is a report, in the report. Addresses
// from other plugins need no reservation. It also adds a finding if the network leases addresses now, but did not when
// the pod was added.
func (k *checkCall) reservations(ctx context.Context, found *findings) error {
	isLeased := k.rec.IPAMType == endpoint.Leased
	if k.pod.Lease != nil && !isLeased {
		found.add("the network leases addresses, and the attachment's are not leased: DEL it and ADD it again")
	}

	if isLeased || k.nw.Allocator == nil {
		return nil
	}

	allocator := k.s.bindAllocator(k.nw.Allocator, k.nw.Name, k.pod.key(k.nw).owner(), k.rec.Short)
	own := slices.DeleteFunc(slices.Clone(k.rec.Addresses), func(a ipam.Address) bool {
		return k.pod.Reported != nil && !k.pod.Reported.names(a.Prefix.Addr())
	})
	err := allocator.Check(ctx, k.pod.key(k.nw).owner(), own)
	if err != nil && !allocator.Slow() {
		found.add("%v", err)
		return nil
	}

	return err
}

// names reports whether an address is among the reported ones.
func (r *Reported) names(ip netip.Addr) bool {
	is := func(p netip.Prefix) bool { return p.Addr() == ip }
	return slices.ContainsFunc(slices.Concat(r.Addresses, r.Unplaced, r.Others), is)
}

// checkNetwork compares a network's own parts with its record. A network without attachments needs none of its parts.
// Then checkNetwork only reports the faults that lookAtOthers finds, and a missing bridge: a runtime may have deleted
// the network.
func checkNetwork(ctx context.Context, s *session, rec *state.Network, attachments []*state.Attachment) (*findings,
	error) {
	n := &site{s: s, rec: rec, attachments: attachments}
	if len(attachments) == 0 {
		if l, err := s.link(ctx, rec.Bridge); err == nil && l.Index == 0 {
			n.found.advise(tombolo.RemedyConfigure,
				"bridge %s is gone, and the network has no pods; if none will come, this helps: tombolo remove %s",
				rec.Bridge, rec.Name)
		}
		n.lookAtOthers()
		return &n.found, nil
	}

	err := n.look(ctx, parts())
	return &n.found, err
}

// Networks lists the names of the networks on record.
func (n *Node) Networks(ctx context.Context) ([]string, error) {
	names, err := n.cfg.Dir.Networks()
	return names, stateError(err)
}

// Attachments lists a network's attachments on record. It skips unreadable records, which Inspect reports.
func (n *Node) Attachments(ctx context.Context, network string) ([]*Attachment, error) {
	if err := checkName(network); err != nil {
		return nil, err
	}

	records, _, err := n.cfg.Dir.List(network)
	return convertAll(records, attachmentOf), stateError(err)
}

// Pool describes the use of one range set of a network, which is a list of ranges that a pod gets one address from.
type Pool struct {
	Network string
	ipam.Pool
}

// Pools returns the use of the range sets of all networks whose addresses come from an ipam.HostLocal. It knows a
// network from the network's first Add on. After a failure it continues with the other networks. It takes no lock and
// changes nothing.
func (n *Node) Pools(ctx context.Context) ([]Pool, error) {
	records, _, err := n.cfg.Dir.ListNetworks()
	errs := []error{stateError(err)}
	var list []Pool
	for _, rec := range records {
		if len(rec.Pools) == 0 {
			continue
		}

		h, err := ipam.NewHostLocal(&ipam.Config{Network: rec.Name, Dir: cmp.Or(rec.PoolDir, n.cfg.Dir.Path()+"/ipam"),
			Ranges: rec.Pools})
		var pools []ipam.Pool
		if err == nil {
			pools, err = h.Pools(ctx)
		}

		errs = append(errs, err)
		list = append(list, convertAll(pools, func(p ipam.Pool) Pool { return Pool{rec.Name, p} })...)
	}

	return list, errors.Join(errs...)
}

// Ready returns nil if an Add to the network could succeed now, and otherwise an error with the reason. leases
// describes how the network's pods lease their addresses; it is nil if they do not. Ready waits for no lock and changes
// nothing, since runtimes call it every few seconds. There is one exception: if the host has become a router, Ready
// makes the network's rules again, since they drop all forwarded packets except the pods'.
func (n *Node) Ready(ctx context.Context, nw *Network, leases *Lease) error {
	if err := nw.check(); err != nil {
		return err
	}

	s, err := openSession(n.cfg)
	if err != nil {
		return err
	}
	defer s.close()
	w := newRequirement(nw, "", n.cfg.Mark)
	w.Record.Subnets = nw.Subnets
	if err := checkBuildable(ctx, s, w); err != nil {
		return err
	}

	paths, err := s.reversePaths(ctx, &w.Record)
	if err := cmp.Or(refuseContested(n.cfg.Dir), err); err != nil {
		return err
	}

	if len(paths) > 0 {
		return failf(ErrObstructed, "%s", strings.Join(paths, "; "))
	}

	if leases != nil {
		_, err := n.openLeases(leases)
		return err
	}

	if nw.Allocator == nil {
		return nil
	}

	node := s.ipamNode(nw.Name, ipam.Owner{}, "")
	err = nw.Allocator.Bind(ipam.Node{Epoch: node.Epoch, Hash: node.Hash}).Status(ctx)
	if errors.Is(err, ipam.ErrPoolFull) {
		dead, deadErr := n.CollectDead(ctx, nw.Name, true)
		if deadErr == nil && slices.ContainsFunc(dead, func(d Dead) bool { return d.Kept == nil }) {
			return nil // an ADD would remove them; the runtime sends one only if Ready returns nil
		}
	}
	return err
}

// contestedFor is the validity of tombolod's report about another program that undoes its repairs. Until that program
// stops, tombolod renews the report once a minute.
const contestedFor = 3 * time.Minute

// refuseContested returns an error if another program undoes tombolod's repairs of the firewall again and again. The
// error names that program, if it is known.
func refuseContested(dir *state.Dir) error {
	f, err := dir.Contested()
	if err != nil {
		return stateError(err)
	}

	if f == nil || time.Since(f.At) > contestedFor {
		return nil
	}

	program := "another program"
	if f.By != "" {
		program = fmt.Sprintf("the program %q", f.By)
	}

	return failf(ErrObstructed,
		"%s undoes firewall rules that pods need: tombolod has repaired them %d times, and now does so only once a "+
			"minute; the last repair was: %.200q: have that program leave them alone",
		program, f.Times, f.What)
}
