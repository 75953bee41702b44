package cni

import (
	"context"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/network"
)

// maxBurst is the most that the reference's plugin bandwidth takes, in bits.
const maxBurst = 8 * (1<<32 - 1)

// readBandwidth gives the limits: those of the configuration count, if it has any, before the runtime's.
func (c *call) readBandwidth() (bandwidth.Shape, error) {
	type entry struct { // nil is not there
		IngressRate  *uint64 `json:"ingressRate"`
		IngressBurst *uint64 `json:"ingressBurst"`
		EgressRate   *uint64 `json:"egressRate"`
		EgressBurst  *uint64 `json:"egressBurst"`
	}
	var f struct {
		entry
		RuntimeConfig struct {
			Bandwidth *entry `json:"bandwidth"`
		} `json:"runtimeConfig"`
	}
	if err := c.unmarshal(&f); err != nil {
		return bandwidth.Shape{}, err
	}
	e := &f.entry
	if *e == (entry{}) && f.RuntimeConfig.Bandwidth != nil {
		e = f.RuntimeConfig.Bandwidth
	}
	b := Bandwidth{orZero(e.IngressRate), orZero(e.IngressBurst), orZero(e.EgressRate), orZero(e.EgressBurst)}
	for _, l := range []struct {
		what        string
		rate, burst uint64
	}{{"ingress", b.IngressRate, b.IngressBurst}, {"egress", b.EgressRate, b.EgressBurst}} {
		if (l.rate == 0) != (l.burst == 0) || l.burst >= maxBurst {
			return bandwidth.Shape{}, newError(codeInvalidConfig, "%sRate %d and %[1]sBurst %[3]d: both have to be set, the burst to less than %d, or neither", l.what, l.rate, l.burst, maxBurst)
		}
	}
	return b.shape("the configuration")
}

func orZero[T any](p *T) (value T) {
	if p != nil {
		value = *p
	}
	return value
}

// bandwidth is the reference's plugin of that name: it limits what a pod sends and receives.
func (c *call) bandwidth(ctx context.Context, conf *NetConf) (*current.Result, error) {
	if c.verb == "DEL" { // limits that no ADD takes keep no plugin before this one from its DEL
		c.takeBack(conf, func(node *network.Node) error {
			_, err := node.Change(c.key()).Limit(ctx, bandwidth.Shape{})
			return err
		})
		return nil, nil
	}
	shape, err := c.readBandwidth()
	if err != nil {
		return nil, err
	}
	if shape.IsZero() && c.verb == "CHECK" {
		return nil, nil
	}
	if shape.IsZero() {
		return parsePrevResult(conf, c.cniVersion)
	}
	prev, err := c.chained(conf)
	if err != nil {
		return nil, err
	}
	node, err := c.open(conf)
	if err != nil {
		return nil, err
	}
	if c.verb == "CHECK" {
		return nil, differ(node.Change(c.key()).Check(ctx, nil, &shape))
	}
	by, err := node.Change(c.key()).Limit(ctx, shape)
	if err != nil {
		return nil, err
	}
	if by != nil {
		prev.Interfaces = append(prev.Interfaces, &current.Interface{Name: by.Name, Mac: by.MAC.String()})
	}
	return prev, nil
}
