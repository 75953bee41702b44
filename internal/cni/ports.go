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

func (b Bandwidth) shape() bandwidth.Shape {
	return bandwidth.Shape{
		Ingress: bandwidth.Limit{Rate: b.IngressRate, Burst: b.IngressBurst},
		Egress:  bandwidth.Limit{Rate: b.EgressRate, Burst: b.EgressBurst},
	}
}

// limits are those of one pod: those of the configuration, which an operator
// sets for all pods, else those that the runtime passes on.
func (c *Common) limits(configured Bandwidth) bandwidth.Shape {
	if configured == (Bandwidth{}) {
		configured = orZero(c.RuntimeConfig.Bandwidth)
	}
	return configured.shape()
}

// limits are about those that something names.
func (p *problems) limits(where string, b Bandwidth) {
	// Of any MTU: what is wrong with rates and bursts is wrong with all.
	_, _, err := b.shape().Effective(ethernetMTU)
	p.add(err != nil, "bandwidth of %s: %v", where, err)
}

const ethernetMTU = 1500
