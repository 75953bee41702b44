package foreign

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// What firewalld makes of zones and policies.
const (
	firewalldTable  = "firewalld"
	firewalldReload = "firewalld_policy_drop" // drops while it loads its rules
	firewalldZone   = "filter_FWD_"           // begins the names of a zone's chains
	firewalldPolicy = "filter_FWD_policy_"    // and of a policy's
	trusted         = "trusted"               // the zone that bridges join
)

// byFirewalld says which part of firewalld stops pods, and what helps. A bridge that a zone stops has to join the
// zone trusted. That does not help against a zone which has the pods' addresses, since it comes before that of the
// bridge, nor where trusted has another target: a policy for that zone has to accept pods. Against a policy it does
// not help either, since its rules apply whatever the zone is: the policy needs a rule that accepts pods.
func (ch *hookedChain) byFirewalld(o *Obstacle, by *rule, t *content, p *podPacket) {
	const reload = " && " + reloadFirewalld
	policy, first := t.policyOf(by)
	if zone := t.zoneOf(by, p); policy == "" && zone != "" {
		o.Kind = FirewalldZone
		o.Effect = fmt.Sprintf("drops or rejects, by the zone %s, whatever zone the bridge joins,", zone)
		if zone == trusted {
			o.Effect = "drops or rejects, by the zone trusted, whose target is not ACCEPT,"
		}
		// Another zone may have led to this policy before, so that it goes on if there is one. An option a command.
		of := "firewall-cmd --permanent --policy=" + shellWord(p.bridge)
		o.Remedy = fmt.Sprintf("firewall-cmd --permanent --new-policy=%s; %s --add-ingress-zone=%s && %s --add-egress-zone=ANY && %s%s%s",
			shellWord(p.bridge), of, shellWord(zone), of, of, ch.richRules(t, by, p, ""), reload)
		return
	}
	if policy == "" {
		o.Kind = Firewalld
		// --add-interface would fail for an interface that is in another zone.
		o.Remedy = "firewall-cmd --permanent --zone=trusted --change-interface=" + shellWord(p.bridge) + reload
		return
	}
	o.Kind, o.Chain = FirewalldPolicy, chain{ch.family, ch.table, by.chain}.String()
	o.Effect = fmt.Sprintf("drops or rejects, by the policy %s, which is left to its owner,", policy)
	o.Remedy = "firewall-cmd --permanent --policy=" + shellWord(policy)
	priority := ""
	if first {
		priority = lowest
	}
	o.Remedy += ch.richRules(t, by, p, priority) + reload
}

// lowest is a rich rule's priority by which it comes before rules without one.
const lowest = "priority=-32768 "

// reloadFirewalld waits for a reload that goes on, and ends what one that was broken off has left.
const reloadFirewalld = "firewall-cmd --reload"

// richRules are options that have a policy accept pods whom the rule stops.
func (ch *hookedChain) richRules(t *content, by *rule, p *podPacket, priority string) (options string) {
	if len(p.prefixes) == 0 {
		return fmt.Sprintf(" --add-rich-rule='rule %saccept'", lowest)
	}
	for _, prefix := range p.prefixes {
		family, proto := "ipv4", uint8(unix.NFPROTO_IPV4)
		if prefix.Addr().Is6() {
			family, proto = "ipv6", unix.NFPROTO_IPV6
		}
		if fate := ch.fate(t, p, proto); fate.how != dropped || fate.by.handle != by.handle {
			continue
		}
		options += fmt.Sprintf(" --add-rich-rule='rule %sfamily=%s source address=%s accept'", priority, family, prefix.Masked())
	}
	return options
}

// zoneOf names the zone to which a rule belongs, if the bridge cannot leave it for trusted: as the zone has the
// pods' addresses, or is trusted.
func (t *content) zoneOf(by *rule, p *podPacket) string {
	if by == nil {
		return ""
	}
	zone, _ := strings.CutPrefix(by.chain, firewalldZone)
	pods := *p
	pods.sets = t.sets
	for _, rules := range t.chains {
		for i := range rules {
			r := &rules[i]
			if r.target != by.chain || r.verdict != goesTo {
				continue
			}
			if zone == trusted || slices.ContainsFunc(r.conditions, func(c condition) bool {
				return (c.on == onSource || c.on == onSet && c.key == onSource) && pods.meets(&c) == always
			}) {
				return zone
			}
		}
	}
	return ""
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
