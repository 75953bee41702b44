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

// maxPods leaves a port for the measured pod: a Linux bridge has 1023.
const maxPods = 1022

func parseScenario(name string) (scenario, error) {
	switch name {
	case "ipv4":
		return scenario{name: name, text: "one IPv4 pod, idle node"}, nil
	case "dual":
		return scenario{name: name, text: "one dual-stack pod with masquerade, idle node", dual: true, masquerade: true}, nil
	case "attach":
		return scenario{name: name, text: "one IPv4 pod, in process, idle node", attach: true}, nil
	}
	if count, ok := strings.CutPrefix(name, "pods="); ok {
		pods, err := strconv.Atoi(count)
		if err != nil || pods < 1 || pods > maxPods {
			return scenario{}, fmt.Errorf("scenario %q: want 1 to %d pods", name, maxPods)
		}
		return scenario{name: name, text: fmt.Sprintf("one IPv4 pod beside %d", pods), pods: pods}, nil
	}
	return scenario{}, fmt.Errorf("unknown scenario %q: want ipv4, dual, attach or pods=N", name)
}
