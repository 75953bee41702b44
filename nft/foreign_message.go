package nft

import (
	"context"
	"encoding/binary"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// foreignChain is a chain of somebody else's table.
type foreignChain struct {
	family uint8 // unix.NFPROTO_*
	table  string
	name   string
}

// String is how errors and differences name it.
func (ch foreignChain) String() string {
	return "chain " + ch.name + " of table " + familyName(ch.family) + " " + ch.table
}

// foreignHandle names a rule of such a chain by its handle, which no other rule gets
// as long as the table lives.
type foreignHandle struct {
	foreignChain
	handle uint64
}

func (h foreignHandle) String() string {
	return "rule " + strconv.FormatUint(h.handle, 10) + " of " + h.foreignChain.String()
}

func (h foreignHandle) body(e *nl.Encoder) {
	e.String(unix.NFTA_RULE_TABLE, h.table)
	e.String(unix.NFTA_RULE_CHAIN, h.name)
	e.Uint64BE(unix.NFTA_RULE_HANDLE, h.handle)
}

func getForeignChain(b *nl.Batch, ch foreignChain, reply func([]byte) error) {
	get(b, ch, ch.family, unix.NFT_MSG_GETCHAIN, func(e *nl.Encoder) {
		e.String(unix.NFTA_CHAIN_TABLE, ch.table)
		e.String(unix.NFTA_CHAIN_NAME, ch.name)
	}, reply)
}

// foreignRules lists the rules of a table by chains; none if there is no such table.
func (c *Conn) foreignRules(ctx context.Context, family uint8, table string) (map[string][]foreignRule, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	chains := map[string][]foreignRule{}
	op := fmt.Sprintf("list rules of table %s %s", familyName(family), table)
	err := c.dump(op, family, unix.NFT_MSG_GETRULE, func(e *nl.Encoder) {
		e.String(unix.NFTA_RULE_TABLE, table)
	}, func(data []byte) error {
		r, err := decodeForeignRule(family, data)
		if err == nil {
			chains[r.chain] = append(chains[r.chain], r)
		}
		return err
	})
	return chains, err
}

// foreignRulesOf lists the rules of one chain; none if there is no such chain.
func (c *Conn) foreignRulesOf(ctx context.Context, ch foreignChain) ([]foreignRule, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var rules []foreignRule
	err := c.dump("list rules of "+ch.String(), ch.family, unix.NFT_MSG_GETRULE, func(e *nl.Encoder) {
		e.String(unix.NFTA_RULE_TABLE, ch.table)
		e.String(unix.NFTA_RULE_CHAIN, ch.name)
	}, func(data []byte) error {
		r, err := decodeForeignRule(ch.family, data)
		rules = append(rules, r)
		return err
	})
	return rules, err
}

// insertAdmission puts our rule into a chain.
func (t *transaction) insertAdmission(to *insertion, mark uint32) {
	op := fmt.Sprintf("insert rule %q into", admissionComment)
	flags := uint16(unix.NLM_F_CREATE)
	if to.before == 0 {
		flags |= unix.NLM_F_APPEND
	}
	t.add(op, to.into, to.into.family, unix.NFT_MSG_NEWRULE, flags, func(e *nl.Encoder) {
		e.String(unix.NFTA_RULE_TABLE, to.into.table)
		e.String(unix.NFTA_RULE_CHAIN, to.into.name)
		if to.before != 0 {
			e.Uint64BE(unix.NFTA_RULE_POSITION, to.before)
		}
		e.Nest(unix.NFTA_RULE_EXPRESSIONS, func(e *nl.Encoder) { expressions{e}.admission(mark) })
		e.Bytes(unix.NFTA_RULE_USERDATA, encodeComment(admissionComment))
	})
}

func (t *transaction) delForeignRule(h foreignHandle) {
	t.add("delete", h, h.family, unix.NFT_MSG_DELRULE, 0, h.body)
}

// isForwardHook says that a chain sees what is forwarded.
func (ch chainState) isForwardHook() bool {
	return ch.kind == "filter" && ch.hook == unix.NF_INET_FORWARD
}

// admission accepts what has all bits of a mark, in the words that iptables uses for
// it and therefore prints right: every rule of its has a counter.
func (x expressions) admission(mark uint32) {
	bits := binary.NativeEndian.AppendUint32(nil, mark)
	x.meta(unix.NFT_META_MARK, first)
	x.bitwise(bits, make([]byte, len(bits)))
	x.compare(unix.NFT_CMP_EQ, bits)
	x.add("counter", func(e *nl.Encoder) {
		e.Uint64BE(unix.NFTA_COUNTER_BYTES, 0)
		e.Uint64BE(unix.NFTA_COUNTER_PACKETS, 0)
	})
	x.add("immediate", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_IMMEDIATE_DREG, uint32(verdictRegister))
		e.Nest(unix.NFTA_IMMEDIATE_DATA, func(e *nl.Encoder) {
			e.Nest(unix.NFTA_DATA_VERDICT, func(e *nl.Encoder) { e.Uint32BE(unix.NFTA_VERDICT_CODE, policyAccept) })
		})
	})
}
