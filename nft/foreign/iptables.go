package foreign

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"
)

// iptablesObstacles looks at the tables filter of iptables over nf_tables, as they are once
// Ensure has put its rule there.
func (c *Conn) iptablesObstacles(ctx context.Context, p *podPacket) ([]Obstacle, error) {
	plan, err := c.planAdmissions(ctx)
	if err != nil {
		return nil, err
	}
	var list []Obstacle
	for i := range plan.families {
		f := &plan.families[i]
		if f.placer == nil || !p.has(f.family) {
			continue
		}
		forward := chain{f.family, iptablesTable, iptablesForward}
		if asleep, err := c.isAsleep(forward); err != nil {
			return nil, err
		} else if asleep {
			continue
		}
		t := &content{f.placer.chains, map[lookup]likelihood{}}
		if err := c.readSets(t, forward, p); err != nil {
			return nil, err
		}
		o := f.obstacle(t, p)
		if o != nil && !slices.ContainsFunc(list, func(other Obstacle) bool { return other.Remedy == o.Remedy }) {
			list = append(list, *o)
		}
		if f.placer.err != nil {
			return nil, f.placer.err
		}
	}
	return list, nil
}

// obstacle is what stops pods' packets although our rule is where it should be.
func (f *familyAdmission) obstacle(t *content, p *podPacket) *Obstacle {
	pods := *p
	pods.sets, pods.family = t.sets, f.family
	program := iptablesProgram(f.family)
	accept := fmt.Sprintf("-m mark --mark 0x%x/0x%x -j ACCEPT", f.own.mark, f.own.mark)
	if f.to.blocked != "" {
		at := f.placer.chains[iptablesForward]
		o := &Obstacle{Kind: IPTables, Chain: chain{f.family, iptablesTable, f.to.blocked}.String()}
		o.Effect = "drops or rejects, where an accept would count for all rules that call the chain, or spare packets what it drops before,"
		o.Remedy = fmt.Sprintf("%s -I %s %d %s", program, iptablesForward, countTheirs(at[:f.to.path[0].index])+1, accept)
		if (newWalk(&pods, f.placer.chains).chain(iptablesForward)).how == accepted {
			return nil // an accept of theirs lets pods pass
		}
		return o
	}
	switch fate := newWalk(&pods, f.mended()).chain(iptablesForward); {
	case fate.how == dropped:
		index := indexOf(f.placer.chains[fate.by.chain], fate.by)
		remove := fate.by
		if fate.by.chain != iptablesForward && f.placer.isShared(fate.by.chain) {
			remove = fate.via // the others that call the chain need what it drops
		}
		return &Obstacle{
			Kind: IPTables, Chain: chain{f.family, iptablesTable, fate.by.chain}.String(),
			Effect: fmt.Sprintf("drops or rejects, by its rule number %d, which is left to its owner,", index+1),
			Remedy: cmp.Or(ufwDeletion(remove), fmt.Sprintf("%s -D %s %d", program, shellWord(remove.chain), indexOf(f.placer.chains[remove.chain], remove)+1)),
		}
	case fate.how == comesBack && f.policy != policyAccept:
		// They return before our rule.
		return &Obstacle{
			Kind: IPTables, Chain: chain{f.family, iptablesTable, iptablesForward}.String(),
			Effect: effectOfPolicy, Remedy: fmt.Sprintf("%s -I %s %s", program, iptablesForward, accept),
		}
	}
	return nil
}

// ufwDeletion is the command that has ufw forget a rule of its user's, for both families: what iptables deletes
// there comes back with ufw's next reload. ufw deletes only a rule with the same action, logging and comment; the first half gives
// it those, in its place. It is empty for other rules.
func ufwDeletion(r *rule) string {
	if r.chain != "ufw-user-forward" && r.chain != "ufw6-user-forward" {
		return ""
	}
	in, from := "", "any"
	for _, c := range r.conditions {
		switch {
		case c.on == onIn && !c.negated && !c.wildcard:
			in = " in on " + shellWord(c.name)
		case c.on == onSource && !c.negated:
			from = c.prefix.String()
		default:
			return ""
		}
	}
	deny := "deny" + in + " from " + from
	return "ufw route " + deny + " && ufw route delete " + deny
}

// mended gives the chains with our rule where it is kept, or goes.
func (f *familyAdmission) mended() map[string][]rule {
	chains := maps.Clone(f.placer.chains)
	for name, rules := range chains {
		chains[name] = slices.DeleteFunc(slices.Clone(rules), func(r rule) bool {
			return r.ours && (f.keep == nil || r.handle != f.keep.handle)
		})
	}
	if f.insert == nil {
		return chains
	}
	rules := chains[f.insert.into.name]
	index := slices.IndexFunc(rules, func(r rule) bool { return r.handle == f.insert.before })
	if f.insert.before == 0 || index < 0 {
		index = len(rules)
	}
	chains[f.insert.into.name] = slices.Insert(rules, index, rule{
		chain: f.insert.into.name, ours: true, comment: f.own.comment, verdict: accepts,
		conditions: []condition{{on: onMark, mark: f.own.mark, mask: f.own.mark}},
	})
	return chains
}

func countTheirs(rules []rule) int {
	n := 0
	for i := range rules {
		if !rules[i].ours {
			n++
		}
	}
	return n
}

func iptablesProgram(family uint8) string {
	if family == unix.NFPROTO_IPV6 {
		return "ip6tables"
	}
	return "iptables"
}
