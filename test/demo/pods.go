package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

const (
	networkName  = "demo"
	podBridge    = "cbr0"
	podInterface = "eth0"
)

// pod is a namespace, and what its ADD said.
type pod struct {
	name      string
	ns        *netns.NS
	addresses []netip.Addr // one of each family
	gateways  []netip.Addr
}

// subnets are those that the pods have their addresses from. The gateway of each is its first address.
func (s *show) subnets() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("10.22.0.0/16"), netip.MustParsePrefix("fd22::/64")}[:s.families]
}

// netconf is the network's configuration, as a runtime hands it to the plugin.
func (s *show) netconf() []byte {
	var ranges []string
	for _, subnet := range s.subnets() {
		ranges = append(ranges, fmt.Sprintf(`[{"subnet": %q}]`, subnet))
	}
	return fmt.Appendf(nil, `{
  "cniVersion": "1.1.0", "name": %q, "type": "tombolo", "bridge": %q, "stateDir": %q,
  "ipam": {"type": "host-local", "ranges": [%s]}
}`, networkName, podBridge, s.stateDir, strings.Join(ranges, ", "))
}

// call is the plugin with the parameters of a pod.
func (s *show) call(p *pod) *delegate.Plugin {
	return &delegate.Plugin{
		Name:        filepath.Base(s.plugin),
		Path:        filepath.Dir(s.plugin),
		ContainerID: "demo-" + p.name,
		// A runtime would have mounted the namespace somewhere.
		NetNS:  fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.ns.FD()),
		IfName: podInterface,
		Stdin:  s.netconf(),
	}
}

// add makes a pod and calls the plugin. The time is that of the call alone: from
// before the plugin is started until its result is read.
func (s *show) add(ctx context.Context, p *pod) (time.Duration, error) {
	var err error
	if p.ns, err = netns.New(); err != nil {
		return 0, err
	}
	s.pods = append(s.pods, p)
	call := s.call(p)
	start := time.Now()
	result, err := call.Add(ctx)
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	return took, p.read(result, s.families)
}

// read takes a result's addresses, of which there must be one of each family, IPv4 first.
func (p *pod) read(result *current.Result, families int) error {
	if len(result.IPs) != families {
		return fmt.Errorf("the result has %d addresses: want one of each family", len(result.IPs))
	}
	for i := range families {
		address, _ := netip.AddrFromSlice(result.IPs[i].Address.IP)
		gateway, _ := netip.AddrFromSlice(result.IPs[i].Gateway)
		p.addresses, p.gateways = append(p.addresses, address.Unmap()), append(p.gateways, gateway.Unmap())
	}
	return nil
}

const noBridge = "-"

// inventory counts what ADD makes and DEL has to take away, and names the bridge,
// which stays until the network is removed.
type inventory struct {
	vethEnds     int // the node's and the pods'
	endpoints    int // owners of nf_tables elements
	reservations int
	records      int
	bridge       string
}

// String words it for an error.
func (i inventory) String() string {
	return fmt.Sprintf("%d veth ends, %d owners of nf_tables elements, %d reservations, %d records and bridge %s",
		i.vethEnds, i.endpoints, i.reservations, i.records, i.bridge)
}

// take takes the inventory.
func (s *show) take(ctx context.Context) (inventory, error) {
	i := inventory{bridge: noBridge}
	node, err := network.Open(ctx, &network.Config{StateDir: s.stateDir})
	if err != nil {
		return i, err
	}
	pods, err := node.Attachments(ctx, networkName)
	i.records = len(pods)
	pools, poolErr := node.Pools(ctx)
	for _, p := range pools {
		i.reservations += int(p.Reserved)
	}
	return i, errors.Join(err, poolErr, s.countLinks(&i), i.countEndpoints(ctx))
}

// countLinks counts all that is not the sandbox's.
func (s *show) countLinks(i *inventory) error {
	count := func() error {
		links, err := net.Interfaces()
		for _, l := range links {
			switch l.Name {
			case podBridge:
				i.bridge = l.Name
			case "lo", outsideBridge, outsidePort, nic:
			default:
				i.vethEnds++
			}
		}
		return err
	}
	err := count()
	for _, p := range s.pods {
		err = errors.Join(err, p.ns.Do(count))
	}
	return err
}

func (i *inventory) countEndpoints(ctx context.Context) error {
	conn, err := nft.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	endpoints, err := conn.Endpoints(ctx, "")
	i.endpoints = len(endpoints)
	return err
}
