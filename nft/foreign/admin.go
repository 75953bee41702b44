package foreign

import (
	"context"
	"fmt"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// adminComment is that of the rule that EnsureAdmin makes.
const adminComment = "tombolo: the operator's rules first"

// EnsureAdmin has iptables, where it works over nf_tables, call a chain of the operator's before all
// others that see what is forwarded, as the reference's plugin firewall does: in its tables filter, for
// IPv4 and for IPv6. A chain of that name that any rule calls is left as it is; one that is not there is
// made. It makes no table and no chain FORWARD. A name that iptables would not take is ErrInvalid.
func (c *Conn) EnsureAdmin(ctx context.Context, name string) (changed bool, _ error) {
	if err := c.usable(ctx); err != nil {
		return false, err
	}
	if name == "" || len(name) > referenceChain || name[0] == '-' || name[0] == '!' {
		return false, fmt.Errorf("%w: %q cannot be a chain of iptables", tombolo.ErrInvalid, name)
	}
	for i := range len(name) {
		if !isAlphanumeric(name[i]) && name[i] != '-' && name[i] != '_' {
			return false, fmt.Errorf("%w: %q cannot be a chain of iptables", tombolo.ErrInvalid, name)
		}
	}
	return c.change(ctx, func(t *nftnl.Transaction, family uint8) error { return c.planAdmin(ctx, t, family, name) })
}

// change commits at once what is planned for each family, and plans anew if others were faster.
func (c *Conn) change(ctx context.Context, plan func(*nftnl.Transaction, uint8) error) (changed bool, _ error) {
	err := nftnl.Retry(ctx, func() error {
		generation, err := nftnl.SeenGeneration(c.nl)
		if err != nil {
			return err
		}
		t := nftnl.Begin(&generation)
		for _, f := range families() {
			if err := plan(t, f.proto); err != nil {
				return err
			}
		}
		if changed = !t.Empty(); !changed {
			return nil
		}
		return t.Commit(c.nl)
	})
	return changed && err == nil, err
}

// planAdmin adds what a family lacks.
func (c *Conn) planAdmin(ctx context.Context, t *nftnl.Transaction, family uint8, name string) error {
	forward, own := chain{family, iptablesTable, iptablesForward}, chain{family, iptablesTable, name}
	var b nl.Batch
	hooked, there := false, false
	getChain(&b, forward, func(data []byte) error {
		ch, err := nftnl.DecodeChain(data)
		hooked = isForwardHook(ch)
		return err
	})
	getChain(&b, own, func([]byte) error { there = true; return nil })
	if err := nftnl.Look(c.nl, &b); err != nil || !hooked {
		return err
	}
	if !there {
		t.Add("make", own, family, unix.NFT_MSG_NEWCHAIN, netlink.Create, own.named(unix.NFTA_CHAIN_NAME)...)
	} else {
		all, err := c.rulesIn(ctx, family, iptablesTable)
		if err != nil {
			return err
		}
		for _, rules := range all {
			for i := range rules {
				if rules[i].target == name {
					return nil
				}
			}
		}
	}
	t.AddRule("insert a jump to "+name+" into", forward, family, 0, adminComment, func(x *nftnl.Expressions) {
		x.Add(&expr.Counter{})
		x.Add(&expr.Verdict{Kind: expr.VerdictJump, Chain: name})
	}, forward.named(unix.NFTA_RULE_CHAIN)...)
	return nil
}
