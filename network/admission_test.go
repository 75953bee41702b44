package network_test

import (
	"testing"

	"github.com/tombolo-cni/tombolo/nft"
)

func TestABrokenAdmissionIsNamedAndMended(t *testing.T) {
	const (
		policy       = "iptables -P FORWARD DROP; ip6tables -P FORWARD DROP; iptables -N ADMIN; ip6tables -N ADMIN\n"
		four, six    = "chain FORWARD of table ip filter: rule ", "chain FORWARD of table ip6 filter: rule "
		admit, admin = `"tombolo: admit what table inet tombolo marks from cbr0" `, `"tombolo: the operator's rules first", which calls ADMIN, is missing [repair]`
		second       = `"tombolo: admit what table inet tombolo marks to cbr0" `
		gone         = "for mark 0x10 is missing [repair]"
		accepts      = "iptables -A FORWARD -m mark --mark 0x10/0x10 -m comment --comment 'tombolo: admit what table inet tombolo marks from cbr0' -j ACCEPT"
		drops        = "nft 'add table inet fw; add chain inet fw f { type filter hook forward priority 5; policy drop; }'"
		mangled      = "iptables -t mangle -P FORWARD DROP"
		helps        = "; this helps: "
		f            = "chain f of table inet fw drops, by its policy, what pods send" + helps
		own          = "chain FORWARD of table ip filter drops or rejects, by its rule number 2, which is left to its owner, what pods send" + helps
		mangle       = "chain FORWARD of table ip mangle drops, by its policy, what pods send" + helps
		passF        = "nft add rule inet fw f 'meta mark & 0x10 == 0x10 counter accept'"
		passMangle   = "iptables -t mangle -A FORWARD -i cbr0 -j ACCEPT && iptables -t mangle -A FORWARD -o cbr0 -m conntrack --ctstate ESTABLISHED,RELATED,DNAT -j ACCEPT"
	)
	then := func(n *node) error {
		return n.Change(n.made.Key).Admit(n.Context(), nft.Open, "ADMIN")
	}
	table{keeper: lackingRules, before: policy, then: then, faults: map[string]fault{
		"our rules":                 {on: "iptables -F FORWARD", says: four + admit + gone + "\n" + four + second + gone + "\n" + four + admin},
		"our IPv6 rules":            {on: "ip6tables -F FORWARD", says: six + admit + gone + "\n" + six + second + gone + "\n" + six + admin},
		"the operator's chain last": {on: "iptables -D FORWARD 1; iptables -A FORWARD -j ADMIN", says: "", stays: "iptables -A FORWARD -j ADMIN"},
		"another's drop is ahead":   {on: "iptables -I FORWARD 2 -j DROP", says: own + "iptables -D FORWARD 2 [configuration]", undo: "iptables -D FORWARD -j DROP", hidden: true, unseen: true, stays: "iptables -A FORWARD -j DROP"},
		"all is accepted":           {on: "iptables -A FORWARD -j ACCEPT", says: four + admit + "with handle 3 does not belong there [repair]", stays: "iptables -A FORWARD -j ACCEPT"},
		"another of ours":           {on: accepts, says: four + admit + "with handle 6 does not belong there [repair]"},
		"another table drops":       {on: drops, says: f + passF + " [configuration]", undo: passF, hidden: true, unseen: true, stays: drops},
		"another hook drops":        {on: mangled, says: mangle + passMangle + " [configuration]", undo: passMangle, hidden: true, unseen: true, stays: mangled},
	}}.run(t)
}
