package main

import (
	"fmt"
	"strconv"
	"strings"
)

// scenario is one thing to measure.
type scenario struct {
	name       string
	text       string // for the report's reader
	dual       bool   // an IPv6 address beside the IPv4 one
	masquerade bool   // the reference masquerades; tombolo does by default
	pods       int    // how many pods are there before the rounds
	attach     bool   // in process instead of exec'd
	full       bool   // with a host port, a firewall to pass, and limits
	ports      int    // how many host ports are there; what is measured is a packet
	dhcp       bool   // the address is leased
	rapid      bool   // in two messages instead of four
	leases     bool   // what is measured is who keeps the pods' leases
	impatient  bool   // the reference's daemon asks again after a second
}

// parseScenarios reads a list such as "ipv4,dual,attach,pods=200".
func parseScenarios(list string) ([]scenario, error) {
	var all []scenario
	for _, name := range strings.Split(list, ",") {
		s, err := parseScenario(name)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

// Limits of what can be asked for.
const (
	maxPods  = 1022 // leaves a port for the measured pod: a Linux bridge has 1023
	maxPorts = 10000
)

func parseScenario(name string) (scenario, error) {
	s := scenario{name: name}
	switch name {
	case "ipv4":
		s.text = "one IPv4 pod, idle node"
		return s, nil
	case "dual":
		s.text, s.dual, s.masquerade = "one dual-stack pod with masquerade, idle node", true, true
		return s, nil
	case "attach":
		s.text, s.attach = "one IPv4 pod, in process, idle node", true
		return s, nil
	case "full":
		s.text, s.dual, s.masquerade, s.full = fullPod+", idle node", true, true, true
		return s, nil
	case "dhcp":
		s.text, s.dhcp = "one pod that leases its address, idle node", true
		return s, nil
	case "dhcp-rapid":
		s.text, s.dhcp, s.rapid = "one pod that leases its address by rapid commit, which the reference does not know", true, true
		return s, nil
	}
	kind, count, _ := strings.Cut(name, "=")
	var most int
	switch kind {
	case "pods", "full", "leases":
		most = maxPods
	case "ports":
		most = maxPorts
	default:
		return scenario{}, fmt.Errorf("unknown scenario %q: want ipv4, dual, attach, full, dhcp, dhcp-rapid, pods=N, full=N, ports=N or leases=N", name)
	}
	n, err := strconv.Atoi(count)
	if err != nil || n < 1 || n > most {
		return scenario{}, fmt.Errorf("scenario %q: want a number from 1 to %d", name, most)
	}
	switch kind {
	case "pods":
		s.text, s.pods = fmt.Sprintf("one IPv4 pod beside %d", n), n
	case "full":
		s.text, s.dual, s.masquerade, s.full, s.pods = fmt.Sprintf("%s, beside %d", fullPod, n), true, true, true, n
	case "leases":
		s.text, s.pods, s.dhcp, s.leases = fmt.Sprintf("who keeps the leases of %d pods", n), n, true, true
	case "ports":
		s.text, s.ports = fmt.Sprintf("a datagram to a host port, of which there are %d", n), n
	}
	return s, nil
}

const fullPod = "one dual-stack pod with masquerade, host port, firewall and bandwidth"

// A contender that execs some eighty programs for a pod cannot be measured as often
// as the others, and need not: its figures vary by less.
const (
	fullShare   = 8 // one of so many rounds
	fullAtLeast = 2
)

// rounds is how many of the rounds asked for a scenario gets.
func (s *scenario) rounds(asked int) int {
	switch {
	case s.full:
		return min(asked, max(asked/fullShare, fullAtLeast))
	case s.leases: // the other scenarios' count is of ADDs
		return min(asked, leaseRounds, max(asked/leaseShare, leaseAtLeast))
	case s.dhcp:
		return min(asked, max(asked/dhcpShare, quickRounds))
	}
	return asked
}

// warmUp is how many rounds come before the first that counts.
func (s *scenario) warmUp() int {
	if s.full {
		return 1
	}
	return 3
}

// ipam is the reference's plugin for addresses.
func (s *scenario) ipam() string {
	if s.dhcp {
		return "dhcp"
	}
	return "host-local"
}

// takes says whether a contender has a part in a scenario. The chains are for the
// work that takes all of their plugins, and the reference by itself for the rest.
func (s *scenario) takes(contender string) bool {
	switch contender {
	case chainIPTables, chainNFTables:
		return s.full || s.ports > 0
	case reference:
		return !s.full && s.ports == 0
	case tomboloUDP:
		return s.dhcp && !s.leases
	case floor:
		return s.ports == 0 && !s.dhcp
	}
	return true
}
