// Package firewall is the reference's plugin of that name: it has other firewalls let pass what a pod
// sends, has tombolod put its addresses into a zone of firewalld, and keeps bridges apart.
package firewall

import (
	"context"
	"errors"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni/reference"
	"github.com/tombolo-cni/tombolo/internal/cni/reference/leftover"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// conf is the plugin's configuration.
type conf struct {
	Backend                string `json:"backend"`
	FirewalldZone          string `json:"firewalldZone"`
	IptablesAdminChainName string `json:"iptablesAdminChainName"`
	IngressPolicy          string `json:"ingressPolicy"`

	policy nft.Policy
}

// read gives what it could read with an error that is about a value.
func read(c *reference.Call) (*conf, error) {
	var f conf
	if err := c.Unmarshal(&f); err != nil {
		return nil, err
	}
	if f.IptablesAdminChainName == "" {
		f.IptablesAdminChainName = "CNI-ADMIN"
	}
	switch f.IngressPolicy {
	case "", "open":
	case "same-bridge":
		f.policy = nft.SameBridge
	case "isolated":
		f.policy = nft.Isolated
	default:
		return &f, reference.Errorf(types.ErrInvalidNetworkConfig, `ingressPolicy %q is none of "open", "same-bridge" and "isolated"`, f.IngressPolicy)
	}
	return &f, nil
}

// Run is the plugin of that name. As there, STATUS does nothing.
func Run(ctx context.Context, c *reference.Call) (*current.Result, error) {
	switch c.Verb {
	case "STATUS":
		return nil, nil
	case "GC":
		return nil, c.Collect(ctx)
	}
	f, err := read(c)
	if c.Verb == "DEL" {
		if f == nil {
			f = &conf{} // what no ADD takes keeps no plugin before this one from its DEL
		}
		return nil, c.TakenBack(f.del(ctx, c))
	}
	if err != nil {
		return nil, err
	}
	prev, err := c.Chained()
	if err != nil {
		return nil, err
	}
	z, err := f.zone(c, prev)
	if err != nil {
		return nil, err
	}
	node, err := c.Open()
	if err != nil {
		return nil, err
	}
	if c.Verb == "CHECK" {
		diffs, err := node.CheckAdmitted(ctx, c.Key(), f.policy)
		return nil, reference.Differ(append(diffs, z.check()...), err)
	}
	err = node.Admit(ctx, c.Key(), c.Interface(prev), network.Admission{Policy: f.policy, AdminChain: f.IptablesAdminChainName})
	if err == nil {
		if err = z.ask(ctx); err != nil {
			err = errors.Join(err, f.del(context.WithoutCancel(ctx), c))
		}
	}
	return prev, err
}

// del takes back what ADD did, or the reference's plugin.
func (f *conf) del(ctx context.Context, c *reference.Call) error {
	prev, err := c.Prev()
	if err != nil {
		prev = nil // it names what the reference has left, and nothing else
	}
	z, err := f.zone(c, prev)
	if err == nil {
		err = z.leave(ctx)
	}
	if err != nil {
		return err
	}
	node, err := c.Open()
	if err != nil {
		return err
	}
	if err := node.Unadmit(ctx, c.Key()); err != nil && !errors.Is(err, network.ErrNotAttached) {
		return err
	}
	return leftover.Forward(ctx, c)
}
