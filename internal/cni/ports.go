package cni

import (
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
)

// Bandwidth limits a pod's traffic, in bits and bits a second; 0 for none. These
// are the fields of the reference bandwidth plugin and of the capability bandwidth;
// ingress is what the pod receives.
type Bandwidth struct {
	IngressRate  uint64 `json:"ingressRate"`
	IngressBurst uint64 `json:"ingressBurst"`
	EgressRate   uint64 `json:"egressRate"`
	EgressBurst  uint64 `json:"egressBurst"`
}

// shape gives the limits that a configuration or capability asks for: where names it.
func (b Bandwidth) shape(where string) (bandwidth.Shape, error) {
	s := bandwidth.Shape{
		Ingress: bandwidth.Limit{Rate: b.IngressRate, Burst: b.IngressBurst},
		Egress:  bandwidth.Limit{Rate: b.EgressRate, Burst: b.EgressBurst},
	}
	// Of any MTU: what is wrong with rates and bursts is wrong with all.
	if _, _, err := s.Effective(ethernetMTU); err != nil {
		return bandwidth.Shape{}, newError(codeInvalidConfig, "bandwidth of %s: %v", where, err)
	}
	return s, nil
}

// shape gives the limits of one pod: those of the configuration, which an operator
// sets for all pods, else those that the runtime passes on.
func (c *NetConf) shape(rc *runtimeConfig) (bandwidth.Shape, error) {
	s, err := c.Bandwidth.shape("the configuration")
	if err != nil || !s.IsZero() || rc.Bandwidth == nil {
		return s, err
	}
	return rc.Bandwidth.shape("runtimeConfig")
}

const ethernetMTU = 1500
