package cni

import (
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
	b := f.asked()
	for _, l := range []struct {
		what        string
		rate, burst uint64
	}{{"ingress", b.IngressRate, b.IngressBurst}, {"egress", b.EgressRate, b.EgressBurst}} {
		p.add((l.rate == 0) != (l.burst == 0) || l.burst >= maxBurst, "%sRate %d and %[1]sBurst %[3]d: both have to be set, the burst to less than %d, or neither", l.what, l.rate, l.burst, maxBurst)
	}
	if _, err := b.shape("the configuration"); err != nil {
		p = append(p, err)
	}
	return p
}

// asked are the limits: those of the configuration count, if it has any, before the runtime's.
func (f *bandwidthConf) asked() Bandwidth {
	if f.Bandwidth == (Bandwidth{}) {
		return orZero(f.RuntimeConfig.Bandwidth)
	}
	return f.Bandwidth
}

func (f *bandwidthConf) lacks(rec *state.Attachment) bool {
	return f.asked() != Bandwidth{} && rec.Bandwidth == state.Bandwidth{}
}

func orZero[T any](p *T) (value T) {
	if p != nil {
		value = *p
	}
	return value
}

func (f *bandwidthConf) run(ctx context.Context, c *call) (*current.Result, error) {
	if c.verb == "DEL" { // limits that no ADD takes keep no plugin before this one from its DEL
		c.takeBack(func(of network.Change) error {
			_, err := of.Limit(ctx, bandwidth.Shape{})
			return err
		})
		return nil, nil
	}
	shape, err := f.asked().shape("the configuration")
	if err != nil {
		return nil, err
	}
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
