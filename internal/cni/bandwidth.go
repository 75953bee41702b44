package cni

import (
	"cmp"
	"context"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network"
)

// maxBurst is the reference plugin bandwidth's limit for bursts, in bits. A burst must be smaller.
const maxBurst = 8 * (1<<32 - 1)

// bandwidthConf is the configuration of the reference plugin bandwidth, which limits a pod's traffic.
type bandwidthConf struct {
	Common
	Bandwidth
}

func (f *bandwidthConf) problems() []error {
	p := problems(f.Common.problems())
	limits := f.limits(f.Bandwidth)
	p.burst("ingress", limits.Ingress)
	p.burst("egress", limits.Egress)
	p.limits("the configuration", f.Bandwidth)
	return p
}

// burst adds a problem if only one of rate and burst is set, or if the burst is not less than maxBurst. The reference
// plugin has the same rules. way is "ingress" or "egress".
func (p *problems) burst(way string, l bandwidth.Limit) {
	p.add((l.Rate == 0) != (l.Burst == 0) || l.Burst >= maxBurst,
		"%sRate %d and %[1]sBurst %[3]d: both have to be set, the burst to less than %d, or neither",
		way, l.Rate, l.Burst, maxBurst)
}

func (f *bandwidthConf) lacks(rec *state.Attachment) bool {
	return !f.limits(f.Bandwidth).IsZero() && rec.Bandwidth.IsZero()
}

// orZero returns *p, or the zero value if p is nil.
func orZero[T any](p *T) T { return *cmp.Or(p, new(T)) }

func (f *bandwidthConf) run(ctx context.Context, c *call) (*current.Result, error) {
	if c.verb == "DEL" { // invalid limits must not stop the DEL of the plugins before this one
		c.undoChange(func(change network.Change) error {
			_, err := change.Limit(ctx, bandwidth.Shape{})
			return err
		})
		return nil, nil
	}

	shape := f.limits(f.Bandwidth)
	if shape.IsZero() {
		return c.passThrough()
	}

	prev, change, err := c.chainedChange()
	if err != nil {
		return nil, err
	}

	if c.verb == "CHECK" {
		return nil, differ(change.Check(ctx, nil, &shape))
	}

	port, err := change.Limit(ctx, shape)
	if err != nil {
		return nil, err
	}

	if port != nil {
		prev.Interfaces = append(prev.Interfaces, &current.Interface{Name: port.Name, Mac: port.MAC.String()})
	}

	return prev, nil
}

// Bandwidth holds the limits of a pod's traffic in the fields of the reference plugin bandwidth, which the capability
// bandwidth has too. Rates are in bits per second, and bursts in bits. A rate of 0 means no limit, and a burst of 0 a
// default burst. Ingress is the pod's incoming traffic.
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

// limits returns configured, the limits for all pods. If configured is zero, it returns the limits that the runtime
// passes for the pod.
func (c *Common) limits(configured Bandwidth) bandwidth.Shape {
	if configured == (Bandwidth{}) {
		configured = orZero(c.RuntimeConfig.Bandwidth)
	}
	return configured.shape()
}

// limits adds a problem if a rate or a burst is not valid. where names the place of the limits, for the error.
func (p *problems) limits(where string, b Bandwidth) {
	// A rate or burst is valid for every MTU or for none, so any MTU will do here.
	_, _, err := b.shape().Effective(ethernetMTU)
	p.add(err != nil, "bandwidth of %s: %v", where, err)
}

const ethernetMTU = 1500
