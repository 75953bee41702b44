package foreign

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// decodeRule reads an NFT_MSG_NEWRULE of a table of some family. What it does
// not know is a condition that may or may not be met.
func decodeRule(family uint8, b []byte) (rule, error) {
	var r rule
	err := nftnl.Decode(b, func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case unix.NFTA_RULE_CHAIN:
			r.chain = ad.String()
		case unix.NFTA_RULE_HANDLE:
			r.handle = ad.Uint64()
		case unix.NFTA_RULE_USERDATA:
			if comment, ok := nftnl.CommentOf(ad.Bytes()); ok {
				r.comment = comment
			}
		case unix.NFTA_RULE_EXPRESSIONS:
			reader := ruleReader{rule: &r, family: family, registers: map[uint32]loaded{}}
			return nftnl.Nested(ad, reader.expression)
		}
		return nil
	})
	return r, err
}

// ruleReader makes conditions and a verdict of a rule's expressions.
type ruleReader struct {
	rule      *rule
	family    uint8 // of the table or, where it is inet, of what met the conditions so far
	registers map[uint32]loaded
}

// loaded is what a register holds, as far as it is of interest.
type loaded struct {
	on   property
	mask []byte // of a bitwise and; nil is all
	// of an address, how long that is of which the bytes are the beginning
	addrLen int
}

// fields says where attributes are read to, by type: a number, a text, bytes, the bytes of a
// value, or whether there is one.
type fields []field

type field struct {
	typ  uint16
	into any
}

type value []byte

func (f fields) decode(b []byte) error { return nftnl.Decode(b, f.read) }

func (f fields) read(ad *netlink.AttributeDecoder) (err error) {
	for i := range f {
		if f[i].typ != ad.Type() {
			continue
		}
		switch into := f[i].into.(type) {
		case *uint32:
			*into = ad.Uint32()
		case *string:
			*into = ad.String()
		case *[]byte:
			*into = ad.Bytes()
		case *value:
			*into, err = nftnl.ValueOf(ad)
		case *bool:
			*into = true
		}
	}
	return err
}

// expression reads one: its name, then its own attributes.
func (rr *ruleReader) expression(ad *netlink.AttributeDecoder) error {
	var name string
	var own []byte
	if err := nftnl.Nested(ad, fields{{unix.NFTA_EXPR_NAME, &name}, {unix.NFTA_EXPR_DATA, &own}}.read); err != nil {
		return err
	}
	if err := rr.read(name, own); err != nil {
		return fmt.Errorf("expression %s: %w", name, err)
	}
	return nil
}

func (rr *ruleReader) read(name string, own []byte) error {
	switch name {
	case "meta":
		return rr.meta(own)
	case "payload":
		return rr.payload(own)
	case "bitwise":
		return rr.bitwise(own)
	case "cmp":
		return rr.compare(own)
	case "lookup":
		return rr.lookup(own)
	case "immediate":
		return rr.immediate(own)
	case "match":
		return rr.match(own)
	case "target":
		return rr.target(own)
	case "objref":
		return rr.object(own)
	case "reject":
		rr.rule.verdict = drops
	case "queue":
		rr.rule.verdict = queues
	case "counter", "log", "last":
	case "notrack", "dup", "flow_offload":
		rr.rule.alters = true
	case "ct", "exthdr", "dynset", "fib", "rt", "socket", "osf", "numgen", "hash", "xfrm", "tunnel", "inner",
		"range", "byteorder", "limit", "quota", "connlimit":
		return rr.lookElsewhere(name, own)
	default:
		// It may end the rule, or load any register.
		rr.rule.opaque = true
		rr.condition(condition{})
		clear(rr.registers)
	}
	return nil
}

// lookElsewhere is for expressions that load something, or compare it. Some write it, if
// they have a source.
func (rr *ruleReader) lookElsewhere(name string, b []byte) error {
	rr.condition(condition{})
	clear(rr.registers)
	source, known := map[string]uint16{"ct": unix.NFTA_CT_SREG, "exthdr": exthdrSource}[name]
	rr.rule.alters = rr.rule.alters || name == "dynset"
	err := nftnl.Decode(b, func(ad *netlink.AttributeDecoder) error {
		rr.rule.alters = rr.rule.alters || known && ad.Type() == source
		return nil
	})
	return err
}

const exthdrSource = 7 // NFTA_EXTHDR_SREG, Linux 4.13

func (rr *ruleReader) condition(c condition) { rr.rule.conditions = append(rr.rule.conditions, c) }

func (rr *ruleReader) meta(b []byte) error {
	var key, to uint32
	var writes bool
	err := fields{{unix.NFTA_META_KEY, &key}, {unix.NFTA_META_DREG, &to}, {unix.NFTA_META_SREG, &writes}}.decode(b)
	if err != nil || writes {
		rr.rule.alters = true
		return err
	}
	on := onOther
	switch expr.MetaKey(key) {
	case expr.MetaKeyMARK:
		on = onMark
	case expr.MetaKeyIIFNAME:
		on = onIn
	case expr.MetaKeyOIFNAME:
		on = onOut
	case expr.MetaKeyIIF:
		on = onIndex
	case expr.MetaKeyNFPROTO:
		on = onFamily
	}
	rr.registers[to] = loaded{on: on}
	return nil
}

// payload: source addresses, or the beginning of them, are known by where they are.
func (rr *ruleReader) payload(b []byte) error {
	var to, base, offset, length uint32
	var writes bool
	err := fields{
		{unix.NFTA_PAYLOAD_DREG, &to}, {unix.NFTA_PAYLOAD_BASE, &base}, {unix.NFTA_PAYLOAD_OFFSET, &offset},
		{unix.NFTA_PAYLOAD_LEN, &length}, {unix.NFTA_PAYLOAD_SREG, &writes},
	}.decode(b)
	if err != nil || writes {
		rr.rule.alters = true
		return err
	}
	l := loaded{}
	for _, f := range families() {
		if f.proto != rr.family || expr.PayloadBase(base) != expr.PayloadBaseNetworkHeader || length > f.addrLen {
			continue
		}
		switch offset {
		case f.src:
			l = loaded{on: onSource, addrLen: int(f.addrLen)}
		case f.src + f.addrLen:
			l = loaded{on: onDestination, addrLen: int(f.addrLen)}
		}
	}
	rr.registers[to] = l
	return err
}

// bitwise: an and with a mask is known, and nothing else.
func (rr *ruleReader) bitwise(b []byte) error {
	var from, to, op uint32
	var mask, xor value
	err := fields{
		{unix.NFTA_BITWISE_SREG, &from}, {unix.NFTA_BITWISE_DREG, &to}, {bitwiseOp, &op},
		{unix.NFTA_BITWISE_MASK, &mask}, {unix.NFTA_BITWISE_XOR, &xor},
	}.decode(b)
	l := rr.registers[from]
	if op != 0 || l.mask != nil || len(mask) == 0 || !zero(xor) {
		l = loaded{}
	}
	l.mask = mask
	rr.registers[to] = l
	return err
}

const bitwiseOp = 6 // NFTA_BITWISE_OP, Linux 5.6; 0 is and with a mask, xor

func zero(b []byte) bool { return strings.Trim(string(b), "\x00") == "" }

// compare makes a condition of what a register holds.
func (rr *ruleReader) compare(b []byte) error {
	var from, op uint32
	var data value
	err := fields{{unix.NFTA_CMP_SREG, &from}, {unix.NFTA_CMP_OP, &op}, {unix.NFTA_CMP_DATA, &data}}.decode(b)
	c := condition{}
	if op := expr.CmpOp(op); op == expr.CmpOpEq || op == expr.CmpOpNeq {
		c = rr.registers[from].equals(data)
		c.negated = op == expr.CmpOpNeq
	}
	if c.on == onFamily && !c.negated {
		rr.family = c.family
	}
	rr.condition(c)
	return err
}

// equals is the condition that what was loaded is the data.
func (l loaded) equals(data []byte) condition {
	other := condition{on: onOther}
	switch l.on {
	case onMark:
		mask := l.mask
		if mask == nil {
			mask = []byte{0xff, 0xff, 0xff, 0xff}
		}
		if len(data) == 4 && len(mask) == 4 {
			return condition{on: onMark, mark: binary.NativeEndian.Uint32(data), mask: binary.NativeEndian.Uint32(mask)}
		}
	case onIn, onOut:
		// nft compares the name and all that follows it, or with a wildcard only so far.
		name, _, whole := strings.Cut(string(data), "\x00")
		if l.mask == nil && name != "" {
			return condition{on: l.on, name: name, wildcard: !whole && len(data) < ifnameLen}
		}
	case onIndex:
		if l.mask == nil && len(data) == 4 {
			return condition{on: onIndex, index: binary.NativeEndian.Uint32(data)}
		}
	case onFamily:
		if l.mask == nil && len(data) == 1 {
			return condition{on: onFamily, family: data[0]}
		}
	case onSource, onDestination:
		if prefix, ok := prefixOf(data, l.mask, l.addrLen); ok {
			return condition{on: l.on, prefix: prefix}
		}
	}
	return other
}

// prefixOf makes a prefix of the beginning of an address and a mask; a nil mask is
// all of what there is.
func prefixOf(address, mask []byte, addrLen int) (netip.Prefix, bool) {
	if len(address) > addrLen || mask != nil && len(mask) != len(address) {
		return netip.Prefix{}, false
	}
	length := 8 * len(address)
	if mask != nil {
		ones, all := net.IPMask(mask).Size()
		if all == 0 && len(mask) > 0 {
			return netip.Prefix{}, false
		}
		length = ones
	}
	full := make([]byte, addrLen)
	copy(full, address)
	addr, ok := netip.AddrFromSlice(full)
	return netip.PrefixFrom(addr, length), ok
}

// lookup makes a condition of a set, or a verdict of a map.
func (rr *ruleReader) lookup(b []byte) error {
	c := condition{on: onSet}
	var flags, from uint32
	to := uint32(unix.NFT_REG_VERDICT) + 1 // it may have none
	err := fields{{unix.NFTA_LOOKUP_SET, &c.name}, {unix.NFTA_LOOKUP_SREG, &from}, {unix.NFTA_LOOKUP_FLAGS, &flags}, {unix.NFTA_LOOKUP_DREG, &to}}.decode(b)
	c.negated = flags&unix.NFT_LOOKUP_F_INV != 0
	l := rr.registers[from]
	if l.mask == nil {
		c.key = l.on
	}
	if to == unix.NFT_REG_VERDICT {
		rr.rule.verdict = varies
	}
	rr.condition(c)
	return err
}

// immediate gives the verdict; with data it loads a register.
func (rr *ruleReader) immediate(b []byte) error {
	var to uint32
	err := nftnl.Decode(b, func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case unix.NFTA_IMMEDIATE_DREG:
			to = ad.Uint32()
		case unix.NFTA_IMMEDIATE_DATA:
			return nftnl.Nested(ad, func(ad *netlink.AttributeDecoder) error {
				if ad.Type() != unix.NFTA_DATA_VERDICT {
					return nil
				}
				return nftnl.Nested(ad, rr.readVerdict)
			})
		}
		return nil
	})
	if to != unix.NFT_REG_VERDICT {
		rr.registers[to] = loaded{}
	}
	return err
}

func (rr *ruleReader) readVerdict(ad *netlink.AttributeDecoder) error {
	switch ad.Type() {
	case unix.NFTA_VERDICT_CHAIN:
		rr.rule.target = ad.String()
	case unix.NFTA_VERDICT_CODE:
		rr.rule.verdict = verdictOf(expr.VerdictKind(ad.Int32()))
	}
	return nil
}

// verdictOf translates NF_* of linux/netfilter.h and NFT_*. Its lower
// eight bits say which; above them NF_QUEUE has a queue's number, and NF_DROP an errno.
func verdictOf(code expr.VerdictKind) verdict {
	switch code {
	case expr.VerdictJump:
		return jumps
	case expr.VerdictGoto:
		return goesTo
	case expr.VerdictReturn:
		return returns
	case expr.VerdictContinue, expr.VerdictBreak:
		return goesOn
	}
	const mask = 0xff
	switch code & mask {
	case expr.VerdictDrop, expr.VerdictStolen:
		return drops
	case expr.VerdictQueue:
		return queues
	}
	return accepts
}

// match is one of iptables' own (nft_compat). Its comments are as good as nft's.
func (rr *ruleReader) match(b []byte) error {
	var name string
	var info []byte
	err := fields{{unix.NFTA_MATCH_NAME, &name}, {unix.NFTA_MATCH_INFO, &info}}.decode(b)
	rr.xtMatch(name, info)
	return err
}

// xtMatch reads a match of x_tables: struct xt_comment_info and, of revision 1,
// struct xt_mark_mtinfo1 (include/uapi/linux/netfilter/xt_*.h).
func (rr *ruleReader) xtMatch(name string, info []byte) {
	const markLen = 9 // the mark, the mask, invert
	switch {
	case name == "comment":
		rr.rule.comment, _, _ = strings.Cut(string(info), "\x00")
	case name == "mark" && len(info) >= markLen:
		rr.condition(condition{
			on: onMark, negated: info[8] != 0,
			mark: binary.NativeEndian.Uint32(info), mask: binary.NativeEndian.Uint32(info[4:]),
		})
	default:
		rr.condition(condition{})
	}
}

func (rr *ruleReader) target(b []byte) error {
	var name string
	err := fields{{unix.NFTA_TARGET_NAME, &name}}.decode(b)
	if name != "" {
		rr.xtTarget(name)
	}
	return err
}

// xtTarget reads a target of x_tables, other than those that are mere verdicts.
func (rr *ruleReader) xtTarget(name string) {
	switch name {
	case "REJECT":
		rr.rule.verdict = drops
	case "NFQUEUE":
		rr.rule.verdict = queues
	case "LOG", "NFLOG", "ULOG", "TRACE", "AUDIT", "LED":
	case "TCPMSS", "MARK", "CONNMARK", "SECMARK", "CONNSECMARK", "CLASSIFY", "DSCP", "TOS", "TTL", "HL", "ECN", "SET",
		"CT", "NOTRACK", "CHECKSUM", "RATEEST", "TEE", "HMARK", "IDLETIMER", "TCPOPTSTRIP", "NETMAP":
		rr.rule.alters = true
	default:
		rr.rule.opaque = true // TARPIT, say: packets end there
	}
}

// object is a counter, or something that may have had enough.
func (rr *ruleReader) object(b []byte) error {
	var of uint32
	err := fields{{unix.NFTA_OBJREF_IMM_TYPE, &of}}.decode(b)
	if of != unix.NFT_OBJECT_COUNTER {
		rr.condition(condition{})
	}
	return err
}
