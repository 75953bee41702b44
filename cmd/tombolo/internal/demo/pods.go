package demo

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/netns"
)

const (
	network      = "demo"
	podBridge    = "cbr0"
	podInterface = "eth0"
)

// subnets are those that the pods have their addresses from. The gateway of each is
// its first address.
func subnets() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("10.22.0.0/16"), netip.MustParsePrefix("fd22::/64")}
}

// netconf is the network's configuration, as a runtime hands it to the plugin.
func (b *sandbox) netconf() []byte {
	var ranges []string
	for _, subnet := range subnets()[:b.families] {
		ranges = append(ranges, fmt.Sprintf(`[{"subnet": %q}]`, subnet))
	}
	return fmt.Appendf(nil, `{
  "cniVersion": "1.1.0", "name": %q, "type": "tombolo", "bridge": %q, "stateDir": %q,
  "ipam": {"type": "host-local", "ranges": [%s]}
}`, network, podBridge, b.stateDir, strings.Join(ranges, ", "))
}

// pod is a namespace, and what its ADD said.
type pod struct {
	name      string
	ns        *netns.NS
	addresses []netip.Addr // one of each family
	gateways  []netip.Addr
}

// call is the plugin with the parameters of a pod.
func (s *show) call(box *sandbox, p *pod) *delegate.Plugin {
	return &delegate.Plugin{
		Name:        filepath.Base(s.plugin),
		Path:        filepath.Dir(s.plugin),
		ContainerID: "demo-" + p.name,
		// A runtime would have mounted the namespace somewhere.
		NetNS:  fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.ns.FD()),
		IfName: podInterface,
		Stdin:  box.netconf(),
	}
}

// addPods adds the pods one by one.
func (s *show) addPods(ctx context.Context, box *sandbox) error {
	w := s.table()
	defer w.Flush()
	fmt.Fprintln(w, "POD\tIPV4\tIPV6\tGATEWAY\tADD")
	for i := range s.pods {
		p := &pod{name: fmt.Sprintf("pod%d", i+1)}
		took, err := s.add(ctx, box, p)
		if err != nil {
			return fmt.Errorf("ADD of %s: %w", p.name, err)
		}
		note := ""
		if i == 0 {
			note = " (the first also builds the network)"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%5s ms%s\n", p.name, cell(p.addresses[:v6]), cell(p.addresses[v6:]),
			cell(p.gateways), milliseconds(took, 1), note)
	}
	return nil
}

// cell gives addresses as the table has them.
func cell(list []netip.Addr) string {
	if len(list) == 0 {
		return "-"
	}
	var texts []string
	for _, a := range list {
		texts = append(texts, a.String())
	}
	return strings.Join(texts, ", ")
}

// add makes a pod and calls the plugin. The time is that of the call alone: from
// before the plugin is started until its result is read.
func (s *show) add(ctx context.Context, box *sandbox, p *pod) (time.Duration, error) {
	var err error
	if p.ns, err = netns.New(); err != nil {
		return 0, err
	}
	box.pods = append(box.pods, p)
	call := s.call(box, p)
	start := time.Now()
	result, err := call.Add(ctx)
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	return took, p.read(result, subnets()[:box.families])
}

// read takes a result's addresses, of which there must be one from each subnet,
// IPv4 first.
func (p *pod) read(result *current.Result, subnets []netip.Prefix) error {
	if len(result.IPs) != len(subnets) {
		return fmt.Errorf("the result has %d addresses, where one of each family is due", len(result.IPs))
	}
	for i, subnet := range subnets {
		ip := result.IPs[i]
		address, _ := netip.AddrFromSlice(ip.Address.IP)
		gateway, _ := netip.AddrFromSlice(ip.Gateway)
		address, gateway = address.Unmap(), gateway.Unmap()
		if !subnet.Contains(address) || gateway != subnet.Addr().Next() {
			return fmt.Errorf("the result has address %s by gateway %s, where one of %s by %s is due",
				address, gateway, subnet, subnet.Addr().Next())
		}
		p.addresses, p.gateways = append(p.addresses, address), append(p.gateways, gateway)
	}
	return nil
}

// delPods deletes the pods, and gives the mean time of a call.
func (s *show) delPods(ctx context.Context, box *sandbox) (time.Duration, error) {
	start := time.Now()
	for _, p := range box.pods {
		if err := s.call(box, p).Del(ctx); err != nil {
			return 0, fmt.Errorf("DEL of %s: %w", p.name, err)
		}
	}
	return time.Since(start) / time.Duration(len(box.pods)), nil
}
