package cni

import (
	"cmp"
	"context"

	current "github.com/containernetworking/cni/pkg/types/100"
)

// firewallConf is the configuration of the reference's plugin of that name: it has other firewalls let pass what a pod
// sends, and keeps bridges apart. Of firewalld it is the bridge that joins a zone, by tombolod.
type firewallConf struct {
	Common
	Backend                string `json:"backend"`
	FirewalldZone          string `json:"firewalldZone"`
	IptablesAdminChainName string `json:"iptablesAdminChainName"`
	IngressPolicy          string `json:"ingressPolicy"`
}

func (f *firewallConf) problems() []error {
	p := problems(f.Common.problems())
	p.add(f.FirewalldZone != "" && f.FirewalldZone != "trusted" && f.Backend != "iptables",
		`firewalldZone %q: pods' addresses are in no zone of firewalld, and their bridge is in "trusted": put the bridge into another zone (firewall-cmd --permanent --zone=ZONE --change-interface=BRIDGE), and take the field out`, f.FirewalldZone)
	p.policy(f.IngressPolicy)
	return p
}

func (f *firewallConf) run(ctx context.Context, c *call) (*current.Result, error) {
	if c.verb == "DEL" {
		return nil, nil // an attachment of ours loses its part at bridge's DEL
	}
	prev, of, err := c.chained()
	if err != nil {
		return nil, err
	}
	if c.verb == "CHECK" {
		return nil, differ(of.Check(ctx, nil, nil)) // the rest is bridge's CHECK
	}
	return prev, of.Admit(ctx, policyOf(f.IngressPolicy), cmp.Or(f.IptablesAdminChainName, "CNI-ADMIN"))
}
