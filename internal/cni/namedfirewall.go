package cni

import (
	"context"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/network"
)

// readFirewall reads the configuration of the reference's plugin firewall.
func (c *call) readFirewall() (*network.Admission, error) {
	var f struct {
		Backend                string `json:"backend"`
		FirewalldZone          string `json:"firewalldZone"`
		IptablesAdminChainName string `json:"iptablesAdminChainName"`
		IngressPolicy          string `json:"ingressPolicy"`
	}
	if err := c.unmarshal(&f); err != nil {
		return nil, err
	}
	if f.IptablesAdminChainName == "" {
		f.IptablesAdminChainName = "CNI-ADMIN"
	}
	if f.FirewalldZone != "" && f.FirewalldZone != "trusted" && f.Backend != "iptables" {
		return nil, newError(codeInvalidConfig,
			`firewalldZone %q: pods' addresses are in no zone of firewalld, and their bridge is in "trusted": put the bridge into another zone (firewall-cmd --permanent --zone=ZONE --change-interface=BRIDGE), and take the field out`, f.FirewalldZone)
	}
	policy := policyOf(f.IngressPolicy)
	if f.IngressPolicy != "" && policy.String() != f.IngressPolicy {
		return nil, newError(codeInvalidConfig, `ingressPolicy %q is none of "open", "same-bridge" and "isolated"`, f.IngressPolicy)
	}
	return &network.Admission{Policy: policy, AdminChain: f.IptablesAdminChainName}, nil
}

// firewall is the reference's plugin of that name: it has other firewalls let pass what a pod
// sends, and keeps bridges apart. Of firewalld it is the bridge that joins a zone, by tombolod.
func (c *call) firewall(ctx context.Context, conf *NetConf) (*current.Result, error) {
	if c.verb == "DEL" {
		return nil, nil // an attachment of ours loses its part at bridge's DEL
	}
	admission, err := c.readFirewall()
	if err != nil {
		return nil, err
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
		return nil, differ(node.Change(c.key()).Check(ctx, nil, nil)) // the rest is bridge's CHECK
	}
	return prev, node.Change(c.key()).Admit(ctx, *admission)
}
