package foreign

import (
	"context"
	"fmt"
	"strconv"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// chain is a chain of another program's table.
type chain struct {
	family uint8 // unix.NFPROTO_*
	table  string
	name   string
}

// String is how errors and differences name it.
func (ch chain) String() string {
	return "chain " + ch.name + " of table " + nftnl.FamilyName(ch.family) + " " + ch.table
}

// handle names a rule of such a chain by its handle, which no other rule gets
// as long as the table lives.
type handle struct {
	chain
	handle uint64
}

func (h handle) String() string {
	return "rule " + strconv.FormatUint(h.handle, 10) + " of " + h.chain.String()
}

// named gives the attributes that say which table and which chain is meant, the latter by its
// attribute in the message's kind. The table's is 1 in all of them.
func (ch chain) named(attribute uint16) []netlink.Attribute {
	return []netlink.Attribute{nftnl.String(unix.NFTA_CHAIN_TABLE, ch.table), nftnl.String(attribute, ch.name)}
}

func getChain(b *nl.Batch, ch chain, reply func([]byte) error) {
	nftnl.Get(b, ch, ch.family, unix.NFT_MSG_GETCHAIN, reply, ch.named(unix.NFTA_CHAIN_NAME)...)
}

// rulesIn lists the rules of a table by chains, or of one chain if it has a name; none if it is not there.
func (c *Conn) rulesIn(ctx context.Context, of chain, p *packet) (map[string][]rule, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	op, attrs := "list rules of "+of.String(), of.named(unix.NFTA_RULE_CHAIN)
	if of.name == "" {
		op, attrs = fmt.Sprintf("list rules of table %s %s", nftnl.FamilyName(of.family), of.table), attrs[:1]
	}
	chains := map[string][]rule{}
	err := nftnl.List(c.nl, op, of.family, unix.NFT_MSG_GETRULE, func(data []byte) error {
		r, err := decodeRule(of.family, data, p)
		r.ours = r.comment == c.comment()
		chains[r.chain] = append(chains[r.chain], r)
		return err
	}, attrs...)
	return chains, err
}

// rulesOf lists the rules of one chain.
func (c *Conn) rulesOf(ctx context.Context, ch chain, p *packet) ([]rule, error) {
	chains, err := c.rulesIn(ctx, ch, p)
	return chains[ch.name], err
}

func delRule(t *nftnl.Transaction, h handle) {
	t.Add("delete", h, h.family, unix.NFT_MSG_DELRULE, 0,
		append(h.named(unix.NFTA_RULE_CHAIN), nftnl.Uint64(unix.NFTA_RULE_HANDLE, h.handle))...)
}

// isForwardHook says that a chain sees what is forwarded.
func isForwardHook(ch nftnl.Chain) bool {
	return ch.Kind == "filter" && ch.Hook == unix.NF_INET_FORWARD
}
