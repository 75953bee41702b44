package foreign

import (
	"context"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// ReferencePod is an attachment as the reference plugins know it.
type ReferencePod struct {
	Network, ContainerID, IfName string
	// Addresses are those that the plugin firewall was given; it names a pod by nothing else.
	Addresses []netip.Addr
}

// ReferencePart is what one of the reference plugins has in the firewall for a pod.
type ReferencePart uint8

// The parts; a sum of them means all of these.
const (
	ReferenceMasquerade ReferencePart = 1 << iota // of bridge and ptp
	ReferenceHostPorts                            // of portmap
	ReferenceForward                              // of firewall
)

// RemoveReference deletes the rules that the reference plugins (containernetworking/plugins, up to
// v1.9.1) have for a pod, as their own DEL would: in tables of iptables, where these are nf_tables,
// and in those of their backend "nftables". Chains that they share among pods stay, and one of the pod's
// that a rule or a map of somebody else's leads to stays without rules.
// Rules of legacy iptables are none of nf_tables' and stay too. It says whether there were any; that
// there are none is no error.
func (c *Conn) RemoveReference(ctx context.Context, pod *ReferencePod, parts ReferencePart) (removed bool, _ error) {
	if err := c.usable(ctx); err != nil {
		return false, err
	}
	if pod == nil {
		pod = &ReferencePod{}
	}
	removed, err := c.removeReference(ctx, pod, parts, false)
	if errors.Is(err, unix.EBUSY) {
		removed, err = c.removeReference(ctx, pod, parts, true)
	}
	return removed, err
}

func (c *Conn) removeReference(ctx context.Context, pod *ReferencePod, parts ReferencePart, keepChains bool) (removed bool, _ error) {
	err := nftnl.Retry(ctx, func() error {
		generation, err := nftnl.SeenGeneration(c.nl)
		if err != nil {
			return err
		}
		r := referenceRemoval{Conn: c, t: nftnl.Begin(&generation), network: pod.Network, keepChains: keepChains}
		for _, f := range families() {
			if err := r.plan(ctx, f, pod, parts); err != nil {
				return err
			}
		}
		if parts&ReferenceMasquerade != 0 {
			err := r.rules(ctx, unix.NFPROTO_INET, "cni_plugins_masquerade", func(rule *namedRule) bool {
				return strings.HasPrefix(rule.comment, pod.instance())
			})
			if err != nil {
				return err
			}
		}
		if removed = !r.t.Empty(); !removed {
			return nil
		}
		return r.t.Commit(c.nl)
	})
	return removed && err == nil, err
}

// referenceRemoval is a transaction that deletes them.
type referenceRemoval struct {
	*Conn
	t          *nftnl.Transaction
	network    string // which comments of the plugins name
	keepChains bool   // without rules, since somebody else's lead there
}

// plan adds what there is in the tables of one family.
func (r *referenceRemoval) plan(ctx context.Context, family uint8, pod *ReferencePod, parts ReferencePart) error {
	chains := map[ReferencePart]string{ReferenceMasquerade: "CNI-", ReferenceHostPorts: "CNI-DN-"}
	for _, part := range []ReferencePart{ReferenceMasquerade, ReferenceHostPorts} {
		if parts&part == 0 {
			continue
		}
		if err := r.chain(ctx, chain{family, "nat", pod.chain(chains[part])}); err != nil {
			return err
		}
	}
	if parts&ReferenceHostPorts != 0 {
		// The plugin knows them by the container alone.
		if err := r.rules(ctx, family, "cni_hostport", func(rule *namedRule) bool { return pod.ContainerID != "" && rule.comment == pod.ContainerID }); err != nil {
			return err
		}
	}
	if parts&ReferenceForward == 0 || len(pod.Addresses) == 0 {
		return nil
	}
	own := chain{family, iptablesTable, "CNI-FORWARD"}
	all, err := r.namedRulesIn(ctx, own.family, own.table)
	rules := all[own.name]
	for i := range rules {
		if pod.letIn(&rules[i]) {
			delRule(r.t, handle{own, rules[i].handle})
		}
	}
	return err
}

// ReferencePublished gives what the reference's plugin portmap makes 127.0.0.1 lead to, in iptables over nf_tables or by
// its backend "nftables": the IPv4 addresses of pods, or the subnets that these are in.
func (c *Conn) ReferencePublished(ctx context.Context) ([]netip.Prefix, error) {
	if err := c.usable(ctx); err != nil {
		return nil, err
	}
	var list []netip.Prefix
	for _, table := range []string{"nat", "cni_hostport"} {
		chains, err := c.namedRulesIn(ctx, unix.NFPROTO_IPV4, table)
		if err != nil {
			return nil, err
		}
		for name, rules := range chains {
			if table == "nat" && !strings.HasPrefix(name, "CNI-DN-") {
				continue
			}
			for _, r := range rules {
				for _, cond := range r.conditions {
					// Beside 127.0.0.1, a pod that calls its own port has another source address.
					if cond.source && !cond.negated && cond.prefix.Bits() > 0 && !cond.prefix.Addr().IsLoopback() {
						list = append(list, cond.prefix)
					}
				}
			}
		}
	}
	return list, nil
}

// rules deletes those of a table that are the pod's.
func (r *referenceRemoval) rules(ctx context.Context, family uint8, table string, isPods func(*namedRule) bool) error {
	all, err := r.namedRulesIn(ctx, family, table)
	for name, rules := range all {
		for i := range rules {
			if isPods(&rules[i]) {
				delRule(r.t, handle{chain{family, table, name}, rules[i].handle})
			}
		}
	}
	return err
}

// chain deletes a chain of the pod's own, its rules, and first those of the plugins that lead there.
func (r *referenceRemoval) chain(ctx context.Context, own chain) error {
	// The table may be large, and most pods have no such chain.
	there := false
	var b nl.Batch
	getChain(&b, own, func([]byte) error { there = true; return nil })
	if err := nftnl.Look(r.nl, &b); err != nil || !there {
		return err
	}
	all, err := r.namedRulesIn(ctx, own.family, own.table)
	if err != nil {
		return err
	}
	for name, rules := range all {
		for _, one := range rules {
			if one.target == own.name && name != own.name && strings.Contains(one.comment, r.network) {
				delRule(r.t, handle{chain{own.family, own.table, name}, one.handle})
			}
		}
	}
	for _, one := range all[own.name] {
		delRule(r.t, handle{own, one.handle})
	}
	if r.keepChains {
		return nil
	}
	r.t.Add("delete", own, own.family, unix.NFT_MSG_DELCHAIN, 0, own.named(unix.NFTA_CHAIN_NAME)...)
	return nil
}

const referenceChain = 28 // bytes of a chain's name

// chain is the name of the pod's own chain: a prefix, and so much of a hash as has room.
func (p *ReferencePod) chain(prefix string) string {
	return prefix + referenceHash(p.Network + p.ContainerID)[:referenceChain-len(prefix)]
}

// instance is what the comments of the pod's rules for masquerade begin with.
func (p *ReferencePod) instance() string {
	const length = 16
	return referenceHash(p.Network)[:length] + "-" + referenceHash(p.IfName + ":" + p.ContainerID)[:length]
}

func referenceHash(text string) string {
	sum := sha512.Sum512([]byte(text))
	return hex.EncodeToString(sum[:])
}

// letIn says that a rule accepts what one of the pod's addresses sends, or is answered.
func (p *ReferencePod) letIn(r *namedRule) bool {
	if r.verdict != accepts {
		return false
	}
	for _, c := range r.conditions {
		if !c.negated && c.prefix.IsSingleIP() && slices.Contains(p.Addresses, c.prefix.Addr()) {
			return true
		}
	}
	return false
}
