// Command demo shows Tombolo at work on a machine that it leaves alone. It adds and deletes pods by the CNI
// protocol, has them ping each other and a host outside, and counts the objects that DEL leaves. Then a container shares
// the node's NIC, and is on the LAN beside the node.
//
// All of it happens in a sandbox: network namespaces and a mount namespace that no path names, so that
// the kernel takes them down with the process, however that ends. It needs CAP_SYS_ADMIN,
// CAP_NET_ADMIN and CAP_NET_RAW, which root of a user namespace has too.
package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/tombolo-cni/tombolo/internal/icmp"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/network"
)

// maxPods keeps the demonstration from being felt outside: the kernel counts
// neighbours of all namespaces together (net.ipv4.neigh.default.gc_thresh3, 1024),
// and a pod that pings has four.
const maxPods = 100

// pingTimeout is how long a ping may take on a busy machine.
const pingTimeout = 10 * time.Second

// Run adds so many pods by the CNI plugin that is named by its path, and writes to
// out how they get on. It stops with the first thing that is not as it should be,
// which is its error, and when ctx ends.
func Run(ctx context.Context, out io.Writer, plugin string, pods int) error {
	if pods < 1 || pods > maxPods {
		return fmt.Errorf("demo with %d pods: it takes 1 to %d", pods, maxPods)
	}
	s := &show{out: out, count: pods, plugin: plugin}
	return inSandbox(ctx, plugin, func(box *sandbox) error {
		s.sandbox = box
		return s.play(ctx)
	})
}

// show is one demonstration.
type show struct {
	*sandbox
	out    io.Writer
	count  int    // of pods
	plugin string // the path of the CNI plugin
	pods   []*pod
}

// play is the demonstration from its beginning to its end.
func (s *show) play(ctx context.Context) error {
	defer func() {
		for _, p := range s.pods {
			p.ns.Close()
		}
	}()
	fmt.Fprintf(s.out, "A node, a host outside and %s, each in a network namespace of its own.\n", printable.Count(s.count, "pod", "pods"))
	if s.families == 1 {
		fmt.Fprintln(s.out, "IPv6 is switched off in this kernel, and so all is of IPv4 alone.")
	}
	fmt.Fprintf(s.out, "The pods are of network %q: %s behind bridge %s, masqueraded.\n\n", networkName, printable.List(s.subnets(), " and "), podBridge)
	for _, part := range []func(context.Context, io.Writer) error{s.addPods, s.pingAll, s.takeDown, s.shareNIC} {
		w := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', 0)
		err := part(ctx, w)
		w.Flush()
		if err != nil {
			return err
		}
	}
	return nil
}

// addPods adds the pods one by one.
func (s *show) addPods(ctx context.Context, w io.Writer) error {
	fmt.Fprintln(w, "POD\tIPV4\tIPV6\tGATEWAY\tADD")
	note := " (the first also builds the network)"
	for i := range s.count {
		p := &pod{name: fmt.Sprintf("pod%d", i+1)}
		took, err := s.add(ctx, p)
		if err != nil {
			return fmt.Errorf("ADD of %s: %w", p.name, err)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%5s ms%s\n", p.name, p.addresses[0], cmp.Or(printable.List(p.addresses[1:], ""), "-"), printable.List(p.gateways, ", "), milliseconds(took, 1), note)
		note = ""
	}
	return nil
}

// pingAll has every pod ping the next one, its gateways, and the host outside.
func (s *show) pingAll(ctx context.Context, w io.Writer) error {
	fmt.Fprintln(w, "\nPING ("+strings.Join([]string{"IPv4", "IPv6"}[:s.families], ", ")+")\tNEXT POD\tGATEWAY\tOUTSIDE\tWHICH SEES IT AS")
	for i, p := range s.pods {
		cells := []string{p.name, "-"}
		if s.count > 1 {
			next := s.pods[(i+1)%s.count]
			times, err := p.ping(ctx, next.name, next.addresses)
			if err != nil {
				return err
			}
			cells[1] = times
		}
		gateway, err := p.ping(ctx, "its gateway", p.gateways)
		if err != nil {
			return err
		}
		seen, err := s.seenOutside(p)
		if err != nil {
			return fmt.Errorf("%s to the outside: %w", p.name, err)
		}
		outside, err := p.ping(ctx, "the outside", s.addresses(theOutside))
		if err != nil {
			return err
		}
		fmt.Fprintln(w, strings.Join(append(cells, gateway, outside, printable.List(seen, ", ")), "\t"))
	}
	return nil
}

// ping pings an address of each family, and gives the round trips as a cell of the table.
func (p *pod) ping(ctx context.Context, who string, to []netip.Addr) (string, error) {
	var cell []string
	for _, address := range to {
		started := time.Now()
		if err := icmp.Ping(ctx, p.ns, address, icmp.Echo{Wait: pingTimeout}); err != nil {
			return "", fmt.Errorf("%s to %s: %w", p.name, who, err)
		}
		cell = append(cell, milliseconds(time.Since(started), 2))
	}
	return strings.Join(cell, ", ") + " ms", nil
}

// seenOutside gives the addresses by which the host outside sees a pod, which must be the node's: it has
// no route to any other.
func (s *show) seenOutside(p *pod) ([]netip.Addr, error) {
	var list []netip.Addr
	for i, node := range s.addresses(theNode) {
		seen, err := s.sourceOutside(p.ns, s.addresses(theOutside)[i])
		switch {
		case err != nil:
			return nil, err
		case seen == p.addresses[i]:
			return nil, fmt.Errorf("not masqueraded: the host outside sees the pod's own address %s", seen)
		case seen != node:
			return nil, fmt.Errorf("the host outside sees it as %s, and not as the node's %s", seen, node)
		}
		list = append(list, seen)
	}
	return list, nil
}

// takeDown deletes the pods, then the network, and counts what is there before, between and after.
func (s *show) takeDown(ctx context.Context, w io.Writer) error {
	fmt.Fprintln(w, "\nWHAT THERE IS\tVETH ENDS\tIN NF_TABLES\tRESERVATIONS\tRECORDS\tBRIDGE")
	n := s.count
	if err := s.wantThere(ctx, w, "with "+printable.Count(n, "pod", "pods"), inventory{2 * n, n, s.families * n, n, podBridge}); err != nil {
		return err
	}
	start := time.Now()
	for _, p := range s.pods {
		if err := s.call(p).Run(ctx, "DEL"); err != nil {
			return fmt.Errorf("DEL of %s: %w", p.name, err)
		}
	}
	mean := time.Since(start) / time.Duration(n)
	if err := s.wantThere(ctx, w, "after DEL", inventory{bridge: podBridge}); err != nil {
		return err
	}
	node, err := network.Open(ctx, &network.Config{StateDir: s.stateDir})
	if err == nil {
		err = node.Remove(ctx, networkName)
	}
	if err != nil {
		return fmt.Errorf("remove network %q: %w", networkName, err)
	}
	if err := s.wantThere(ctx, w, "after tombolo remove", inventory{bridge: noBridge}); err != nil {
		return err
	}
	fmt.Fprintf(w, "\nDEL took %s ms a pod, and left nothing.\n", milliseconds(mean, 1))
	return nil
}

func (s *show) wantThere(ctx context.Context, w io.Writer, when string, want inventory) error {
	got, err := s.take(ctx)
	if err != nil {
		return fmt.Errorf("count what there is %s: %w", when, err)
	}
	fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%s\n", when, got.vethEnds, got.endpoints, got.reservations, got.records, got.bridge)
	if got != want {
		return fmt.Errorf("%s there should be %s, and there are %s", when, want, got)
	}
	return nil
}

// milliseconds is a duration as the tables have it.
func milliseconds(d time.Duration, digits int) string {
	return fmt.Sprintf("%.*f", digits, d.Seconds()*1000)
}
