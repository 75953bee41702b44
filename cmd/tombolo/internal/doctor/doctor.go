// Package doctor finds out why a pod has no network: it goes the way that the pod's packets
// go, from its interface to beyond the host, and says of each step that fails what shows it
// and what helps. It sends a few packets, and changes nothing.
package doctor

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// Step is a part of the way.
type Step string

// The steps, in the order of the way.
const (
	StepNamespace  Step = "namespace"  // there is a pod
	StepLink       Step = "link"       // its interface and the port of the bridge
	StepAddress    Step = "address"    // its own addresses
	StepDuplicate  Step = "duplicate"  // another node has one of them, or the gateway's
	StepRoute      Step = "route"      // the pod's routes
	StepGateway    Step = "gateway"    // answers by ARP or neighbour discovery
	StepForwarding Step = "forwarding" // the host forwards, and has a way itself
	StepFirewall   Step = "firewall"   // ours is whole, and no other one drops
	StepBeyond     Step = "beyond"     // the host's next hop answers the pod
	StepMTU        Step = "mtu"        // so it does if packets are long
	StepDNS        Step = "dns"        // a name server answers the pod
	StepLease      Step = "lease"      // DHCP
)

// Finding is a step that fails, or a note.
type Finding struct {
	Step     Step   `json:"step"`
	Evidence string `json:"evidence"`
	Remedy   string `json:"remedy,omitempty"`
	// Note says that it may be as it should be: nothing that was tried has failed.
	Note bool `json:"note,omitempty"`
}

// Report is what is wrong with one attachment.
type Report struct {
	Network     string    `json:"network"`
	Pod         string    `json:"pod,omitempty"`
	ContainerID string    `json:"containerID"`
	IfName      string    `json:"ifName"`
	Findings    []Finding `json:"findings"` // empty: nothing was found
	// Tried lists what was tested, and how it went.
	Tried []string `json:"tried,omitempty"`
}

// Options says what to look at.
type Options struct {
	// DNS are the name servers to ask; nil leaves that step out.
	DNS []netip.Addr
	// To are addresses that pods should reach, such as those of other nodes' pods, and by TCP if they have a port.
	To []netip.AddrPort
	// Trusted are the links that tombolod had join firewalld's zone trusted.
	Trusted []string
	// Kept are, by network, the destinations for which pods keep their address.
	Kept map[string][]netip.Prefix
	// Uplinks are the NICs of networks on a LAN.
	Uplinks map[string]string
}

// Examine looks at the pods of an inspection. It has to be called in the host's namespace, and
// needs CAP_NET_ADMIN, CAP_NET_RAW and CAP_SYS_ADMIN.
func Examine(ctx context.Context, node *network.Node, in *network.Inspection, opt Options) ([]Report, error) {
	obstacles, err := node.Upkeep().Obstacles(ctx)
	if err != nil {
		return nil, err
	}
	reports := []Report{}
	for _, r := range in.Attachments {
		e := &examination{node: node, opt: opt, at: r.Attachment, obstacles: obstacles[r.Network], others: in.Others}
		isOther := func(n network.NetworkReport) bool { return n.Network != r.Network }
		shared := slices.DeleteFunc(slices.Clone(in.Networks), isOther)
		e.recorded(report.Causes(&network.Inspection{Attachments: []network.Report{r}, Networks: shared}))
		for _, d := range r.Inside {
			f := finding(StepOf(d), "unless this was changed on purpose: "+recreate, "%s", d)
			f.Note = isReplaced(d)
			e.found = append(e.found, *f)
		}
		if err := e.walk(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", report.PodName(r.Pod, r.ContainerID), err)
		}
		reports = append(reports, Report{r.Network, r.Pod, r.ContainerID, r.IfName, e.sorted(), e.tried})
	}
	return reports, nil
}

// isReplaced reports whether a pod has something in place of what it was given, by which it may work: another default
// route, MAC or name, or a smaller MTU.
func isReplaced(d tombolo.Difference) bool {
	have, _ := strconv.Atoi(d.Have)
	want, _ := strconv.Atoi(d.Want)
	return d.Have != "" && d.What != "link" && have <= want
}

// examination is one attachment's.
type examination struct {
	node      *network.Node
	opt       Options
	at        *network.Attachment
	way                          // of its packets, once walk has opened it
	obstacles []foreign.Obstacle // of its network
	others    []string           // what the inspection noted about the host
	found     []Finding
	tried     []string
	dead      bool
	led       bool // a gateway is there, or the pod sends by one
}

// recreate is the remedy for a difference that only an ADD can mend.
const recreate = "delete the pod and create it again"

func finding(step Step, remedy, format string, args ...any) *Finding {
	return &Finding{Step: step, Evidence: fmt.Sprintf(format, args...), Remedy: remedy}
}

func (e *examination) add(step Step, remedy, format string, args ...any) {
	e.found = append(e.found, *finding(step, remedy, format, args...))
}

// addLoss adds a finding about a host or connection that gives the pod no answer. A chain that drops is named alone.
func (e *examination) addLoss(f *Finding, name string) {
	if !strings.HasPrefix(f.Evidence, "chain ") {
		f.Evidence = fmt.Sprintf("%s gives the pod %s no answer: %s", name, e.own, f.Evidence)
	}
	e.found = append(e.found, *f)
}

func (e *examination) try(format string, args ...any) {
	e.tried = append(e.tried, fmt.Sprintf(format, args...))
}

// sorted gives each finding once, in the order of the way.
func (e *examination) sorted() []Finding {
	way := []Step{StepNamespace, StepLink, StepAddress, StepDuplicate, StepRoute, StepGateway,
		StepForwarding, StepFirewall, StepBeyond, StepMTU, StepDNS, StepLease}
	list := []Finding{}
	for _, f := range e.found {
		if !slices.Contains(list, f) {
			list = append(list, f)
		}
	}
	slices.SortStableFunc(list, func(a, b Finding) int { return slices.Index(way, a.Step) - slices.Index(way, b.Step) })
	return list
}

func (e *examination) failed(steps ...Step) bool {
	return slices.ContainsFunc(e.found, func(f Finding) bool { return !f.Note && slices.Contains(steps, f.Step) })
}

// recorded takes what differs from the records: which the rest of the way shows only in its
// effects.
func (e *examination) recorded(causes []report.Line) {
	for _, c := range causes {
		step := StepOf(c.First)
		if step == StepNamespace {
			e.dead = true
		}
		f := Finding{Step: step, Note: strings.Contains(c.Text, spanningTree)} // the pod's port may forward already
		f.Evidence, f.Remedy = split(c.Text, report.Help(c.Remedy))
		e.found = append(e.found, f)
	}
}

const spanningTree = "spanning tree"

// split takes the command that helps out of a text.
func split(text, otherwise string) (evidence, remedy string) {
	if before, command, ok := strings.Cut(text, "this helps: "); ok {
		return strings.TrimRight(before, "; ,"), command
	}
	return text, otherwise
}

// StepOf is the part of the way that a difference concerns.
func StepOf(d tombolo.Difference) Step {
	text := d.String()
	has := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(part string) bool { return strings.Contains(text, part) })
	}
	switch {
	case has("it is dead", "namespace is gone", "ADD has not come"):
		return StepNamespace
	case has(spanningTree):
		return StepLink
	case has("lease", "keeper"):
		return StepLease
	case d.What == "address":
		return StepAddress
	case d.What == "route":
		return StepRoute
	case d.What == "MTU":
		return StepMTU
	case has("the host's route", "the host does not send", "what the host sends", "which no network has on record"):
		return StepForwarding
	case has("forward of table", "FORWARD", " of table ", "nf_tables", "chain ", "what pods send", "br_netfilter", "nf_call"):
		return StepFirewall
	case has("the gateway"):
		return StepGateway
	case has("forward"):
		return StepForwarding
	}
	return StepLink
}
