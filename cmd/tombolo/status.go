package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/doctor"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/leases"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/report"
	"github.com/tombolo-cni/tombolo/cmd/tombolo/internal/view"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/network"
)

func (o *options) statusCommand() *cobra.Command {
	return o.withJSON(o.nodeCommand("status", "say in a few lines whether all is well",
		"Say in a few lines whether all is well: node, networks, pods, leases, keeper, forwarding, firewall, and "+
			"differences from the setup. The exit status is 4 if not all is well.", o.status))
}

// condition is one line of the status: a subject, its state, and whether the state is good.
type condition struct {
	Subject string `json:"of"`
	State   string `json:"is"`
	OK      bool   `json:"well"`
}

func (o *options) status(ctx context.Context, node *network.Node, _ []string) error {
	networks, _, err := view.Load(ctx, node, o.state, "")
	if err != nil {
		return err
	}

	inspection, err := node.Inspect(ctx)
	if err != nil {
		return err
	}

	leased, keeper, err := o.leaseConditions()
	if err != nil {
		return err
	}

	firewall, drift := setupConditions(inspection)
	conditions := []condition{
		nodeCondition(), networksCondition(networks), podsCondition(inspection), leased, keeper,
		forwardingCondition(), firewall, drift,
	}
	well := true
	var text strings.Builder
	for _, c := range conditions {
		fmt.Fprintf(&text, "%-10s %s\n", c.Subject, printable.Line(c.State))
		well = well && c.OK
	}

	if well {
		text.WriteString("all is well\n")
	}

	return o.answer(text.String(), conditions, !well, "not all is well")
}

func nodeCondition() condition {
	host, _ := os.Hostname()
	var kernel unix.Utsname
	_ = unix.Uname(&kernel) // fails only for an invalid pointer
	return condition{"node", fmt.Sprintf("%s, Linux %s, tombolo %s", host, unix.ByteSliceToString(kernel.Release[:]),
		thisVersion().Version), true}
}

func networksCondition(list []view.Network) condition {
	var texts []string
	for _, n := range list {
		nameOnBridge := n.Name + " on " + cmp.Or(n.Bridge, "-")
		if n.Uplink != "" {
			nameOnBridge += " with uplink " + n.Uplink
		}
		for _, p := range n.Pools {
			if p.Free == 0 {
				nameOnBridge += " (" + p.Range + " is full)"
			}
		}
		texts = append(texts, nameOnBridge)
	}

	if len(list) == 0 {
		return condition{"networks", "none is on record: no ADD has succeeded since the boot, or --state is another " +
			"directory", true}
	}

	return condition{"networks", strings.Join(texts, ", "), !strings.Contains(strings.Join(texts, ""), " is full)")}
}

func podsCondition(inspection *network.Inspection) condition {
	adding, differ := 0, 0
	for _, r := range inspection.Attachments {
		switch {
		case len(r.Differences) > 0:
			differ++
		case !r.Ready:
			adding++
		}
	}

	text := numberOf(len(inspection.Attachments))
	if adding > 0 {
		text += fmt.Sprintf(", %d of them being added", adding)
	}

	if differ > 0 {
		text += fmt.Sprintf(", %d of them not as they were made", differ)
	}

	return condition{"pods", text, differ == 0}
}

func numberOf(n int) string {
	if n == 0 {
		return "none"
	}
	return strconv.Itoa(n)
}

// leaseConditions returns the conditions of the leases, and of the keeper that renews them.
func (o *options) leaseConditions() (leased, keeper condition, _ error) {
	d, err := lease.Open(o.leases)
	if err != nil {
		return leased, keeper, err
	}

	records, damaged, err := d.List()
	if err != nil {
		return leased, keeper, err
	}

	bad := len(damaged)
	for _, r := range records {
		if e := leases.Of(r, time.Now()); e.Error != "" || e.ErrorIPv6 != "" || r.Lease != nil && e.Left == 0 {
			bad++
		}
	}

	leased = condition{"leases", numberOf(len(records)), bad == 0}
	if bad > 0 {
		leased.State += fmt.Sprintf(", %d in trouble: tombolo leases", bad)
	}

	keeper = condition{"keeper", "tombolod runs", true}
	if err := d.CheckKeeper(); errors.Is(err, lease.ErrNoKeeper) && len(records) == 0 {
		keeper.State = "tombolod does not run, and no lease needs it"
	} else if err != nil {
		keeper.State, keeper.OK = err.Error(), false
	}

	return leased, keeper, nil
}

// forwardingCondition returns the condition of forwarding. For each address family of the kernel, it reports whether
// the host forwards for everyone, only for pods, or not at all.
func forwardingCondition() condition {
	var texts []string
	for _, family := range [][3]string{{"IPv4", "net/ipv4/ip_forward", "net/ipv4/conf/lo/forwarding"},
		{"IPv6", "net/ipv6/conf/all/forwarding", "net/ipv6/conf/lo/force_forwarding"}} {
		all, err := sysctl.Read(family[1])
		pods, _ := sysctl.Read(family[2])
		text := "none"
		switch {
		case err != nil:
			continue
		case all != "0":
			text = "the host is a router"
		case pods != "0" && pods != "":
			text = "the host forwards for its pods only (to make it a router: sysctl -w " +
				strings.ReplaceAll(family[1], "/", ".") + "=1)"
		}

		texts = append(texts, family[0]+": "+text)
	}

	return condition{"forwarding", strings.Join(texts, "; "), true}
}

// setupConditions returns a condition for the differences of the firewall, and one for all other differences.
func setupConditions(inspection *network.Inspection) (firewall, drift condition) {
	var ofFirewall, others []report.Line
	for _, cause := range report.Causes(inspection) {
		if doctor.StepOf(cause.First) == doctor.StepFirewall {
			ofFirewall = append(ofFirewall, cause)
		} else {
			others = append(others, cause)
		}
	}

	firewall, drift = causesCondition("firewall", ofFirewall), causesCondition("drift", others)
	if firewall.OK && len(inspection.Others) > 0 {
		firewall.State = "as it was set up; settings of other programs may matter (tombolo check): " +
			strings.Join(inspection.Others, "; ")
	}

	return firewall, drift
}

// causesCondition returns a line of the status, with the first cause and the number of further causes. The first
// argument is the line's subject. Without causes the line reports a good state.
func causesCondition(subject string, causes []report.Line) condition {
	if len(causes) == 0 {
		return condition{subject, "as it was set up", true}
	}
	text := causes[0].String()
	if n := len(causes) - 1; n > 0 {
		text += fmt.Sprintf(", and %d more: tombolo check", n)
	}
	return condition{subject, text, false}
}
