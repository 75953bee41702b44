package nft

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// decodeForeignRule reads an NFT_MSG_NEWRULE of a table of some family. What it does
// not know is a condition that may or may not be met.
func decodeForeignRule(family uint8, b []byte) (foreignRule, error) {
	var r foreignRule
	attrs := nl.ParseAttrs(b)
	for attrs.Next() {
		switch attrs.Type {
		case unix.NFTA_RULE_CHAIN:
			r.chain = attrs.String()
		case unix.NFTA_RULE_HANDLE:
			r.handle = attrs.Uint64BE()
		case unix.NFTA_RULE_USERDATA:
			if comment, ok := decodeComment(attrs.Data); ok {
				r.comment = comment
			}
		case unix.NFTA_RULE_EXPRESSIONS:
			reader := ruleReader{rule: &r, family: family, registers: map[uint32]loaded{}}
			if err := eachOf(attrs, reader.expression); err != nil {
				return foreignRule{}, err
			}
		}
	}
	return r, attrs.Err()
}

// eachOf calls read with the attributes of every entry of a list.
func eachOf(list *nl.Attrs, read func(*nl.Attrs) error) error {
	entries := list.Nested()
	for entries.Next() {
		if err := read(entries.Nested()); err != nil {
			return err
		}
	}
	return entries.Err()
}

// ruleReader makes conditions and a verdict of a rule's expressions.
type ruleReader struct {
	rule      *foreignRule
	family    uint8 // of the table or, where it is inet, of what met the conditions so far
	registers map[uint32]loaded
}

// loaded is what a register holds, as far as it is of interest.
type loaded struct {
	on   property
	mask []byte // of a bitwise and; nil is all
	// of onSource, the address that its bytes are the beginning of
	addrLen int
}

// expression reads one: its name, then its own attributes.
func (rr *ruleReader) expression(attrs *nl.Attrs) error {
	var name string
	var own *nl.Attrs
	for attrs.Next() {
		switch attrs.Type {
		case unix.NFTA_EXPR_NAME:
			name = attrs.String()
		case unix.NFTA_EXPR_DATA:
			own = attrs.Nested()
		}
	}
	if err := attrs.Err(); err != nil {
		return err
	}
	if own == nil {
		own = nl.ParseAttrs(nil)
	}
	if err := rr.read(name, own); err != nil {
		return fmt.Errorf("expression %s: %w", name, err)
	}
	return nil
}

func (rr *ruleReader) read(name string, own *nl.Attrs) error {
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
func (rr *ruleReader) lookElsewhere(name string, attrs *nl.Attrs) error {
	rr.condition(condition{})
	clear(rr.registers)
	source, known := map[string]uint16{"ct": unix.NFTA_CT_SREG, "exthdr": exthdrSource}[name]
	rr.rule.alters = rr.rule.alters || name == "dynset"
	for attrs.Next() {
		rr.rule.alters = rr.rule.alters || known && attrs.Type == source
	}
	return attrs.Err()
}

const exthdrSource = 7 // NFTA_EXTHDR_SREG, Linux 4.13

func (rr *ruleReader) condition(c condition) { rr.rule.conditions = append(rr.rule.conditions, c) }

func (rr *ruleReader) meta(attrs *nl.Attrs) error {
	var key, to uint32
	for attrs.Next() {
		switch attrs.Type {
		case unix.NFTA_META_KEY:
			key = attrs.Uint32BE()
		case unix.NFTA_META_DREG:
			to = attrs.Uint32BE()
		case unix.NFTA_META_SREG:
			rr.rule.alters = true
			return attrs.Err()
		}
	}
	on := onOther
	switch key {
	case unix.NFT_META_MARK:
		on = onMark
	case unix.NFT_META_IIFNAME:
		on = onIn
	case unix.NFT_META_OIFNAME:
		on = onOut
	case unix.NFT_META_IIF:
		on = onIndex
	case unix.NFT_META_NFPROTO:
		on = onFamily
	}
	rr.registers[to] = loaded{on: on}
	return attrs.Err()
}

// payload: source addresses, or the beginning of them, are known by where they are.
func (rr *ruleReader) payload(attrs *nl.Attrs) error {
	var to, base, offset, length uint32
	for attrs.Next() {
		switch attrs.Type {
		case unix.NFTA_PAYLOAD_DREG:
			to = attrs.Uint32BE()
		case unix.NFTA_PAYLOAD_BASE:
			base = attrs.Uint32BE()
		case unix.NFTA_PAYLOAD_OFFSET:
			offset = attrs.Uint32BE()
		case unix.NFTA_PAYLOAD_LEN:
			length = attrs.Uint32BE()
		case unix.NFTA_PAYLOAD_SREG:
			rr.rule.alters = true
			return attrs.Err()
		}
	}
	l := loaded{}
	for _, f := range families() {
		if f.proto == rr.family && base == unix.NFT_PAYLOAD_NETWORK_HEADER && offset == f.src && length <= f.addrLen {
			l = loaded{on: onSource, addrLen: int(f.addrLen)}
		}
	}
	rr.registers[to] = l
	return attrs.Err()
}

// bitwise: an and with a mask is known, and nothing else.
func (rr *ruleReader) bitwise(attrs *nl.Attrs) error {
	var from, to, op uint32
	var mask, xor []byte
	for attrs.Next() {
		switch attrs.Type {
		case unix.NFTA_BITWISE_SREG:
			from = attrs.Uint32BE()
		case unix.NFTA_BITWISE_DREG:
			to = attrs.Uint32BE()
		case bitwiseOp:
			op = attrs.Uint32BE()
		case unix.NFTA_BITWISE_MASK:
			mask = dataValue(attrs)
		case unix.NFTA_BITWISE_XOR:
			xor = dataValue(attrs)
		}
	}
	l := rr.registers[from]
	if op != 0 || l.mask != nil || len(mask) == 0 || !zero(xor) {
		l = loaded{}
	}
	l.mask = mask
	rr.registers[to] = l
	return attrs.Err()
}

const bitwiseOp = 6 // NFTA_BITWISE_OP, Linux 5.6; 0 is and with a mask, xor

func zero(b []byte) bool { return strings.Trim(string(b), "\x00") == "" }

// dataValue gives the bytes of an attribute that holds data; none if it is a
// verdict.
func dataValue(attrs *nl.Attrs) []byte {
	data := attrs.Nested()
	for data.Next() {
		if data.Type == unix.NFTA_DATA_VALUE {
			return data.Data
		}
	}
	return nil
}

// compare makes a condition of what a register holds.
func (rr *ruleReader) compare(attrs *nl.Attrs) error {
	var from, op uint32
	var data []byte
	for attrs.Next() {
		switch attrs.Type {
		case unix.NFTA_CMP_SREG:
			from = attrs.Uint32BE()
		case unix.NFTA_CMP_OP:
			op = attrs.Uint32BE()
		case unix.NFTA_CMP_DATA:
			data = dataValue(attrs)
		}
	}
	c := condition{}
	if op == unix.NFT_CMP_EQ || op == unix.NFT_CMP_NEQ {
		c = rr.registers[from].equals(data)
		c.negated = op == unix.NFT_CMP_NEQ
	}
	if c.on == onFamily && !c.negated {
		rr.family = c.family
	}
	rr.condition(c)
	return attrs.Err()
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
	case onSource:
		if prefix, ok := prefixOf(data, l.mask, l.addrLen); ok {
			return condition{on: onSource, prefix: prefix}
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
		length = 0
		for _, b := range mask {
			length += bits.LeadingZeros8(^b)
			if b != 0xff {
				break
			}
		}
		if string(netmask(length, len(mask))) != string(mask) {
			return netip.Prefix{}, false
		}
	}
	full := make([]byte, addrLen)
	copy(full, address)
	addr, ok := netip.AddrFromSlice(full)
	return netip.PrefixFrom(addr, length), ok
}

// lookup makes a condition of a set, or a verdict of a map.
func (rr *ruleReader) lookup(attrs *nl.Attrs) error {
	c := condition{on: onSet}
	for attrs.Next() {
		switch attrs.Type {
		case unix.NFTA_LOOKUP_SET:
			c.name = attrs.String()
		case unix.NFTA_LOOKUP_FLAGS:
			c.negated = attrs.Uint32BE()&unix.NFT_LOOKUP_F_INV != 0
		case unix.NFTA_LOOKUP_DREG:
			if attrs.Uint32BE() == unix.NFT_REG_VERDICT {
				rr.rule.verdict = varies
			}
		}
	}
	rr.condition(c)
	return attrs.Err()
}

// immediate gives the verdict; with data it loads a register.
func (rr *ruleReader) immediate(attrs *nl.Attrs) error {
	var to uint32
	for attrs.Next() {
		switch attrs.Type {
		case unix.NFTA_IMMEDIATE_DREG:
			to = attrs.Uint32BE()
		case unix.NFTA_IMMEDIATE_DATA:
			data := attrs.Nested()
			for data.Next() {
				if data.Type != unix.NFTA_DATA_VERDICT {
					continue
				}
				if err := rr.readVerdict(data.Nested()); err != nil {
					return err
				}
			}
			if err := data.Err(); err != nil {
				return err
			}
		}
	}
	if to != unix.NFT_REG_VERDICT {
		rr.registers[to] = loaded{}
	}
	return attrs.Err()
}

func (rr *ruleReader) readVerdict(attrs *nl.Attrs) error {
	for attrs.Next() {
		switch attrs.Type {
		case unix.NFTA_VERDICT_CHAIN:
			rr.rule.target = attrs.String()
		case unix.NFTA_VERDICT_CODE:
			rr.rule.verdict = verdictOf(int32(attrs.Uint32BE()))
		}
	}
	return attrs.Err()
}

// verdictOf translates NF_* of linux/netfilter.h and NFT_*. The lower bits of
// NF_QUEUE and of NF_DROP have company.
func verdictOf(code int32) foreignVerdict {
	switch code {
	case unix.NFT_JUMP:
		return jumps
	case unix.NFT_GOTO:
		return goesTo
	case unix.NFT_RETURN:
		return returns
	case unix.NFT_CONTINUE, unix.NFT_BREAK:
		return goesOn
	}
	const nfDrop, nfStolen, nfQueue, mask = 0, 2, 3, 0xff
	switch code & mask {
	case nfDrop, nfStolen:
		return drops
	case nfQueue:
		return queues
	}
	return accepts
}

// match is one of iptables' own (nft_compat). Its comments are as good as nft's.
func (rr *ruleReader) match(attrs *nl.Attrs) error {
	var name string
	var info []byte
	for attrs.Next() {
		switch attrs.Type {
		case unix.NFTA_MATCH_NAME:
			name = attrs.String()
		case unix.NFTA_MATCH_INFO:
			info = attrs.Data
		}
	}
	rr.xtMatch(name, info)
	return attrs.Err()
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

func (rr *ruleReader) target(attrs *nl.Attrs) error {
	for attrs.Next() {
		if attrs.Type == unix.NFTA_TARGET_NAME {
			rr.xtTarget(attrs.String())
		}
	}
	return attrs.Err()
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
func (rr *ruleReader) object(attrs *nl.Attrs) error {
	counts := false
	for attrs.Next() {
		if attrs.Type == unix.NFTA_OBJREF_IMM_TYPE {
			counts = attrs.Uint32BE() == unix.NFT_OBJECT_COUNTER
		}
	}
	if !counts {
		rr.condition(condition{})
	}
	return attrs.Err()
}
