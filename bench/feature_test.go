package bench

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// feature is what a pod asks for.
type feature struct {
	name       string
	dual       bool   // an IPv6 address beside the IPv4 one
	masquerade bool   // the reference masquerades; tombolo does by default
	options    object // of our plugin
	published  bool   // a host port
	datagrams  int    // how many more host ports, by UDP
	ports      int    // so many host ports, from firstPort on
	ranged     bool   // in one mapping
	limited    bool   // in both directions
	outside    bool   // a machine outside, and a firewall to pass on the way there
	prove      func(*node, *pod) error

	dhcp, rapid bool
	renewed     bool // every minute
}

func ipv4() feature { return feature{name: "ipv4"} }

// ports are many host ports of one pod. The reference knows no ranges.
func ports(count int) feature {
	return feature{name: "ports", ports: count, outside: true, prove: func(n *node, p *pod) error {
		_, err := nstest.Ask(n.tb, n.host, "tcp", netip.AddrPortFrom(nodeAddresses[0].Addr(), firstPort))
		return err
	}}
}

func port() feature { return feature{name: "port", published: true, outside: true, prove: provePort} }

// everything is all that a pod may ask for: for tombolo one call, for a chain four.
func everything() feature {
	return feature{name: "everything", dual: true, masquerade: true, published: true, limited: true, outside: true, prove: proveEverything}
}

// features are what the benchmarks of single features go through.
func features() []feature {
	return []feature{
		ipv4(),
		{name: "no-masquerade", options: object{"ipMasq": false}},
		{name: "dual", dual: true, masquerade: true},
		{name: "guard", options: object{"guard": true}},
		{name: "policy", options: object{"ingressPolicy": "isolated"}},
		port(),
		{name: "limits", limited: true, prove: proveLimits},
		everything(),
	}
}

// A pod's host port is the first and its number. The limits are in bits a second, and bits.
const (
	firstPort  = 20000
	podPort    = 80
	limitRate  = 100_000_000
	limitBurst = 1_000_000

	limitWritten = "100Mbit" // by tc
)

// asked is what a runtime passes by capabilities for the pod of a number.
func (f *feature) asked(pod int) object {
	c := object{}
	if f.published {
		c["portMappings"] = []object{{"hostPort": firstPort + pod, "containerPort": podPort, "protocol": "tcp"}}
	}
	if f.datagrams > 0 {
		var ports []object
		for i := range f.datagrams {
			ports = append(ports, object{"hostPort": firstPort + pod*f.datagrams + i, "containerPort": podPort, "protocol": "udp"})
		}
		c["portMappings"] = ports
	}
	if f.ports > 0 {
		ports := []object{{"hostPort": firstPort, "containerPort": podPort, "protocol": "tcp", "range": f.ports}}
		for i := range f.ports {
			if f.ranged {
				break
			}
			ports = append(ports[:i], object{"hostPort": firstPort + i, "containerPort": podPort + i, "protocol": "tcp"})
		}
		c["portMappings"] = ports
	}
	if f.limited {
		c["bandwidth"] = map[string]uint64{"ingressRate": limitRate, "ingressBurst": limitBurst, "egressRate": limitRate, "egressBurst": limitBurst}
	}
	return c
}

// served is what a pod answers to at its port.
func (f *feature) served() []string {
	switch {
	case f.datagrams > 0:
		return []string{"udp"}
	case f.published || f.ports > 0:
		return []string{"tcp"}
	}
	return nil
}

// The network between a node and the machine outside.
var (
	nodeAddresses    = [...]netip.Prefix{netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("2001:db8::1/64")}
	outsideAddresses = [...]netip.Prefix{netip.MustParsePrefix("192.0.2.2/24"), netip.MustParsePrefix("2001:db8::2/64")}
)

// addOutside connects the node with a machine that knows nothing of its pods. The node's
// policy is to forward nothing, as Docker leaves it: a pod's packets get out only if a
// rule lets them, and masquerade brings the answers back.
func (n *node) addOutside(tb testing.TB) {
	tb.Helper()
	n.outside = nstest.New(tb)
	nstest.Veth(tb, n.host, "up0", n.outside, "up0")
	for ns, addresses := range map[*netns.NS][2]netip.Prefix{n.host: nodeAddresses, n.outside: outsideAddresses} {
		nstest.Run(tb, ns, "ip", "link", "set", "lo", "up")
		nstest.Run(tb, ns, "ip", "address", "add", addresses[0].String(), "dev", "up0")
		nstest.Run(tb, ns, "ip", "address", "add", addresses[1].String(), "dev", "up0", "nodad")
	}
	nstest.Run(tb, n.host, "iptables", "-P", "FORWARD", "DROP")
	nstest.Run(tb, n.host, "ip6tables", "-P", "FORWARD", "DROP")
}

// proveEverything: the pod gets out, is called at its port, and is limited.
func proveEverything(n *node, p *pod) error {
	for _, a := range outsideAddresses {
		if err := ping(p.ns, a.Addr()); err != nil {
			return fmt.Errorf("through a policy of DROP: %w", err)
		}
	}
	return errors.Join(provePort(n, p), proveLimits(n, p))
}

// provePort calls the pod by the node's own addresses and the host port. From the outside
// it could not: the reference's firewall plugin lets no calls in.
func provePort(n *node, p *pod) error {
	for i := range subnets(n.feature.dual) {
		to := netip.AddrPortFrom(nodeAddresses[i].Addr(), uint16(firstPort+p.number))
		if _, err := nstest.Ask(n.tb, n.host, "tcp", to); err != nil {
			return fmt.Errorf("host port %s: %w", to, err)
		}
	}
	return nil
}

func proveLimits(n *node, p *pod) error {
	now, err := n.shapers()
	if err == nil && now != p.shaped+2 {
		err = fmt.Errorf("%d limits of %s before the ADD and %d after, want one each way", p.shaped, limitWritten, now)
	}
	return err
}

// measureShapers notes how many limits there are before an ADD.
func (n *node) measureShapers(p *pod) error {
	if !n.feature.limited {
		return nil
	}
	var err error
	p.shaped, err = n.shapers()
	return err
}

// shapers counts the queues of the node that limit to the rate that pods ask for.
func (n *node) shapers() (int, error) {
	out, err := nstest.Try(n.host, "tc", "qdisc", "show")
	return strings.Count(out, "rate "+limitWritten+" "), err
}
