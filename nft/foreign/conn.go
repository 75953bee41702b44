package foreign

import (
	"cmp"
	"context"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Config configures a Conn. A nil Config and a zero field mean the defaults.
type Config struct {
	// Mark and Table have the meaning and the defaults of the fields of nft.Config.
	Mark  uint32
	Table string
	// AdminChain is the name of an operator's chain that iptables must call first for forwarded packets, or "" for
	// none. If the chain FORWARD exists, Ensure creates a missing AdminChain.
	AdminChain string
}

// Conn examines the firewalls of other programs, and maintains our rules in iptables. Several goroutines and
// processes may use it at the same time. Errors from the kernel are, or wrap, a *tombolo.OpError.
type Conn struct {
	nl       *nl.Conn
	verified *nftnl.Verified
	mark     uint32
	table    string
	admin    string
	err      error // an invalid Config
}

// On returns a Conn that uses an open connection. The connection's owner still has to close it. If s is the Socket of
// an nft.Conn, Ready is faster, since this Socket remembers the generation of nf_tables.
func On(s tombolo.Socket, cfg *Config) *Conn {
	if cfg == nil {
		cfg = &Config{}
	}
	socket := nftnl.Of(s)
	return &Conn{
		nl: socket.Conn, verified: socket.Verified,
		mark: cmp.Or(cfg.Mark, nftnl.DefaultMark), table: cmp.Or(cfg.Table, nftnl.DefaultTable),
		admin: cfg.AdminChain, err: nftnl.CheckTable(cfg.Table, cfg.Mark),
	}
}

// chain identifies a chain in another program's table.
type chain struct {
	family      uint8 // unix.NFPROTO_*
	table, name string
}

// String returns the chain's name for errors and differences.
func (ch chain) String() string {
	return "chain " + ch.name + " of table " + nftnl.FamilyName(ch.family) + " " + ch.table
}

// named returns the attributes with the names of the table and the chain. The parameter attribute is the type of the
// chain's attribute, which depends on the message. The table's attribute is 1 in all messages.
func (ch chain) named(attribute uint16) []netlink.Attribute {
	return []netlink.Attribute{nftnl.String(unix.NFTA_CHAIN_TABLE, ch.table), nftnl.String(attribute, ch.name)}
}

// getChain appends a request for a chain to b. reply is called with the chain, if it exists.
func getChain(b *nl.Batch, ch chain, reply func(nftnl.Chain)) {
	nftnl.Get(b, ch, ch.family, unix.NFT_MSG_GETCHAIN, func(data []byte) error {
		reply(nftnl.DecodeChain(data))
		return nil
	}, ch.named(unix.NFTA_CHAIN_NAME)...)
}

// rulesOf returns the rules of a chain, evaluated for the packet p. It evaluates our own rules for their own bridge.
// If the chain does not exist, the result is empty.
func (c *Conn) rulesOf(ctx context.Context, ch chain, p *packet) ([]rule, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}

	var rules []rule
	err := nftnl.List(c.nl, "list rules of "+ch.String(), ch.family, unix.NFT_MSG_GETRULE, func(data []byte) error {
		r := decodeRule(data, p)
		if own, ok := strings.CutPrefix(r.comment, c.comment()); ok {
			// If the rule is ours, evaluate it for the packets of its own bridge.
			assumed := packet{mark: p.mark, known: p.known}
			_, assumed.link, _ = strings.Cut(own, fromBridge)
			_, assumed.to, _ = strings.Cut(own, toBridge)
			r = decodeRule(data, &assumed)
			r.ours = true
		}

		rules = append(rules, r)
		return nil
	}, ch.named(unix.NFTA_RULE_CHAIN)...)

	return rules, err
}

// read reads the rules of the base chain at into b.rules. It also sets b.chain to a function that reads the rules of
// a called chain at its first use. b.err records an error.
func (c *Conn) read(ctx context.Context, b *base, at chain, p *packet) {
	read := map[string][]rule{}
	b.chain = func(name string) []rule {
		if _, ok := read[name]; !ok && b.err == nil {
			read[name], b.err = c.rulesOf(ctx, chain{at.family, at.table, name}, p)
		}
		return read[name]
	}
	b.rules = b.chain(at.name)
}

// isForwardHook reports whether ch is a filter chain for forwarded packets.
func isForwardHook(ch nftnl.Chain) bool {
	return ch.Kind == "filter" && ch.Hook == unix.NF_INET_FORWARD
}

const policyAccept = uint32(expr.VerdictAccept)

// policyOf returns the policy of a base chain as a verdict.
func policyOf(ch nftnl.Chain) verdict {
	if ch.Policy == policyAccept {
		return accepts
	}
	return drops
}
