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

// adminComment is that of the rule that calls the operator's chain.
const adminComment = "tombolo: the operator's rules first"

// checkAdmin refuses a name that iptables would not take.
func checkAdmin(name string) error {
	const maxLen = 28
	wrong := len(name) > maxLen || name != "" && (name[0] == '-' || name[0] == '!')
	for i := range len(name) {
		wrong = wrong || !isAlphanumeric(name[i]) && name[i] != '-' && name[i] != '_'
	}
	if wrong {
		return fmt.Errorf("%w: %q cannot be a chain of iptables", tombolo.ErrInvalid, name)
	}
	return nil
}

// adminPlan is what there is of the operator's chain, and what to do.
type adminPlan struct {
	own         chain
	there       bool
	uses        int // its rules, and the rules that call it
	call        bool
	makeForward bool // where FORWARD is not there yet: the chain would not be called
}

func (c *Conn) getAdmin(b *nl.Batch, f *familyPlan) {
	if c.admin == "" {
		return
	}
	f.admin.own = chain{f.at.family, iptablesTable, c.admin}
	getChain(b, f.admin.own, func(data []byte) error {
		ch, err := nftnl.DecodeChain(data)
		f.admin.there, f.admin.uses = true, int(ch.Uses)
		return err
	})
}

// planAdmin has FORWARD call the operator's chain, as the reference's plugin firewall does, unless any rule calls
// it already. Where there is no FORWARD, it makes that if the chain is there, and no chain otherwise.
func (c *Conn) planAdmin(ctx context.Context, f *familyPlan) error {
	a := &f.admin
	if c.admin == "" || f.there && !f.hooked || !f.there && !a.there {
		return nil
	}
	a.call, a.makeForward = true, !f.there
	for i := range f.rules {
		if f.rules[i].target == c.admin {
			a.call = false
		}
	}
	if !a.call || !a.there {
		return nil
	}
	rules, err := c.rulesOf(ctx, a.own, &packet{})
	a.call = a.uses <= len(rules)
	return err
}

func (a *adminPlan) make(t *nftnl.Transaction, forward chain) {
	if !a.call {
		return
	}
	if a.makeForward {
		hook := nftnl.Nest(unix.NFTA_CHAIN_HOOK, nftnl.Uint32(unix.NFTA_HOOK_HOOKNUM, unix.NF_INET_FORWARD), nftnl.Uint32(unix.NFTA_HOOK_PRIORITY, 0))
		attrs := append(forward.named(unix.NFTA_CHAIN_NAME), hook, nftnl.Uint32(unix.NFTA_CHAIN_POLICY, policyAccept), nftnl.String(unix.NFTA_CHAIN_TYPE, "filter"))
		t.Add("make", forward, forward.family, unix.NFT_MSG_NEWCHAIN, netlink.Create, attrs...)
	}
	if !a.there {
		t.Add("make", a.own, forward.family, unix.NFT_MSG_NEWCHAIN, netlink.Create, a.own.named(unix.NFTA_CHAIN_NAME)...)
	}
	t.AddRule("insert a jump to "+a.own.name+" into", forward, forward.family, 0, adminComment, func(x *nftnl.Expressions) {
		x.Add(&expr.Counter{})
		x.Add(&expr.Verdict{Kind: expr.VerdictJump, Chain: a.own.name})
	}, forward.named(unix.NFTA_RULE_CHAIN)...)
}

func (a *adminPlan) differences(forward chain) []tombolo.Difference {
	if !a.call {
		return nil
	}
	return []tombolo.Difference{{Object: forward.String(), What: "rule", Want: fmt.Sprintf("%q, which calls %s,", adminComment, a.own.name)}}
}
