package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// In the scenarios of DHCP a node has a bridge from the start, and on it the veth of a
// router, which runs dnsmasq in a namespace of its own. The router has the gateway's
// address, so that results and pods are proven as everybody's are.
const (
	lanBridge    = "br0"
	routerIfname = "eth0"
	dhcpFrom     = "10.88.1.0"
	dhcpTo       = "10.88.250.255"
	dhcpMask     = "255.255.0.0"
)

// Leases of an hour are not renewed during a measurement. dnsmasq gives none that are
// shorter than two minutes.
const (
	longLease  = "1h"
	shortLease = "2m"
)

// The reference loses packets that its daemon sends before the link can carry them:
// here that is one ADD in six or so, each of which then takes ten seconds. So these
// scenarios get one round in two; and where rounds are few, or an ADD is not measured,
// its daemon is told to ask again after a second.
const dhcpShare = 2

// hurried is a scenario in which the reference's daemon is, where that is so of it.
func (s scenario) hurried(rounds int) scenario {
	s.impatient = s.leases || s.dhcp && s.rounds(rounds) <= quickRounds
	return s
}

// What dnsmasq logs of messages.
const (
	logDiscover = " DHCPDISCOVER("
	logOffer    = " DHCPOFFER("
	logAck      = " DHCPACK("
)

// lan is what a node needs to lease addresses.
type lan struct {
	router  namedNS
	mac     net.HardwareAddr // of the router
	server  *daemon
	log     string  // of the server
	leased  string  // the server's file of leases
	records string  // where tombolo keeps its own, on a disk
	socket  string  // of the reference's daemon
	keeper  *daemon // tombolod, or the reference's daemon; nil if there is none
}

// serverMissing is what a scenario of DHCP cannot do without; empty if it is there.
func serverMissing(s scenario) string {
	if !s.dhcp {
		return ""
	}
	if _, err := exec.LookPath("dnsmasq"); err != nil {
		return s.name + ": dnsmasq is missing, the DHCP server (Debian: apt-get install dnsmasq-base)"
	}
	return ""
}

// addLAN makes the node's bridge and its router, and starts the server and whoever
// keeps the leases. dir is for sockets and logs, records for tombolo's lease records.
func (n *node) addLAN(dir, records string) error {
	path := filepath.Join(dir, "router")
	router, err := newNS(path)
	if err != nil {
		return err
	}
	n.lan = &lan{
		router: router, records: records,
		log: filepath.Join(dir, "dnsmasq.log"), leased: filepath.Join(dir, "dnsmasq.leases"), socket: filepath.Join(dir, "dhcp.sock"),
	}
	err = n.tools(n.ns,
		"ip link add "+lanBridge+" type bridge", "ip link set "+lanBridge+" up",
		"ip link add lan0 type veth peer name "+routerIfname+" netns "+path,
		"ip link set lan0 master "+lanBridge, "ip link set lan0 up")
	if err != nil {
		return err
	}
	subnet := subnets(false)[0]
	address := netip.PrefixFrom(gatewayOf(subnet), subnet.Bits()).String()
	err = n.tools(router, "ip link set lo up", "ip link set "+routerIfname+" up",
		"ip address add "+address+" dev "+routerIfname)
	if err != nil {
		return err
	}
	if n.lan.mac, err = hardwareAddress(router, routerIfname); err != nil {
		return err
	}
	if err := n.serve(); err != nil {
		return err
	}
	return n.keep(dir)
}

// serve starts the server.
func (n *node) serve() error {
	path, err := exec.LookPath("dnsmasq")
	if err != nil {
		return err
	}
	length := longLease
	if n.scenario.leases {
		length = shortLease
	}
	argv := []string{
		path, "--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--port=0", "--pid-file=",
		// A change of the user or the group would cost it the signal that ends it with us.
		"--user=root", "--group=root",
		"--bind-interfaces", "--interface=" + routerIfname, "--except-interface=lo", "--dhcp-authoritative",
		"--no-ping", // else it waits before each OFFER whether the address answers
		"--dhcp-range=" + strings.Join([]string{dhcpFrom, dhcpTo, dhcpMask, length}, ","), "--dhcp-lease-max=60000",
		"--dhcp-leasefile=" + n.lan.leased, "--log-facility=" + n.lan.log,
	}
	if n.scenario.rapid {
		argv = append(argv, "--dhcp-rapid-commit")
	}
	if !n.scenario.leases && !n.scenario.rapid { // where messages are counted by the log
		argv = append(argv, "--quiet-dhcp")
	}
	ready := func() bool {
		text, _ := os.ReadFile(n.lan.log)
		return strings.Contains(string(text), "DHCP, IP range")
	}
	n.lan.server, err = startDaemon(n.lan.router, n.lan.log+".err", ready, argv...)
	return err
}

// keep starts whoever keeps the node's leases: the reference's daemon, without which
// it has no DHCP, or tombolod where that was built.
func (n *node) keep(dir string) error {
	output := filepath.Join(dir, "keeper.log")
	var err error
	switch {
	case n.contender == reference:
		n.lan.keeper, err = startDaemon(n.ns, output, n.lan.answers, n.referenceDaemon()...)
	case n.binaries.kept():
		ready := func() bool { _, err := os.Stat(filepath.Join(n.lan.records, "keeper.sock")); return err == nil }
		n.lan.keeper, err = startDaemon(n.ns, output, ready,
			n.binaries.tombolod, "--leases", n.lan.records, "--state", n.state, "--log-level", "warn")
	}
	return err
}

// referenceDaemon is how the reference's daemon is started.
func (n *node) referenceDaemon() []string {
	argv := []string{n.binaries.plugin("dhcp"), "daemon", "-socketpath", n.lan.socket}
	if n.scenario.impatient {
		argv = append(argv, "-timeout", "1s")
	}
	return argv
}

// answers says whether the reference's daemon listens.
func (l *lan) answers() bool {
	conn, err := net.Dial("unix", l.socket)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// kept says whether somebody keeps the node's leases, and keeping what CPU time that
// has taken.
func (n *node) kept() bool { return n.lan != nil && n.lan.keeper != nil }

func (n *node) keeping() (time.Duration, error) {
	if !n.kept() {
		return 0, nil
	}
	return n.lan.keeper.cpu()
}

// leave ends the node's daemons. The node may have none.
func (n *node) leave() {
	if n.lan == nil {
		return
	}
	for _, d := range []*daemon{n.lan.server, n.lan.keeper} {
		if d != nil {
			d.stop()
		}
	}
}

// explain adds to an error what the node's daemons said last.
func (n *node) explain(err error) error {
	if err == nil || n.lan == nil {
		return err
	}
	for _, d := range []*daemon{n.lan.server, n.lan.keeper} {
		if d != nil && d.said() != "" {
			err = fmt.Errorf("%w\n%s said: %s", err, filepath.Base(d.cmd.Path), d.said())
		}
	}
	return err
}

// dhcpConfig is the configuration that leases an address on the LAN: a port of a
// bridge that is there already, and nothing else of what our mode gateway does.
func (n *node) dhcpConfig() netconf {
	c := netconf{CNIVersion: "1.0.0", Name: networkName, MTU: podMTU, Bridge: lanBridge, IPAM: &ipam{Type: "dhcp"}}
	if n.contender == reference {
		c.Type, c.IPAM.DaemonSocketPath = "bridge", n.lan.socket
		return c
	}
	c.Type, c.Mode, c.StateDir, c.LeaseDir = tombolo, "l2", n.state, n.lan.records
	c.IPAM.Transport, c.IPAM.RapidCommit = "raw", n.scenario.rapid
	if n.contender == tomboloUDP {
		c.IPAM.Transport = "udp"
	}
	if !n.binaries.kept() {
		c.IPAM.Keeper = "optional"
	}
	return c
}

// kept says whether there is a keeper to run.
func (b binaries) kept() bool {
	_, err := os.Stat(b.tombolod)
	return err == nil
}

// measureDHCP is an ADD and a DEL by DHCP. How far the slowest of ADDs are from the
// median is a figure of its own.
func (r *runner) measureDHCP(s scenario, nodes []*node) error {
	if !r.binaries.kept() {
		r.report.note("%s: no keeper, %s is missing: tombolo closes its packet sockets by itself", s.name, r.binaries.tombolod)
	}
	if err := r.interleave(nodes, "add", "del"); err != nil {
		return err
	}
	for _, n := range nodes {
		add := r.report.find(s.name, "add", n.contender)
		r.report.add(s.name, "add tail", n.contender, times, quantile(add.values, 0.95)/median(add.values))
	}
	if err := r.measurePeaks(nodes); err != nil {
		return err
	}
	for _, n := range nodes {
		left, err := n.lan.leases()
		if err != nil {
			return err
		}
		r.report.prove("%s of %s: the server knew of each of %d leases; in the end it had %d", s.name, n.contender, n.pods, len(left))
		if s.rapid && ours(n.contender) {
			if err := n.lan.proveRapid(); err != nil {
				return fmt.Errorf("%s: %w", n.contender, err)
			}
		}
	}
	return nil
}

// proveRapid shows that the server never had to make an offer.
func (l *lan) proveRapid() error {
	text, err := os.ReadFile(l.log)
	if err != nil {
		return err
	}
	offers, acks := strings.Count(string(text), logOffer), strings.Count(string(text), logAck)
	if offers > 0 || acks == 0 {
		return fmt.Errorf("by rapid commit the server made %d offers and gave %d leases", offers, acks)
	}
	return nil
}

// leases are the addresses that the server has given, by dnsmasq's file: time, MAC,
// address, name and client's identity, separated by spaces.
func (l *lan) leases() (map[netip.Addr]bool, error) {
	text, err := os.ReadFile(l.leased)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	found := map[netip.Addr]bool{}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) < 3 {
			continue
		}
		address, err := netip.ParseAddr(fields[2])
		if err != nil {
			return nil, fmt.Errorf("the server's leases: %w in %q", err, line)
		}
		found[address] = true
	}
	return found, nil
}

// leaseOf is the address that a pod's result has.
func leaseOf(p *pod) (netip.Addr, error) {
	var result struct {
		IPs []struct {
			Address netip.Prefix `json:"address"`
		} `json:"ips"`
	}
	if err := json.Unmarshal(p.result, &result); err != nil || len(result.IPs) == 0 {
		return netip.Addr{}, fmt.Errorf("no address in result %q: %w", p.result, err)
	}
	return result.IPs[0].Address.Addr(), nil
}

// proveLease waits until the server has a pod's lease in its file, or no more. After a
// DEL of the reference's nobody looks: its daemon's RELEASE comes when the link has
// gone.
func (n *node) proveLease(p *pod, wanted bool) error {
	if !wanted && n.contender == reference {
		return nil
	}
	address, err := leaseOf(p)
	if err != nil {
		return err
	}
	for until := time.Now().Add(pingLimit); ; time.Sleep(startPause) {
		leases, err := n.lan.leases()
		if err != nil || leases[address] == wanted {
			return err
		}
		if time.Now().After(until) {
			return fmt.Errorf("the server's lease of %s: %t, want %t", address, !wanted, wanted)
		}
	}
}
