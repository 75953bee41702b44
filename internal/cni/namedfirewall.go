package cni

import (
	"cmp"
	"context"

	current "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// firewallConf is the configuration of the reference plugin firewall, which makes the host's firewalls accept a pod's
// packets, and can block packets between pods. For firewalld, the reference plugin puts each pod's address into a
// zone. Here tombolod puts the bridge into a zone.
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
		`firewalldZone %q: pods' addresses are in no zone of firewalld, and their bridge is in "trusted": put the `+
			`bridge into another zone (firewall-cmd --permanent --zone=ZONE --change-interface=BRIDGE), and take the `+
			`field out`, f.FirewalldZone)
	p.policy(f.IngressPolicy)
	return p
}

// lacks reports whether the reference plugin's chain CNI-FORWARD exists in nf_tables. If so, the reference plugin may
// have made rules for the pod, and Tombolo's records do not show them. lacks returns false if it cannot find out.
func (*firewallConf) lacks(*state.Attachment) (is bool) {
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return false
	}
	defer conn.Close()
	for _, family := range []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		var b nl.Batch
		nftnl.Get(&b, nl.Name("chain CNI-FORWARD"), family, unix.NFT_MSG_GETCHAIN, func([]byte) error {
			is = true
			return nil
		}, nftnl.String(unix.NFTA_CHAIN_TABLE, "filter"), nftnl.String(unix.NFTA_CHAIN_NAME, "CNI-FORWARD"))
		_ = nftnl.ExecuteGets(conn, &b)
	}

	return is
}

func (f *firewallConf) run(ctx context.Context, c *call) (*current.Result, error) {
	if c.verb == "DEL" {
		return nil, nil // the DEL of bridge removes our attachment's part
	}

	prev, change, err := c.chainedChange()
	if err != nil {
		return nil, err
	}

	if c.verb == "CHECK" {
		return nil, differ(change.Check(ctx, nil, nil)) // the CHECK of bridge compares the rest
	}
	return prev, change.Admit(ctx, policyOf(f.IngressPolicy), cmp.Or(f.IptablesAdminChainName, "CNI-ADMIN"))
}
