// Package firewall is the reference's plugin of that name: it has other firewalls let pass what a pod
// sends, and keeps bridges apart.
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

// conf is the plugin's configuration. firewalldZone is for its backend firewalld alone.
type conf struct {
	Backend                string `json:"backend"`
	IptablesAdminChainName string `json:"iptablesAdminChainName"`
	IngressPolicy          string `json:"ingressPolicy"`

	policy nft.Policy
}

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
		return nil, reference.Errorf(types.ErrInvalidNetworkConfig, `ingressPolicy %q is none of "open", "same-bridge" and "isolated"`, f.IngressPolicy)
	}
	return &f, nil
}

// unsupported says what of the configuration this plugin cannot do.
func (f *conf) unsupported() error {
	if f.Backend != "firewalld" {
		return nil
	}
	return reference.Errorf(types.ErrUnsupportedField, `backend "firewalld" is not supported: leave it out, or have the reference's firewall do this (tombolo install --undo --names firewall DIR)`)
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
	if err != nil {
		return nil, err
	}
	var prev *current.Result
	if c.Verb != "DEL" {
		if prev, err = c.Chained(); err == nil {
			err = f.unsupported()
		}
		if err != nil {
			return nil, err
		}
	}
	node, err := c.Open()
	if err != nil {
		return nil, err
	}
	switch c.Verb {
	case "ADD":
		return prev, node.Admit(ctx, c.Key(), c.Interface(prev), network.Admission{Policy: f.policy, AdminChain: f.IptablesAdminChainName})
	case "DEL":
		if err := node.Unadmit(ctx, c.Key()); !errors.Is(err, network.ErrNotAttached) {
			return nil, err
		}
		return nil, leftover.Forward(ctx, c)
	}
	return nil, reference.Differ(node.CheckAdmitted(ctx, c.Key(), f.policy))
}
