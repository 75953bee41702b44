package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
)

// The contenders, in the order of the report.
const (
	floor         = "floor"          // the static C program
	tombolo       = "tombolo"        // the plugin under test
	tomboloUDP    = "tombolo-udp"    // the same, asking for leases by UDP
	reference     = "reference"      // containernetworking's bridge and host-local
	chainIPTables = "chain-iptables" // these with portmap, firewall and bandwidth, by iptables
	chainNFTables = "chain-nftables" // the same by nft, as far as they can
)

func contenders() []string {
	return []string{floor, tombolo, tomboloUDP, reference, chainIPTables, chainNFTables}
}

// ours says whether a contender is the plugin under test.
func ours(contender string) bool { return contender == tombolo || contender == tomboloUDP }

// The network is the same for every contender: each has a node of its own.
const (
	networkName = "bench"
	podIfname   = "eth0"
	podMTU      = 1500
)

func subnets(dual bool) []netip.Prefix {
	all := []netip.Prefix{netip.MustParsePrefix("10.88.0.0/16"), netip.MustParsePrefix("fd00:88::/64")}
	if dual {
		return all
	}
	return all[:1]
}

// gatewayOf is the first address of a subnet, which host-local takes by default.
func gatewayOf(subnet netip.Prefix) netip.Addr { return subnet.Addr().Next() }

// podAddress is the address that floor, which has no IPAM, gives the pod of a
// number: the gateway is number -1.
func podAddress(subnet netip.Prefix, pod int) netip.Prefix {
	ip := subnet.Addr().AsSlice()
	number := pod + 2
	ip[len(ip)-1], ip[len(ip)-2] = byte(number), byte(number>>8)
	address, _ := netip.AddrFromSlice(ip)
	return netip.PrefixFrom(address, subnet.Bits())
}

// binaries says where the programs are.
type binaries struct {
	peers    string // a directory that build.sh filled
	tombolo  string
	tombolod string // the keeper of leases, which need not be there
}

func (b binaries) floor() string { return filepath.Join(b.peers, "floor") }
func (b binaries) peak() string  { return filepath.Join(b.peers, "peak") }

func (b binaries) plugin(name string) string {
	if name == tombolo {
		return b.tombolo
	}
	return filepath.Join(b.peers, name)
}

// missing gives the programs that a contender needs in a scenario and are not there.
func (b binaries) missing(contender string, s scenario) []string {
	var paths, absent []string
	switch contender {
	case floor:
		paths = []string{b.floor()}
	case tombolo, tomboloUDP:
		paths = []string{b.tombolo}
		if s.leases {
			paths = append(paths, b.tombolod)
		}
	default:
		paths = []string{b.plugin(s.ipam())}
		for _, c := range (&node{contender: contender, scenario: s, lan: &lan{}}).plugins(0) {
			paths = append(paths, b.plugin(c.Type))
		}
	}
	for _, path := range paths {
		if _, err := os.Stat(path); err != nil {
			absent = append(absent, path)
		}
	}
	for _, name := range s.tools(contender) {
		if _, err := exec.LookPath(name); err != nil {
			absent = append(absent, name)
		}
	}
	return absent
}

// tools are the programs of the host that a contender runs in a scenario, and that
// we run to prove its work.
func (s *scenario) tools(contender string) []string {
	var names []string
	switch {
	case s.full:
		names = []string{"ip", "iptables", "ip6tables", "tc"}
	case s.dhcp:
		names = []string{"ip"}
	case s.ports > 0:
		names = []string{"ip"}
	}
	switch contender {
	case chainIPTables:
		names = append(names, "iptables", "ip6tables")
	case chainNFTables:
		names = append(names, "nft")
	case reference:
		if s.masquerade {
			names = append(names, "nft")
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// node is one contender's machine in one scenario: a namespace with its bridge, and
// a directory for its state.
type node struct {
	contender string
	ns        namedNS
	outside   *namedNS // another machine, where the scenario has one
	lan       *lan     // where addresses are leased
	state     string
	scenario  scenario
	binaries  binaries
	pods      int    // how many there have been
	resident  []*pod // that fill left there
}

// pod is a pod of a node: a namespace, and what a runtime keeps about it.
type pod struct {
	number int // distinct over the node's life, and so is all that is derived from it
	path   string
	result []byte // of its ADD
}

// plugins are the configurations of the plugins that a pod takes, in their order.
func (n *node) plugins(number int) []netconf {
	c := n.config()
	switch n.contender {
	case chainIPTables, chainNFTables:
		return n.chain(c, number)
	}
	c.RuntimeConfig = n.capabilities(number)
	return []netconf{c}
}

// execute executes a verb of the contender for a pod as a runtime does: plugin by
// plugin, each with the result of the one before; for DEL in reverse, each with the
// last result. The costs are added up, and the memory is that of the largest.
func (n *node) execute(verb string, p *pod, run func(command) (outcome, error)) (outcome, error) {
	if n.contender == floor {
		c := n.command(verb, p, n.binaries.floor())
		c.argv = append(c.argv, floorArgs(n.scenario.dual, p.number)...)
		return n.exec(c, run)
	}
	var total outcome
	configs := n.plugins(p.number)
	if verb == "DEL" {
		slices.Reverse(configs)
		total.stdout = p.result
	}
	for _, config := range configs {
		config.PrevResult = total.stdout
		c := n.command(verb, p, n.binaries.plugin(config.Type))
		var err error
		if c.stdin, err = json.Marshal(config); err != nil {
			return total, fmt.Errorf("encode configuration: %w", err)
		}
		o, err := n.exec(c, run)
		if err != nil {
			return total, err
		}
		if verb == "ADD" {
			total.stdout = o.stdout
		}
		total.wall += o.wall
		total.cpu += o.cpu
		total.peak = max(total.peak, o.peak)
	}
	if verb == "ADD" {
		p.result = total.stdout
	}
	return total, nil
}

// command is one program's call, less its standard input.
func (n *node) command(verb string, p *pod, path string) command {
	return command{argv: []string{path}, env: []string{
		"CNI_COMMAND=" + verb,
		"CNI_CONTAINERID=bench-" + n.contender + "-" + strconv.Itoa(p.number),
		"CNI_NETNS=" + p.path,
		"CNI_IFNAME=" + podIfname,
		"CNI_PATH=" + n.binaries.peers,
		"PATH=" + os.Getenv("PATH"),
	}}
}

func floorArgs(dual bool, pod int) []string {
	var args []string
	for i, subnet := range subnets(dual) {
		family := []string{"", "6"}[i]
		args = append(args,
			"-address"+family, podAddress(subnet, pod).String(),
			"-gateway"+family, gatewayOf(subnet).String())
	}
	return args
}

// newNode makes a contender's machine. The plugins make their bridge in the first,
// unmeasured ADD; floor and the attach loops need it made for them.
func newNode(contender string, dir string, s scenario, b binaries) (*node, error) {
	n := &node{contender: contender, state: filepath.Join(dir, "state"), scenario: s, binaries: b}
	if err := os.MkdirAll(n.state, 0o755); err != nil {
		return nil, err
	}
	ns, err := newNS(filepath.Join(dir, "host"))
	if err != nil {
		return nil, err
	}
	n.ns = ns
	if s.full || s.ports > 0 {
		if err := n.addOutside(filepath.Join(dir, "outside")); err != nil {
			return nil, err
		}
	}
	if contender != floor && !s.attach {
		return n, nil
	}
	_, err = n.exec(command{argv: append([]string{b.floor(), "-setup"}, floorArgs(s.dual, 0)...)}, run)
	return n, err
}

// exec runs a command on the node.
func (n *node) exec(c command, run func(command) (outcome, error)) (outcome, error) {
	var o outcome
	err := n.ns.Do(func() error {
		var err error
		o, err = run(c)
		return err
	})
	return o, err
}
