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

// Config configures a Conn. A nil Config and a zero field mean the defaults of package nft's Config.
type Config struct {
	// Mark and Table are the fields of package nft's Config.
	Mark  uint32
	Table string
	// AdminChain is an operator's chain that iptables calls before all others for forwarded packets; empty for none.
	// Ensure creates it if it is missing and the chain FORWARD exists.
	AdminChain string
}

// Conn reads the firewalls of other programs, and maintains two rules for each of our bridges in iptables. Several
// goroutines and processes may use it at once. Errors of the kernel are a *tombolo.OpError, or wrap one.
type Conn struct {
	nl    *nl.Conn
	seen  *nftnl.Seen
	mark  uint32
	table string
	admin string
	err   error // an invalid Config
}

// On returns a Conn over an open connection, which still belongs to its owner. With the Socket of package nft's Conn,
// Ready costs less, since that Socket remembers the firewall's generation.
func On(s tombolo.Socket, cfg *Config) *Conn {
	if cfg == nil {
		cfg = &Config{}
	}
	socket := nftnl.Of(s)
	return &Conn{
		nl: socket.Conn, seen: socket.Seen,
		mark: cmp.Or(cfg.Mark, nftnl.DefaultMark), table: cmp.Or(cfg.Table, nftnl.DefaultTable),
		admin: cfg.AdminChain, err: nftnl.CheckTable(cfg.Table, cfg.Mark),
	}
}

// chain is a chain in another program's table.
type chain struct {
	family      uint8 // unix.NFPROTO_*
	table, name string
}

// String returns the chain's name for errors and differences.
func (ch chain) String() string {
	return "chain " + ch.name + " of table " + nftnl.FamilyName(ch.family) + " " + ch.table
}

// named returns the attributes that name the table and the chain. The table's attribute is 1 in all kinds of
// messages.
func (ch chain) named(attribute uint16) []netlink.Attribute {
	return []netlink.Attribute{nftnl.String(unix.NFTA_CHAIN_TABLE, ch.table), nftnl.String(attribute, ch.name)}
}

// getChain appends a request for a chain to a batch. reply receives the chain.
func getChain(b *nl.Batch, ch chain, reply func(nftnl.Chain)) {
	nftnl.Get(b, ch, ch.family, unix.NFT_MSG_GETCHAIN, func(data []byte) error {
		reply(nftnl.DecodeChain(data))
		return nil
	}, ch.named(unix.NFTA_CHAIN_NAME)...)
}

// rulesOf returns the rules of a chain, or none if it does not exist.
func (c *Conn) rulesOf(ctx context.Context, ch chain, p *packet) ([]rule, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}

	var rules []rule
	err := nftnl.List(c.nl, "list rules of "+ch.String(), ch.family, unix.NFT_MSG_GETRULE, func(data []byte) error {
		r := decodeRule(data, p)
		if own, ok := strings.CutPrefix(r.comment, c.comment()); ok {
			// Judge a rule of ours by the packets of its own bridge.
			about := packet{mark: p.mark, known: p.known}
			_, about.link, _ = strings.Cut(own, fromBridge)
			_, about.to, _ = strings.Cut(own, toBridge)
			r = decodeRule(data, &about)
			r.ours = true
		}

		rules = append(rules, r)
		return nil
	}, ch.named(unix.NFTA_RULE_CHAIN)...)

	return rules, err
}

// read reads a base chain. It reads the chains that this one calls only when they are needed.
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

// isForwardHook reports whether a chain sees forwarded packets.
func isForwardHook(ch nftnl.Chain) bool {
	return ch.Kind == "filter" && ch.Hook == unix.NF_INET_FORWARD
}

const policyAccept = uint32(expr.VerdictAccept)

// policyOf returns the policy of a base chain.
func policyOf(ch nftnl.Chain) verdict {
	if ch.Policy == policyAccept {
		return accepts
	}
	return drops
}
