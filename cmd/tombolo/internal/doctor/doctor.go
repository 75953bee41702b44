// Package doctor finds out why a pod has no network. It follows the path of the pod's packets, from the pod's
// interface to beyond the host. For each failing step it reports the evidence and a remedy. It sends a few packets.
// To trace them, it creates nf_tables tables for some seconds. It changes nothing else.
package doctor

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// Step is a part of the path of a pod's packets.
type Step string

// These are the steps, in the order of the path.
const (
	StepNamespace  Step = "namespace"  // the pod's namespace exists
	StepLink       Step = "link"       // the pod's interface and the port of the bridge
	StepAddress    Step = "address"    // the pod has its addresses
	StepDuplicate  Step = "duplicate"  // no other host has an address of the pod or the gateway
	StepRoute      Step = "route"      // the pod has its routes
	StepGateway    Step = "gateway"    // the gateway answers by ARP or neighbour discovery
	StepForwarding Step = "forwarding" // the host forwards packets, and has a route
	StepFirewall   Step = "firewall"   // Tombolo's rules are complete, and no other rule drops packets
	StepBeyond     Step = "beyond"     // the host's next hop answers the pod
	StepMTU        Step = "mtu"        // the next hop also answers long packets
	StepDNS        Step = "dns"        // a name server answers the pod
	StepLease      Step = "lease"      // the DHCP lease is valid
)

// Finding is a failed step on the path of a pod's packets, or a note.
type Finding struct {
	Step     Step   `json:"step"`
	Evidence string `json:"evidence"`
	Remedy   string `json:"remedy,omitempty"`
	// Note is set if the finding is not certainly a fault. For example, it may be intended, or already be over. The
	// command succeeds if all findings are notes.
	Note bool `json:"note,omitempty"`
}

// Report contains the findings about one attachment: one interface of a pod.
type Report struct {
	Network     string    `json:"network"`
	Pod         string    `json:"pod,omitempty"`
	ContainerID string    `json:"containerID"`
	IfName      string    `json:"ifName"`
	Findings    []Finding `json:"findings"` // empty if nothing was found
	// Tried describes the tests that found no fault, and tests that were left out.
	Tried []string `json:"tried,omitempty"`
}

// Options are options of Examine.
type Options struct {
	// DNS are the name servers to ask. nil omits the step StepDNS.
	DNS []netip.Addr
	// IsDNSNamed is set if the operator named the servers in DNS. Otherwise they are the node's.
	IsDNSNamed bool
	// To are addresses that pods should reach, such as addresses of other nodes' pods. If the port is 0, the doctor
	// sends echo requests, and otherwise it opens a TCP connection.
	To []netip.AddrPort
	// Trusted are the links that tombolod has put into firewalld's zone trusted.
	Trusted []string
	// Kept maps a network's name to prefixes. Packets from the network's pods to these prefixes are not masqueraded.
	Kept map[string][]netip.Prefix
	// Uplinks maps networks on a LAN to their NICs.
	Uplinks map[string]string
}

// Examine tests the network of each pod in the inspection, and returns a report for each attachment. Call it in the
// host's network namespace. It needs CAP_NET_ADMIN, CAP_NET_RAW and CAP_SYS_ADMIN.
func Examine(ctx context.Context, node *network.Node, inspection *network.Inspection, opt Options) ([]Report, error) {
	obstacles, err := node.Upkeep().Obstacles(ctx)
	if err != nil {
		return nil, err
	}

	reports := []Report{}
	for _, r := range inspection.Attachments {
		e := &examination{opt: opt, at: r.Attachment, obstacles: obstacles[r.Network],
			others: inspection.Others}
		isOther := func(n network.NetworkReport) bool { return n.Network != r.Network }
		shared := slices.DeleteFunc(slices.Clone(inspection.Networks), isOther)
		e.recorded(report.Causes(&network.Inspection{Attachments: []network.Report{r}, Networks: shared}))
		for _, d := range r.Inside {
			f := finding(StepOf(d), "unless this was changed on purpose: "+recreate, "%s", d)
			f.Note = isReplaced(d)
			e.findings = append(e.findings, *f)
		}

		for _, text := range inspection.Others {
			if strings.HasPrefix(text, "host port ") &&
				strings.Contains(text, fmt.Sprintf("container %.12s", r.ContainerID)) {
				f := Finding{Step: StepFirewall, Note: true}
				f.Evidence, f.Remedy = split(text, "")
				e.findings = append(e.findings, f)
			}
		}

		e.fail(e.walk(ctx))
		if e.err != nil {
			return nil, fmt.Errorf("%s: %w", report.PodName(r.Pod, r.ContainerID), e.err)
		}
		reports = append(reports, Report{r.Network, r.Pod, r.ContainerID, r.IfName, e.sorted(), e.tried})
	}

	return reports, nil
}

// isReplaced reports whether the pod has a replacement for the thing that Tombolo had set up. Examples are another
// default route, another MAC and a smaller MTU. Such a difference may be intended.
func isReplaced(d tombolo.Difference) bool {
	have, _ := strconv.Atoi(d.Have)
	want, _ := strconv.Atoi(d.Want)
	return d.Have != "" && d.What != "link" && have <= want
}

// examination is the state of one run of the doctor on one attachment: its input, open sockets and findings so far.
type examination struct {
	opt         Options
	at          *network.Attachment
	way                            // links and sockets on the path of the pod's packets; set by walk
	obstacles   []foreign.Obstacle // other firewalls' obstacles for the pod's network
	others      []string           // the inspection's notes about the host
	findings    []Finding
	tried       []string
	dead        bool
	usesGateway bool  // the pod uses the gateway that its record names
	err         error // the first error of a step, such as a failed netlink request: see fail
}

// recreate is the remedy for a difference that only an ADD can repair.
const recreate = "delete the pod and create it again"

func finding(step Step, remedy, format string, args ...any) *Finding {
	return &Finding{Step: step, Evidence: fmt.Sprintf(format, args...), Remedy: remedy}
}

func (e *examination) add(step Step, remedy, format string, args ...any) {
	e.findings = append(e.findings, *finding(step, remedy, format, args...))
}

// addLoss adds the finding f, with the additional evidence that the machine called name does not answer the pod. If the
// evidence already names a chain that drops the packets, addLoss adds the finding unchanged.
func (e *examination) addLoss(f *Finding, name string) {
	if !strings.HasPrefix(f.Evidence, "chain ") {
		f.Evidence = fmt.Sprintf("%s gives the pod %s no answer: %s", name, e.own, f.Evidence)
	}
	e.findings = append(e.findings, *f)
}

// fail records the error of a step, unless err is nil or an earlier error is recorded. The examination ends after the
// step with an error, and Examine then returns the error and no reports.
func (e *examination) fail(err error) { e.err = cmp.Or(e.err, err) }

func (e *examination) try(format string, args ...any) {
	e.tried = append(e.tried, fmt.Sprintf(format, args...))
}

// sorted returns the findings without duplicates, in the order of the steps.
func (e *examination) sorted() []Finding {
	way := []Step{StepNamespace, StepLink, StepAddress, StepDuplicate, StepRoute, StepGateway,
		StepForwarding, StepFirewall, StepBeyond, StepMTU, StepDNS, StepLease}
	list := []Finding{}
	for _, f := range e.findings {
		if !slices.Contains(list, f) {
			list = append(list, f)
		}
	}
	slices.SortStableFunc(list, func(a, b Finding) int { return slices.Index(way, a.Step) - slices.Index(way, b.Step) })
	return list
}

func (e *examination) failed(steps ...Step) bool {
	return slices.ContainsFunc(e.findings, func(f Finding) bool { return !f.Note && slices.Contains(steps, f.Step) })
}

// recorded adds a finding for each cause of differences between the kernel and the pod's record. The later tests would
// show only the effects of such a cause. If the namespace is gone, recorded marks the pod as dead.
func (e *examination) recorded(causes []report.Line) {
	for _, c := range causes {
		step := StepOf(c.First)
		if step == StepNamespace {
			e.dead = true
		}
		// A difference about spanning tree is only a note, since the port may forward by now.
		f := Finding{Step: step, Note: strings.Contains(c.Text, spanningTree)}
		f.Evidence, f.Remedy = split(c.Text, report.Help(c.Remedy))
		e.findings = append(e.findings, f)
	}
}

const spanningTree = "spanning tree"

// split splits a text into the evidence and the command that follows "this helps: ". If the text has no such command,
// split returns its second argument as the remedy.
func split(text, otherwise string) (evidence, remedy string) {
	if before, command, ok := strings.Cut(text, "this helps: "); ok {
		return strings.TrimRight(before, "; ,"), command
	}
	return text, otherwise
}

// StepOf returns the step of the path that a difference concerns.
func StepOf(d tombolo.Difference) Step {
	text := "[" + d.What + "] " + d.String()
	for _, row := range []struct {
		step    Step
		pattern string
	}{
		{StepNamespace, "it is dead|namespace is gone|ADD has not come"},
		{StepLink, spanningTree},
		{StepLease, "lease|keeper"},
		{StepAddress, `^\[address\]`},
		{StepRoute, `^\[route\]`},
		{StepMTU, `^\[MTU\]`},
		{StepForwarding, "the host's route|the host does not send|what the host sends|which no network has on record"},
		{StepFirewall, "FORWARD| of table |nf_tables|chain |what pods send|br_netfilter|nf_call"},
		{StepGateway, "the gateway"},
		{StepForwarding, "forward"},
	} {
		if regexp.MustCompile(row.pattern).MatchString(text) {
			return row.step
		}
	}

	return StepLink
}
