package demo

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// maxPods keeps the demonstration from being felt outside: the kernel counts
// neighbours of all namespaces together (net.ipv4.neigh.default.gc_thresh3, 1024),
// and a pod that pings has four.
const maxPods = 100

// patience is how long a ping may take on a busy machine: whatever is broken answers
// later still, or never.
const patience = 30 * time.Second

// Run adds so many pods by the CNI plugin that is named by its path, and writes to
// out how they get on. It stops with the first thing that is not as it should be,
// which is its error, and when ctx ends.
func Run(ctx context.Context, out io.Writer, plugin string, pods int) error {
	s := &show{out: out, pods: pods, plugin: plugin, patience: patience}
	return s.run(ctx)
}

// show is one demonstration.
type show struct {
	out      io.Writer
	pods     int
	plugin   string        // the path of the CNI plugin
	patience time.Duration // for each ping
}

func (s *show) run(ctx context.Context) error {
	if s.pods < 1 || s.pods > maxPods {
		return fmt.Errorf("demo with %d pods: it takes 1 to %d", s.pods, maxPods)
	}
	return inSandbox(ctx, s.plugin, func(box *sandbox) error { return s.play(ctx, box) })
}

// play is the demonstration from its beginning to its end.
func (s *show) play(ctx context.Context, box *sandbox) error {
	fmt.Fprintf(s.out, "A node, a host outside and %s, each in a network namespace of its own.\n", plural(s.pods, "pod"))
	if box.families < families {
		fmt.Fprintln(s.out, "IPv6 is switched off in this kernel, and so all is of IPv4 alone.")
	}
	var ranges []string
	for _, subnet := range subnets()[:box.families] {
		ranges = append(ranges, subnet.String())
	}
	fmt.Fprintf(s.out, "The pods are of network %q: %s behind bridge %s, masqueraded.\n\n", network, strings.Join(ranges, " and "), podBridge)
	if err := s.addPods(ctx, box); err != nil {
		return err
	}
	if err := s.pingAll(ctx, box); err != nil {
		return err
	}
	return s.takeDown(ctx, box)
}

// table lines columns up as they are written, with tabs between them. Close it by
// Flush.
func (s *show) table() *tabwriter.Writer { return tabwriter.NewWriter(s.out, 0, 0, 2, ' ', 0) }

func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// milliseconds is a duration as the tables have it.
func milliseconds(d time.Duration, digits int) string {
	return fmt.Sprintf("%.*f", digits, d.Seconds()*1000)
}
