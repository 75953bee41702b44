package foreign

import (
	"context"
	"fmt"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// The chains by which the reference's plugin firewall keeps bridges apart, and the comment of rules there
// that EnsureApart makes.
const (
	stage1, stage2 = "CNI-ISOLATION-STAGE-1", "CNI-ISOLATION-STAGE-2"
	apartComment   = "tombolo: apart from the other bridges"
)

// EnsureApart has the reference's plugin firewall keep a bridge apart from those that it keeps apart from
// each other (its ingressPolicy), where it does so over nf_tables: what goes from one to another is dropped.
// Where it has no such chains, nothing is made. As with the plugin itself, nothing takes it back.
func (c *Conn) EnsureApart(ctx context.Context, bridge string) (changed bool, _ error) {
	if err := c.usable(ctx); err != nil {
		return false, err
	}
	if bridge == "" || len(bridge) >= ifnameLen {
		return false, fmt.Errorf("%w: %q cannot be a link's name", tombolo.ErrInvalid, bridge)
	}
	return c.change(ctx, func(t *nftnl.Transaction, family uint8) error { return c.planApart(ctx, t, family, bridge) })
}

// planApart adds what a family lacks.
func (c *Conn) planApart(ctx context.Context, t *nftnl.Transaction, family uint8, bridge string) error {
	first, err := c.rulesOf(ctx, chain{family, iptablesTable, stage1})
	if err != nil || len(first) == 0 {
		return err
	}
	second, err := c.rulesOf(ctx, chain{family, iptablesTable, stage2})
	if err != nil || len(second) == 0 {
		return err
	}
	link := make([]byte, ifnameLen)
	copy(link, bridge)
	if !has(first, bridge, onIn, func(r *rule) bool { return r.target == stage2 }) {
		insertApart(t, chain{family, iptablesTable, stage1}, func(x *nftnl.Expressions) {
			x.Meta(expr.MetaKeyIIFNAME, nftnl.First)
			x.Compare(expr.CmpOpEq, link)
			x.Meta(expr.MetaKeyOIFNAME, nftnl.First)
			x.Compare(expr.CmpOpNeq, link)
			x.Add(&expr.Counter{})
			x.Add(&expr.Verdict{Kind: expr.VerdictJump, Chain: stage2})
		})
	}
	if !has(second, bridge, onOut, func(r *rule) bool { return r.verdict == drops }) {
		insertApart(t, chain{family, iptablesTable, stage2}, func(x *nftnl.Expressions) {
			x.Meta(expr.MetaKeyOIFNAME, nftnl.First)
			x.Compare(expr.CmpOpEq, link)
			x.Add(&expr.Counter{})
			x.Drop()
		})
	}
	return nil
}

// insertApart inserts a rule at the beginning of a chain, whose last rule returns all packets.
func insertApart(t *nftnl.Transaction, into chain, rule func(*nftnl.Expressions)) {
	t.AddRule("insert a rule into", into, into.family, 0, apartComment, rule, into.named(unix.NFTA_RULE_CHAIN)...)
}

// has looks for a rule about a link.
func has(rules []rule, link string, on property, is func(*rule) bool) bool {
	return slices.ContainsFunc(rules, func(r rule) bool {
		return is(&r) && slices.ContainsFunc(r.conditions, func(c condition) bool { return c.on == on && !c.negated && !c.wildcard && c.name == link })
	})
}
