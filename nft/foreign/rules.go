package foreign

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// rule is a parsed rule in a chain of another program. The rule itself may be one of ours.
type rule struct {
	handle  uint64
	comment string // in nft's or in iptables' form
	ours    bool   // true if the comment is ours, even if somebody has changed the rule
	verdict verdict
	target  string // the target chain of a jump or goto

	conditional bool // packets of pods may or may not meet its conditions
	unmet       bool // no packet of pods meets its conditions
	logs        bool
	sets        uint32 // bits that it sets in the mark of a packet or a connection
	destination []byte // the destination that it requires: an address, or a prefix of whole bytes; otherwise nil
	opaque      bool   // a part of it is unknown, and may accept or drop the packet
	family      uint8  // family of the packets that it concerns; 0 for both
	reversePath bool   // it compares the incoming link with the route back to the source
}

// verdict is the effect of a rule on a packet that meets its conditions, or the effect of a chain on all packets of
// pods.
type verdict uint8

const (
	goesOn verdict = iota // continues with the next rule, or returns to the calling chain at the end of its chain
	accepts
	drops // drops or rejects the packet
	returns
	jumps
	goesTo
	dropsInTurn // the chain drops all packets at its end, but an earlier rule may do something else
)

// base holds the rules of a base chain. Its function chain returns the rules of another chain, which the base chain
// calls.
type base struct {
	rules  []rule
	policy verdict
	chain  func(name string) []rule
	err    error // error of reading chains
}

// end returns the index and the effect of the first rule that ends the chain for all packets. It examines only rules at
// or after the index in the parameter from, and skips our own rules. If there is no such rule, it returns the number of
// rules and the policy.
func (b *base) end(from int) (int, verdict) {
	for i := from; i < len(b.rules); i++ {
		if how := b.ends(&b.rules[i]); how != goesOn {
			return i, how
		}
	}
	return len(b.rules), b.policy
}

// ends returns the effect of a rule on all packets. If the rule does not end the chain for all of them, it returns
// goesOn.
func (b *base) ends(r *rule) verdict {
	switch {
	case r.ours || !r.isForAll():
		return goesOn
	case r.does(jumps):
		return chainEnds(b.chain(r.target))
	case r.does(goesTo):
		return cmp.Or(chainEnds(b.chain(r.target)), b.policy) // the kernel does not come back after a goto
	case r.verdict == returns:
		return b.policy
	}
	return r.verdict
}

// isForAll reports whether the rule certainly applies to all packets.
func (r *rule) isForAll() bool { return !r.conditional && !r.unmet && !r.opaque }

// chainEnds returns the effect of a called chain on all packets that no rule with a condition accepts. It does not
// examine chains that this chain calls.
func chainEnds(rules []rule) verdict {
	how := drops
	for _, r := range rules {
		switch {
		case r.unmet || !r.opaque && r.verdict == goesOn || r.conditional && r.does(accepts):
		case !r.isForAll() || r.does(jumps, goesTo):
			how = dropsInTurn
		case r.verdict == drops:
			return how
		case r.verdict == accepts:
			return accepts
		default:
			return goesOn
		}
	}

	return goesOn
}

// does reports whether the rule has one of these verdicts, and no unknown part. For a conditional rule with the verdict
// goesOn, it returns true only if the rule logs, since any other such rule may change packets.
func (r *rule) does(verdicts ...verdict) bool {
	return !r.opaque && slices.Contains(verdicts, r.verdict) && (r.verdict != goesOn || !r.conditional || r.logs)
}

// calls reports whether the rule jumps to a chain whose rules all have one of these verdicts. It ignores rules whose
// conditions no packet of pods meets.
func (b *base) calls(r *rule, verdicts ...verdict) bool {
	return r.does(jumps) && !slices.ContainsFunc(b.chain(r.target), func(called rule) bool {
		return !called.unmet && !called.does(verdicts...)
	})
}

// leadsTo reports whether a rule of the base chain, or of a chain that the base chain calls, calls the given chain.
func (b *base) leadsTo(chain string) bool {
	calls := func(r rule) bool { return r.target == chain }
	return slices.ContainsFunc(b.rules, func(r rule) bool {
		return calls(r) || r.target != "" && slices.ContainsFunc(b.chain(r.target), calls)
	})
}

// place describes the place of our rules in FORWARD.
type place struct {
	// index is the index of the rule before which missing rules are inserted. The number of rules means the end, and
	// -1 means that FORWARD gets no rules.
	index int
	kept  []int // indexes of our rules in a right place, one for each comment
}

// decide returns the place for our rules, after the call of the operator's chain admin. The index of the place is -1 if
// the chain gets no rules of ours: see Ensure. decide keeps our rules that are in a right place.
func (b *base) decide(admin string) place {
	decided := b.behindAdmin(admin)
	at, how := b.end(decided)
	ours := slices.IndexFunc(b.rules, func(r rule) bool { return r.ours })
	if ours > at && how != accepts {
		// A drop of everything that somebody put before our rules is intended. So our rules stay behind it, and
		// before the next drop.
		at, how = b.end(ours + 1)
		if how != drops {
			for at = ours; at < len(b.rules) && b.rules[at].ours; at++ {
			}
			how = drops
		}
	}

	if how != drops {
		return place{index: -1}
	}

	var p place
	for i := range b.rules[:at] {
		again := func(kept int) bool { return b.rules[kept].comment == b.rules[i].comment }
		if b.rules[i].isAdmission() && !slices.ContainsFunc(b.rules[i+1:at], b.mayStop) &&
			!slices.ContainsFunc(p.kept, again) {
			p.kept = append(p.kept, i)
		}
	}

	if len(p.kept) > 0 {
		p.index = p.kept[0]
	} else {
		p.index = b.beforeLogs(max(ours, decided-1), at)
	}

	return p
}

// behindAdmin returns the index after the last rule that calls the operator's chain, since the operator's rules come
// before ours. If there is no such rule, it returns 0.
func (b *base) behindAdmin(admin string) int {
	for i := len(b.rules) - 1; i >= 0; i-- {
		if r := &b.rules[i]; r.comment == adminComment || admin != "" && r.target == admin {
			return i + 1
		}
	}
	return 0
}

// isAdmission reports whether the rule is ours and still accepts all marked packets of the link in its comment. It
// returns false if somebody added a condition to the rule or changed its verdict.
func (r *rule) isAdmission() bool { return r.ours && r.verdict == accepts && r.isForAll() }

// mayStop reports whether the rule could drop or change a packet that our rules accept. Our rules must stay behind
// it.
func (b *base) mayStop(r rule) bool {
	return !r.unmet && !r.ours && !r.does(goesOn, accepts) && !b.calls(&r, goesOn, accepts, returns)
}

// beforeLogs returns the index for a new rule that must come before the rule b.rules[at]. If logging rules stand
// right before b.rules[at], it returns the index of the first of them, else at. It does not examine b.rules[behind]
// and earlier rules.
func (b *base) beforeLogs(behind, at int) int {
	for i := at - 1; i > behind; i-- {
		r := &b.rules[i]
		if !r.unmet && !r.does(goesOn) && !b.calls(r, goesOn) {
			break
		}
		if r.logs || r.does(jumps) && slices.ContainsFunc(b.chain(r.target), func(r rule) bool { return r.logs }) {
			at = i
		}
	}

	return at
}

// couldAccept reports whether one of the rules, or of the chains that they call, could accept packets of pods. It skips
// our own rules. visited records chains that were examined already.
func (b *base) couldAccept(rules []rule, visited map[string]bool) bool {
	for _, r := range rules {
		switch {
		case r.unmet || r.ours:
			continue
		case r.opaque || r.verdict == accepts:
			return true
		case r.target != "" && !visited[r.target]:
			visited[r.target] = true
			if b.couldAccept(b.chain(r.target), visited) {
				return true
			}
		}

		if r.isForAll() && r.does(drops, returns, goesTo) {
			return false
		}
	}

	return false
}

// packet describes the packets that a rule is evaluated for. They open connections from pods or, with to and
// redirected, to pods.
type packet struct {
	mark, known uint32 // known has the known bits of the mark
	link        string // the link that the packet comes in by; empty if unknown
	to          string // the link that the packet leaves by; empty if unknown, except that it differs from link
	redirected  bool   // the packet's destination was changed, as for a host port
	// firewalld is set if the rules are firewalld's. Its sets of connection states never contain the state "new".
	firewalld bool
}

// ruleReader parses the expressions of a rule, and evaluates its conditions for a packet.
type ruleReader struct {
	rule
	packet *packet
	loaded
}

// loaded describes the value in the register that an expression has loaded last.
type loaded struct {
	register     uint32
	sets         uint32 // of a number of four bytes, the bits that are certainly set
	value, known []byte // known has the known bits of value
	not          bool   // the register has any value except this one
	destination  bool   // the value is the packet's destination
	family       bool   // the value is the packet's family
}

// decodeRule parses a rule, an NFT_MSG_NEWRULE, and evaluates it for the packet p. It evaluates only conditions about
// our mark, about names of links, and about the state of the connection. It assumes that a packet may or may not meet
// any other condition.
func decodeRule(b []byte, p *packet) rule {
	rr := ruleReader{rule: rule{handle: nftnl.Number64(nftnl.Find(b, unix.NFTA_RULE_HANDLE))}, packet: p}
	nftnl.Each(nftnl.Find(b, unix.NFTA_RULE_EXPRESSIONS), func(b []byte) {
		rr.expression(nftnl.Text(nftnl.Find(b, unix.NFTA_EXPR_NAME)), nftnl.Find(b, unix.NFTA_EXPR_DATA))
	})
	rr.comment = nftnl.RuleComment(b)
	return rr.rule
}

// expression evaluates one expression of the rule. If it does not know the expression, it marks the rule as opaque:
// the rule may then accept or drop the packet.
func (rr *ruleReader) expression(name string, own []byte) {
	number := func(attribute uint16) uint32 { return nftnl.Number(nftnl.Find(own, attribute)) }
	value := func(attribute uint16) []byte { return nftnl.Find(own, attribute, unix.NFTA_DATA_VALUE) }
	switch name {
	case "counter", "last":
	case "log":
		rr.logs = true
	case "reject":
		rr.verdict = drops
	case "immediate":
		rr.loaded = loaded{}
		if verdict := nftnl.Find(own, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT); verdict != nil {
			rr.decide(nftnl.Find(verdict, unix.NFTA_VERDICT_CODE),
				nftnl.Text(nftnl.Find(verdict, unix.NFTA_VERDICT_CHAIN)))
		}
		rr.loaded.sets = native(nftnl.Find(own, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VALUE))
	case "match": // an extension of x_tables, like "target"
		rr.xtMatch(nftnl.Text(nftnl.Find(own, xtName)), nftnl.Find(own, xtInfo))
	case "target":
		rr.xtTarget(nftnl.Text(nftnl.Find(own, xtName)))
		rr.xtMark(nftnl.Text(nftnl.Find(own, xtName)), nftnl.Find(own, xtInfo))
	case "meta":
		rr.store(nftnl.Find(own, unix.NFTA_META_SREG), number(unix.NFTA_META_KEY) == unix.NFT_META_MARK)
		rr.loaded = rr.packet.meta(expr.MetaKey(number(unix.NFTA_META_KEY)))
		rr.register = number(unix.NFTA_META_DREG)
	case "ct":
		rr.store(nftnl.Find(own, unix.NFTA_CT_SREG), number(unix.NFTA_CT_KEY) == unix.NFT_CT_MARK)
		rr.loaded = rr.packet.connection(expr.CtKey(number(unix.NFTA_CT_KEY)))
		rr.register = number(unix.NFTA_CT_DREG)
	case "bitwise": // only "and" with a mask can be evaluated
		if number(unix.NFTA_BITWISE_SREG) != rr.register || !isZero(value(unix.NFTA_BITWISE_XOR)) {
			rr.loaded = loaded{}
		}
		rr.and(value(unix.NFTA_BITWISE_MASK))
		rr.register = number(unix.NFTA_BITWISE_DREG)
		rr.loaded.sets = native(value(unix.NFTA_BITWISE_XOR))
	case "cmp":
		op := number(unix.NFTA_CMP_OP)
		if rr.loaded.destination && op == unix.NFT_CMP_EQ {
			rr.rule.destination = value(unix.NFTA_CMP_DATA)
		}

		data, isFirst := value(unix.NFTA_CMP_DATA), !rr.conditional
		if rr.loaded.family && isFirst && op == unix.NFT_CMP_EQ && len(data) == 1 {
			rr.rule.family = data[0]
		}

		if number(unix.NFTA_CMP_SREG) != rr.register || op > unix.NFT_CMP_NEQ {
			rr.loaded = loaded{}
		}
		rr.condition(value(unix.NFTA_CMP_DATA), op == unix.NFT_CMP_EQ)
	case "lookup": // a map of verdicts may do anything
		rr.opaque = rr.opaque || nftnl.Find(own, unix.NFTA_LOOKUP_DREG) != nil &&
			number(unix.NFTA_LOOKUP_DREG) == unix.NFT_REG_VERDICT
		isOfStates := len(rr.value) == 4
		rr.unmet = rr.unmet || rr.packet.firewalld && isOfStates
		rr.conditional = true
	case "objref":
		rr.conditional = rr.conditional || number(unix.NFTA_OBJREF_IMM_TYPE) != unix.NFT_OBJECT_COUNTER
	case "payload":
		at, inHeader := number(unix.NFTA_PAYLOAD_OFFSET), number(
			unix.NFTA_PAYLOAD_BASE) == unix.NFT_PAYLOAD_NETWORK_HEADER
		rr.conditional, rr.loaded = true, loaded{destination: inHeader && (at == destination4 || at == destination6)}
	case "fib":
		ofSource := number(unix.NFTA_FIB_FLAGS)&unix.NFTA_FIB_F_SADDR != 0
		isAlone := !rr.conditional || rr.rule.family != 0
		if ofSource && isAlone && number(unix.NFTA_FIB_RESULT) == unix.NFT_FIB_RESULT_OIF {
			rr.reversePath = true
		}
		rr.conditional, rr.loaded = true, loaded{}
	case "exthdr", "rt", "socket", "osf", "numgen", "hash", "xfrm", "tunnel", "inner", "range", "byteorder", "limit",
		"quota", "connlimit":
		rr.conditional, rr.loaded = true, loaded{}
	default:
		rr.opaque = true
	}
}

// Offsets of the destination address in the headers of IPv4 and IPv6.
const destination4, destination6 = 16, 24

// store records that the rule stores a register in the packet or its connection, and marks the rule as conditional.
// If register is nil, the expression stores none, and store does nothing. isMark is set if it stores the register in
// a mark.
func (rr *ruleReader) store(register []byte, isMark bool) {
	rr.conditional = rr.conditional || register != nil
	if register != nil && isMark {
		rr.rule.sets |= rr.loaded.sets
	}
}

// native returns the number in four bytes in the host's byte order. If b has another length, it returns 0.
func native(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(b)
}

// meta returns the value that a meta expression loads for this packet: the mark, the protocol family or a link name.
// If the value is unknown, meta returns the zero loaded.
func (p *packet) meta(key expr.MetaKey) loaded {
	switch {
	case key == expr.MetaKeyMARK:
		return bits(p.mark, p.known)
	case key == expr.MetaKeyOIFNAME && p.to != "":
		return name(p.to, false)
	case key == expr.MetaKeyNFPROTO:
		return loaded{family: true}
	case p.link != "" && (key == expr.MetaKeyIIFNAME || key == expr.MetaKeyOIFNAME):
		return name(p.link, key == expr.MetaKeyOIFNAME)
	}

	return loaded{}
}

// name returns the loaded value for a link's name. With the flag not, the loaded value is any name except this one.
func name(link string, not bool) loaded {
	return loaded{value: nftnl.LinkKey(link, nil, 0), known: bytes.Repeat([]byte{0xff}, nftnl.IfnameLen), not: not}
}

// connection returns the value that a ct expression loads for the first packet of a connection.
func (p *packet) connection(key expr.CtKey) loaded {
	const all, dstNAT = 0xffffffff, 1 << 5 // dstNAT is IPS_DST_NAT
	switch {
	case key == expr.CtKeySTATE:
		return bits(expr.CtStateBitNEW, all)
	case key == expr.CtKeySTATUS && p.redirected:
		return bits(dstNAT, all)
	case key == expr.CtKeySTATUS:
		return bits(0, all)
	}
	return loaded{}
}

// bits returns a loaded number. known is a mask of the bits of value that are known.
func bits(value, known uint32) loaded {
	return loaded{value: binary.NativeEndian.AppendUint32(nil, value),
		known: binary.NativeEndian.AppendUint32(nil, known)}
}

// and applies a mask to the loaded value. The bits outside of the mask are then known to be 0. If the mask has another
// length than the value, or the flag not is set, the value becomes unknown.
func (l *loaded) and(mask []byte) {
	if len(mask) != len(l.value) || l.not {
		*l = loaded{}
	}
	for i := range l.value {
		l.value[i] &= mask[i]
		l.known[i] |= ^mask[i]
	}
}

// condition evaluates a comparison of data with the loaded value. If the result is unknown, it marks the rule as
// conditional. If the comparison fails, it marks the rule as unmet. data may be shorter than the value: for a name
// with a wildcard, nft compares only the bytes before the wildcard.
func (rr *ruleReader) condition(data []byte, equal bool) {
	n := len(data)
	known := n > 0 && n <= len(rr.value) && !slices.ContainsFunc(rr.known[:n], func(b byte) bool { return b != 0xff })
	is := known && bytes.HasPrefix(rr.value, data)
	if !known || rr.not && !is {
		rr.conditional = true
		return
	}
	rr.unmet = rr.unmet || (is != rr.not) != equal
}

func isZero(b []byte) bool { return strings.Trim(string(b), "\x00") == "" }

// decide sets the rule's verdict from a verdict code, NF_* of linux/netfilter.h or NFT_*. NF_DROP may contain an
// errno above the lowest eight bits. A verdict that passes packets to a user-space queue makes the rule opaque.
func (rr *ruleReader) decide(code []byte, target string) {
	rr.target = target
	switch kind := expr.VerdictKind(int32(nftnl.Number(code))); kind {
	case expr.VerdictJump:
		rr.verdict = jumps
	case expr.VerdictGoto:
		rr.verdict = goesTo
	case expr.VerdictReturn:
		rr.verdict = returns
	case expr.VerdictAccept:
		rr.verdict = accepts
	case expr.VerdictContinue, expr.VerdictBreak:
	default:
		const mask = 0xff
		rr.verdict, rr.opaque = drops, len(code) == 0 || kind&mask != expr.VerdictDrop
	}
}

// xtName and xtInfo are the attributes of x_tables matches and targets (NFTA_MATCH_NAME, NFTA_MATCH_INFO and the same
// numbers for targets).
const xtName, xtInfo = 1, 3

// xtMatch evaluates an x_tables match. It knows "mark" (struct xt_mark_mtinfo1 in
// include/uapi/linux/netfilter/xt_mark.h), "comment", which is no condition, and "rpfilter", a check of the route back.
// All matches except "mark" and "comment" make the rule conditional.
func (rr *ruleReader) xtMatch(name string, info []byte) {
	const markLen = 9 // the mark, its mask and a flag that inverts
	switch {
	case name == "comment":
	case name == "mark" && len(info) >= markLen:
		rr.loaded = rr.packet.meta(expr.MetaKeyMARK)
		rr.and(info[4:8])
		rr.condition(info[:4], info[8] == 0)
	default:
		rr.reversePath = rr.reversePath || name == "rpfilter" && !rr.conditional
		rr.conditional = true
	}
}

// xtMark records the mark bits that a MARK or CONNMARK target sets. They are the first field of struct
// xt_mark_tginfo2, and also of struct xt_connmark_tginfo1 if its fourth field is 0.
func (rr *ruleReader) xtMark(name string, info []byte) {
	if name == "MARK" && len(info) >= 4 || name == "CONNMARK" && len(info) >= 13 && info[12] == 0 {
		rr.rule.sets |= native(info[:4])
	}
}

// xtTarget evaluates an x_tables target. A target that it does not know makes the rule opaque.
func (rr *ruleReader) xtTarget(name string) {
	switch name {
	case "REJECT":
		rr.verdict = drops
	case "LOG", "NFLOG", "ULOG", "TRACE", "AUDIT", "LED":
		rr.logs = true
	default:
		rr.opaque = true // the target may change, accept or drop the packet
	}
}
