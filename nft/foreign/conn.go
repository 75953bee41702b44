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

// Config says what is asked of the firewalls of others. The zero value, and nil, mean what package nft's Config
// means by none.
type Config struct {
	// Mark and Table are those of package nft's Config.
	Mark  uint32
	Table string
	// AdminChain is a chain of the operator's that iptables is to call before all others that see what is
	// forwarded; empty is none. It is made where it is not there, and FORWARD is.
	AdminChain string
}

// Conn looks at the firewalls of others, and has two rules for each of our bridges in some. Its methods may be called from several goroutines
// and processes at once. Errors of the kernel are *tombolo.OpError, or wrap one.
type Conn struct {
	nl    *nl.Conn
	seen  *nftnl.Seen
	mark  uint32
	table string
	admin string
	err   error // of what it was opened with
}

// On works over a connection that is open already, and that its owner closes. With the Socket of package nft's
// Conn, Ready costs less, since that remembers the firewall's generation.
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

// chain is a chain of another program's table.
type chain struct {
	family      uint8 // unix.NFPROTO_*
	table, name string
}

// String is how errors and differences name it.
func (ch chain) String() string {
	return "chain " + ch.name + " of table " + nftnl.FamilyName(ch.family) + " " + ch.table
}

// named gives the attributes that say which table and which chain is meant. The table's is 1 in all kinds of messages.
func (ch chain) named(attribute uint16) []netlink.Attribute {
	return []netlink.Attribute{nftnl.String(unix.NFTA_CHAIN_TABLE, ch.table), nftnl.String(attribute, ch.name)}
}

func getChain(b *nl.Batch, ch chain, reply func(nftnl.Chain)) {
	nftnl.Get(b, ch, ch.family, unix.NFT_MSG_GETCHAIN, func(data []byte) error {
		reply(nftnl.DecodeChain(data))
		return nil
	}, ch.named(unix.NFTA_CHAIN_NAME)...)
}

// rulesOf lists the rules of a chain; none if it is not there.
func (c *Conn) rulesOf(ctx context.Context, ch chain, p *packet) ([]rule, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var rules []rule
	err := nftnl.List(c.nl, "list rules of "+ch.String(), ch.family, unix.NFT_MSG_GETRULE, func(data []byte) error {
		r := decodeRule(data, p)
		if own, ok := strings.CutPrefix(r.comment, c.comment()); ok {
			// Ours is judged by packets of its bridge.
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

// read reads a base chain, and those that it calls when they are asked for.
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

// isForwardHook says that a chain sees what is forwarded.
func isForwardHook(ch nftnl.Chain) bool {
	return ch.Kind == "filter" && ch.Hook == unix.NF_INET_FORWARD
}

const policyAccept = uint32(expr.VerdictAccept)

// policyOf is how a chain ends.
func policyOf(ch nftnl.Chain) verdict {
	if ch.Policy == policyAccept {
		return accepts
	}
	return drops
}
