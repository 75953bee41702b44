package foreign

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// What firewalld makes of zones and policies.
const (
	firewalldTable  = "firewalld"
	firewalldPolicy = "filter_FWD_policy_" // begins the names of a policy's chains
)

// byFirewalld says which part of firewalld stops pods, and what helps. A bridge that a zone stops has to join the
// zone trusted. Against a policy that does not help, since its rules apply whatever the zone is: the policy needs
// a rule that accepts pods.
func (ch *hookedChain) byFirewalld(o *Obstacle, by *rule, t *content, p *podPacket) {
	policy, first := t.policyOf(by)
	if policy == "" {
		o.Kind = Firewalld
		// --add-interface would fail for an interface that is in another zone.
		o.Remedy = "firewall-cmd --permanent --zone=trusted --change-interface=" + shellWord(p.bridge) + " && firewall-cmd --reload"
		return
	}
	o.Kind, o.Chain = FirewalldPolicy, chain{ch.family, ch.table, by.chain}.String()
	o.Effect = fmt.Sprintf("drops or rejects, by the policy %s, which is left to its owner,", policy)
	o.Remedy = "firewall-cmd --permanent --policy=" + shellWord(policy)
	const lowest = "priority=-32768 " // comes before rules without one
	if len(p.prefixes) == 0 {
		o.Remedy += fmt.Sprintf(" --add-rich-rule='rule %saccept'", lowest)
	}
	for _, prefix := range p.prefixes {
		family, proto := "ipv4", uint8(unix.NFPROTO_IPV4)
		if prefix.Addr().Is6() {
			family, proto = "ipv6", unix.NFPROTO_IPV6
		}
		if fate := ch.fate(t, p, proto); fate.how != dropped || fate.by.handle != by.handle {
			continue
		}
		o.Remedy += fmt.Sprintf(" --add-rich-rule='rule %sfamily=%s source address=%s accept'", map[bool]string{true: lowest}[first], family, prefix.Masked())
	}
	o.Remedy += " && firewall-cmd --reload"
}

// policyOf names the policy to which a rule belongs, if it belongs to one. first says that the rule is one that the
// operator gave the policy, so that an accept has to come before it; otherwise it is the policy's target, which
// comes after all rules.
func (t *content) policyOf(by *rule) (policy string, first bool) {
	if by == nil {
		return "", false
	}
	policy, is := strings.CutPrefix(by.chain, firewalldPolicy)
	if !is {
		return "", false
	}
	for _, part := range []string{"_pre", "_log", "_deny", "_allow", "_post"} {
		whole, is := strings.CutSuffix(policy, part)
		for _, r := range t.chains[firewalldPolicy+whole] {
			if is && r.target == by.chain {
				return whole, true
			}
		}
	}
	return policy, false
}
