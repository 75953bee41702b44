package cni

import (
	"cmp"
	"context"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network"
)

// maxBurst is the most that the reference's plugin bandwidth takes, in bits.
const maxBurst = 8 * (1<<32 - 1)

// bandwidthConf is the configuration of the reference's plugin of that name: it limits what a pod sends and receives.
type bandwidthConf struct {
	Common
	Bandwidth
}

func (f *bandwidthConf) problems() []error {
	p := problems(f.Common.problems())
	of := f.limits(f.Bandwidth)
	p.burst("ingress", of.Ingress)
	p.burst("egress", of.Egress)
	p.limits("the configuration", f.Bandwidth)
	return p
}

// burst is about what the reference's takes.
func (p *problems) burst(way string, l bandwidth.Limit) {
	p.add((l.Rate == 0) != (l.Burst == 0) || l.Burst >= maxBurst, "%sRate %d and %[1]sBurst %[3]d: both have to be set, the burst to less than %d, or neither", way, l.Rate, l.Burst, maxBurst)
}

func (f *bandwidthConf) lacks(rec *state.Attachment) bool {
	return !f.limits(f.Bandwidth).IsZero() && rec.Bandwidth.IsZero()
}

func orZero[T any](p *T) T { return *cmp.Or(p, new(T)) }

func (f *bandwidthConf) run(ctx context.Context, c *call) (*current.Result, error) {
	if c.verb == "DEL" { // limits that no ADD takes keep no plugin before this one from its DEL
		c.takeBack(func(of network.Change) error {
			_, err := of.Limit(ctx, bandwidth.Shape{})
			return err
		})
		return nil, nil
	}
	shape := f.limits(f.Bandwidth)
	if shape.IsZero() {
		return c.passOn()
	}
	prev, of, err := c.chained()
	if err != nil {
		return nil, err
	}
	if c.verb == "CHECK" {
		return nil, differ(of.Check(ctx, nil, &shape))
	}
	by, err := of.Limit(ctx, shape)
	if err != nil {
		return nil, err
	}
	if by != nil {
		prev.Interfaces = append(prev.Interfaces, &current.Interface{Name: by.Name, Mac: by.MAC.String()})
	}
	return prev, nil
}

// Bandwidth limits a pod's traffic, in bits and bits a second; 0 for none. These are the fields of the reference
// bandwidth plugin and of the capability bandwidth; ingress is what the pod receives.
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
	// With any MTU: rates and bursts that are not valid are so with all.
	_, _, err := b.shape().Effective(ethernetMTU)
	p.add(err != nil, "bandwidth of %s: %v", where, err)
}

const ethernetMTU = 1500
