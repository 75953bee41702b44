// Package firewall is the reference's plugin of that name: it has other firewalls let pass what a pod
// sends, and keeps bridges apart. Of firewalld it is the bridge that joins a zone, by tombolod.
package firewall

import (
	"context"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni/reference"
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

func read(c *reference.Call) (*conf, error) {
	var f conf
	if err := c.Unmarshal(&f); err != nil {
		return nil, err
	}
	if f.IptablesAdminChainName == "" {
		f.IptablesAdminChainName = "CNI-ADMIN"
	}
	if f.FirewalldZone != "" && f.FirewalldZone != "trusted" && f.Backend != "iptables" {
		return nil, reference.Errorf(types.ErrInvalidNetworkConfig,
			`firewalldZone %q: pods' addresses are in no zone of firewalld, and their bridge is in "trusted": put the bridge into another zone (firewall-cmd --permanent --zone=ZONE --change-interface=BRIDGE), and take the field out`, f.FirewalldZone)
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

// Run is the plugin of that name.
func Run(ctx context.Context, c *reference.Call) (*current.Result, error) {
	if c.Verb == "DEL" {
		return nil, nil // an attachment of ours loses its part at bridge's DEL
	}
	f, err := read(c)
	if err != nil {
		return nil, err
	}
	prev, err := c.Chained()
	if err != nil {
		return nil, err
	}
	node, err := c.Open()
	if err != nil {
		return nil, err
	}
	if c.Verb == "CHECK" {
		return nil, reference.Differ(node.CheckAsked(ctx, c.Key(), nil, nil)) // the rest is bridge's CHECK
	}
	return prev, node.Admit(ctx, c.Key(), network.Admission{Policy: f.policy, AdminChain: f.IptablesAdminChainName})
}
