package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
)

// The contenders, in the order of the report.
const (
	floor     = "floor"     // the static C program
	tombolo   = "tombolo"   // the plugin under test
	reference = "reference" // containernetworking's bridge and host-local
)

func contenders() []string { return []string{floor, tombolo, reference} }

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
	peers   string // a directory that build.sh filled
	tombolo string
}

func (b binaries) floor() string { return filepath.Join(b.peers, "floor") }
func (b binaries) peak() string  { return filepath.Join(b.peers, "peak") }

// missing gives the programs of a contender that are not there.
func (b binaries) missing(contender string) []string {
	var absent []string
	for _, path := range map[string][]string{
		floor:     {b.floor()},
		tombolo:   {b.tombolo},
		reference: {filepath.Join(b.peers, "bridge"), filepath.Join(b.peers, "host-local")},
	}[contender] {
		if _, err := os.Stat(path); err != nil {
			absent = append(absent, path)
		}
	}
	return absent
}

// node is one contender's machine in one scenario: a namespace with its bridge, and
// a directory for its state.
type node struct {
	contender string
	ns        namedNS
	state     string
	scenario  scenario
	binaries  binaries
	pods      int // how many there have been
}

// call is the exec of one verb for one pod. The identity is distinct over a node's
// life, and so are the MACs that are derived from it.
func (n *node) call(verb string, pod int, netns string) (command, error) {
	c := command{env: []string{
		"CNI_COMMAND=" + verb,
		"CNI_CONTAINERID=bench-" + n.contender + "-" + strconv.Itoa(pod),
		"CNI_NETNS=" + netns,
		"CNI_IFNAME=" + podIfname,
		"CNI_PATH=" + n.binaries.peers,
		"PATH=" + os.Getenv("PATH"),
	}}
	if n.contender == floor {
		c.argv = append([]string{n.binaries.floor()}, floorArgs(n.scenario.dual, pod)...)
		return c, nil
	}
	config, err := json.Marshal(n.config())
	if err != nil {
		return c, fmt.Errorf("encode configuration: %w", err)
	}
	c.stdin = config
	c.argv = []string{n.binaries.tombolo}
	if n.contender == reference {
		c.argv = []string{filepath.Join(n.binaries.peers, "bridge")}
	}
	return c, nil
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

// netconf is what the two plugins' configurations have in common, by the reference
// plugin's names, and what only one of them knows.
type netconf struct {
	CNIVersion string `json:"cniVersion"`
	Name       string `json:"name"`
	Type       string `json:"type"`
	Bridge     string `json:"bridge"`
	MTU        int    `json:"mtu"`
	IPAM       ipam   `json:"ipam"`

	Mode     string `json:"mode,omitempty"`
	StateDir string `json:"stateDir,omitempty"`

	IsGateway        bool   `json:"isGateway,omitempty"`
	IsDefaultGateway bool   `json:"isDefaultGateway,omitempty"`
	HairpinMode      bool   `json:"hairpinMode,omitempty"`
	IPMasq           bool   `json:"ipMasq,omitempty"`
	IPMasqBackend    string `json:"ipMasqBackend,omitempty"`
}

type ipam struct {
	Type    string       `json:"type"`
	Ranges  [][]ipamPool `json:"ranges"`
	DataDir string       `json:"dataDir,omitempty"`
}

type ipamPool struct {
	Subnet netip.Prefix `json:"subnet"`
}

// config gives tombolo its defaults, which include masquerade and hairpin, and the
// reference the same features by its own fields. In the IPv4 scenario the reference
// is let off masquerade: it would exec nft or iptables, and that comparison is the
// dual scenario's.
func (n *node) config() netconf {
	c := netconf{
		CNIVersion: "1.0.0", Name: networkName, MTU: podMTU,
		IPAM: ipam{Type: "host-local"},
	}
	for _, subnet := range subnets(n.scenario.dual) {
		c.IPAM.Ranges = append(c.IPAM.Ranges, []ipamPool{{subnet}})
	}
	if n.contender == tombolo {
		c.Type, c.Bridge, c.Mode, c.StateDir = tombolo, "tmb0", "gateway", n.state
		return c
	}
	c.Type, c.Bridge = "bridge", "cni0"
	c.IsGateway, c.IsDefaultGateway, c.HairpinMode = true, true, true
	c.IPAM.DataDir = n.state
	if n.scenario.masquerade {
		c.IPMasq, c.IPMasqBackend = true, "nftables"
	}
	return c
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
	if contender != floor && !s.attach {
		return n, nil
	}
	_, err = n.exec(command{argv: append([]string{b.floor(), "-setup"}, floorArgs(s.dual, 0)...)})
	return n, err
}

// exec runs a command on the node.
func (n *node) exec(c command) (outcome, error) {
	var o outcome
	err := n.ns.Do(func() error {
		var err error
		o, err = run(c)
		return err
	})
	return o, err
}
