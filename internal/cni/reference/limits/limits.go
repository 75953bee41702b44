// Package limits is the reference's plugin bandwidth: it limits what a pod sends and receives.
package limits

import (
	"context"
	"errors"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/cni/reference"
	"github.com/tombolo-cni/tombolo/network"
)

// entry has the limits in bits and bits a second, 0 for none; nil is not there.
type entry struct {
	IngressRate  *uint64 `json:"ingressRate"`
	IngressBurst *uint64 `json:"ingressBurst"`
	EgressRate   *uint64 `json:"egressRate"`
	EgressBurst  *uint64 `json:"egressBurst"`
}

func (e *entry) there() bool {
	return e.IngressRate != nil || e.IngressBurst != nil || e.EgressRate != nil || e.EgressBurst != nil
}

type conf struct {
	entry
	RuntimeConfig struct {
		Bandwidth *entry `json:"bandwidth"`
	} `json:"runtimeConfig"`
}

// read gives the limits: those of the configuration count, if it has any, before the runtime's.
func read(c *reference.Call) (bandwidth.Shape, error) {
	var f conf
	if err := c.Unmarshal(&f); err != nil {
		return bandwidth.Shape{}, err
	}
	e := &f.entry
	if !e.there() && f.RuntimeConfig.Bandwidth != nil {
		e = f.RuntimeConfig.Bandwidth
	}
	ingress, err := limit("ingress", e.IngressRate, e.IngressBurst)
	if err != nil {
		return bandwidth.Shape{}, err
	}
	egress, err := limit("egress", e.EgressRate, e.EgressBurst)
	shape := bandwidth.Shape{Ingress: ingress, Egress: egress}
	if err == nil {
		if _, _, bad := shape.Effective(ethernetMTU); bad != nil {
			err = reference.Errorf(types.ErrInvalidNetworkConfig, "%v", bad)
		}
	}
	return shape, err
}

// ethernetMTU stands for any: what is wrong with rates and bursts is wrong with all.
const ethernetMTU = 1500

// maxBurst is the most that the reference takes, in bits.
const maxBurst = 8 * (1<<32 - 1)

func limit(what string, rate, burst *uint64) (bandwidth.Limit, error) {
	var l bandwidth.Limit
	if rate != nil {
		l.Rate = *rate
	}
	if burst != nil {
		l.Burst = *burst
	}
	if (l.Rate == 0) != (l.Burst == 0) || l.Burst >= maxBurst {
		return l, reference.Errorf(types.ErrInvalidNetworkConfig, "%sRate %d and %sBurst %d: both have to be set, the burst to less than %d, or neither", what, l.Rate, what, l.Burst, maxBurst)
	}
	return l, nil
}

// Run is the plugin of that name.
func Run(ctx context.Context, c *reference.Call) (*current.Result, error) {
	if c.Verb == "DEL" {
		return nil, c.TakenBack(del(ctx, c))
	}
	shape, err := read(c)
	if err != nil {
		return nil, err
	}
	prev, err := c.Prev()
	switch {
	case err != nil:
		return nil, err
	case shape.IsZero() && c.Verb == "ADD":
		return prev, nil
	case shape.IsZero():
		return nil, nil
	}
	if prev, err = c.Chained(); err != nil {
		return nil, err
	}
	node, err := c.Open()
	if err != nil {
		return nil, err
	}
	if c.Verb == "CHECK" {
		return nil, reference.Differ(node.CheckAsked(ctx, c.Key(), nil, &shape))
	}
	by, err := node.Limit(ctx, c.Key(), shape)
	if err != nil {
		return nil, err
	}
	if by != nil {
		prev.Interfaces = append(prev.Interfaces, &current.Interface{Name: by.Name, Mac: by.MAC.String()})
	}
	return prev, nil
}

// del reads no limits: those that no ADD takes keep no plugin before this one from its DEL.
func del(ctx context.Context, c *reference.Call) error {
	node, err := c.Open()
	if err != nil {
		return err
	}
	_, err = node.Limit(ctx, c.Key(), bandwidth.Shape{})
	if errors.Is(err, network.ErrNotAttached) {
		return nil
	}
	return err
}
