package guard

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Lengths in bytes, of parts of keys and of the keys of sets.
const (
	ifnameLen = nftnl.IfnameLen
	etherLen  = nftnl.EtherLen
	etherSlot = nftnl.EtherSlot
	addr4Len  = nftnl.IPv4Len
	addr6Len  = nftnl.IPv6Len
	pods4Len  = ifnameLen + addr4Len
	pods6Len  = ifnameLen + addr6Len
	portsLen  = ifnameLen + etherSlot
)

// Set is a plain hash set.
type Set struct {
	Name    string
	KeyType uint32 // nft's number of the type, six bits for each part of a concatenation
	KeyLen  uint32 // bytes
	// Userdata is for nft, where the type does not say enough: its typeof.
	Userdata []byte
}

// Chain is a base chain of the bridge family, of type filter and with policy accept.
type Chain struct {
	Name     string
	Hook     uint32 // NF_BR_*
	Priority int32
	// Settings says in short what the rules depend on.
	Settings string
	// Rules makes them.
	Rules func() []Rule
}

// Rule is one of a chain. Its comment is the chain's only one of that text.
type Rule struct {
	Comment string
	Steps   []expr.Any
}

// The bridge's hooks have the numbers of the others' (uapi linux/netfilter_bridge.h).
const (
	bridgePreRouting = unix.NF_INET_PRE_ROUTING
	bridgeInput      = unix.NF_INET_LOCAL_IN // what the bridge hands to the host
	bridgeForward    = unix.NF_INET_FORWARD  // what it forwards to each of its ports
)

const (
	// Before other tables, and before bridged packets are shown to iptables.
	priorityGuard = -300
	// The others are right behind the guard, in this order.
	priorityUntrusted = priorityGuard + 1
	priorityFromPods  = priorityUntrusted + 1

	priorityBridged = -200 // "filter", by nft's names for the family
)

// Everyone gives the chains for all ports whose names begin with "veth", guarded or not.
func Everyone() []Chain {
	return []Chain{
		{"groups", bridgePreRouting, priorityGuard, "link-local groups", by((*rules).addGroups)},
		{"groups-input", bridgeInput, priorityGuard, "link-local groups", by((*rules).addGroups)},
		{"from-pods", bridgePreRouting, priorityFromPods, "tags, queries", by((*rules).addFromPods)},
	}
}

// Guarded gives the chains for the ports that have Elements.
func Guarded() []Chain {
	return []Chain{
		{"guard", bridgePreRouting, priorityGuard, "spoof guard, or MAC alone", by((*rules).addGuard)},
		{"untrusted", bridgePreRouting, priorityUntrusted, "hosts only", by((*rules).addUntrusted)},
	}
}

// rules are those of a chain, in their order.
type rules []Rule

// add appends a rule.
func (list *rules) add(comment string, write func(expressions)) {
	*list = append(*list, Rule{comment, nftnl.Collect(func(x *nftnl.Expressions) { write(expressions{x}) })})
}

func by(write func(*rules)) func() []Rule {
	return func() []Rule {
		var list rules
		write(&list)
		return list
	}
}

// expressions are the steps of a rule.
type expressions struct{ *nftnl.Expressions }
