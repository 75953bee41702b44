package foreign

import (
	"encoding/binary"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// packet is what is known of what pods send to elsewhere.
type packet struct {
	mark, known uint32 // its mark, and which bits of that are known
	link        string // the link that it comes in by; empty: not known
	// firewalld says that rules are firewalld's: its sets of states do not have that of a new connection, and what
	// its policies do is not looked into.
	firewalld bool
}

// decodeRule reads an NFT_MSG_NEWRULE. Of its conditions no more is understood than our mark, the name of the link
// that a packet comes in by, and the state of its connection; any other one may be met or not.
func decodeRule(family uint8, b []byte, p *packet) (rule, error) {
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
			reader := ruleReader{rule: &r, family: family, packet: p}
			return nftnl.Nested(ad, reader.expression)
		}
		return nil
	})
	r.conditional = r.conditional || p.firewalld && strings.HasPrefix(r.target, firewalldPolicy)
	return r, err
}

// ruleReader makes a verdict of a rule's expressions, and of its conditions what packet says.
type ruleReader struct {
	*rule
	family   uint8
	packet   *packet
	loaded   property // what the register has that was loaded last
	register uint32
	mask     []byte // of a bitwise and; nil is all
}

// property is what of a packet a condition is about.
type property uint8

const (
	onOther property = iota
	onMark
	onIn     // the name of the link that it came in by
	onOut    // and that of the link that it leaves by
	onState  // of its connection
	onStatus // of its connection: changed addresses, say
)

// expression reads one: its name, then its own attributes.
func (rr *ruleReader) expression(ad *netlink.AttributeDecoder) error {
	var name string
	var own []byte
	err := nftnl.Nested(ad, func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case unix.NFTA_EXPR_NAME:
			name = ad.String()
		case unix.NFTA_EXPR_DATA:
			own = ad.Bytes()
		}
		return nil
	})
	if err == nil {
		err = rr.read(name, own)
	}
	return err
}

func (rr *ruleReader) read(name string, own []byte) error {
	switch name {
	case "counter", "last":
	case "log":
		rr.logs = true
	case "reject":
		rr.verdict = drops
	case "queue":
		rr.verdict = queues
	case "immediate":
		return rr.immediate(own)
	case "meta", "ct":
		return rr.load(name, own)
	case "bitwise":
		return rr.bitwise(own)
	case "cmp":
		return rr.compare(own)
	case "lookup":
		return rr.lookup(own)
	case "match":
		return rr.match(own)
	case "target":
		var target expr.Target
		if expr.Unmarshal(rr.family, own, &target) != nil {
			rr.opaque = true
		}
		rr.xtTarget(target.Name)
	case "objref":
		var e expr.Objref
		err := expr.Unmarshal(rr.family, own, &e)
		rr.conditional = rr.conditional || e.Type != unix.NFT_OBJECT_COUNTER // it may have had enough
		return err
	default:
		rr.other(name)
	}
	return nil
}

// other is for expressions that load something, compare it, or change it. What is not known may accept or drop, too.
func (rr *ruleReader) other(name string) {
	rr.conditional, rr.loaded = true, onOther
	switch name {
	case "payload", "exthdr", "fib", "rt", "socket", "osf", "numgen", "hash", "xfrm", "tunnel", "inner", "range", "byteorder", "limit", "quota", "connlimit":
	default:
		rr.opaque = true
	}
}

// load is for what may be understood of a packet.
func (rr *ruleReader) load(name string, own []byte) error {
	rr.loaded, rr.mask = onOther, nil
	if name == "ct" {
		var e expr.Ct
		err := expr.Unmarshal(rr.family, own, &e)
		rr.conditional, rr.register = rr.conditional || e.SourceRegister, e.Register
		rr.loaded = map[expr.CtKey]property{expr.CtKeySTATE: onState, expr.CtKeySTATUS: onStatus}[e.Key]
		return err
	}
	var e expr.Meta
	err := expr.Unmarshal(rr.family, own, &e)
	rr.conditional, rr.register = rr.conditional || e.SourceRegister, e.Register
	rr.loaded = map[expr.MetaKey]property{expr.MetaKeyMARK: onMark, expr.MetaKeyIIFNAME: onIn, expr.MetaKeyOIFNAME: onOut}[e.Key]
	return err
}

// bitwise: an and with a mask is known, and nothing else.
func (rr *ruleReader) bitwise(own []byte) error {
	var e expr.Bitwise
	err := expr.Unmarshal(rr.family, own, &e)
	if rr.mask != nil || len(e.Mask) == 0 || !zero(e.Xor) || e.SourceRegister != rr.register {
		rr.loaded = onOther
	}
	rr.register, rr.mask = e.DestRegister, e.Mask
	return err
}

func zero(b []byte) bool { return strings.Trim(string(b), "\x00") == "" }

func (rr *ruleReader) compare(own []byte) error {
	var e expr.Cmp
	err := expr.Unmarshal(rr.family, own, &e)
	is, known := rr.equals(e.Data)
	if known = known && e.Register == rr.register && (e.Op == expr.CmpOpEq || e.Op == expr.CmpOpNeq); known {
		rr.condition(rr.loaded, is == (e.Op == expr.CmpOpEq))
	}
	rr.conditional = rr.conditional || !known
	return err
}

// condition notes one of which it is known whether it is met.
func (rr *ruleReader) condition(on property, met bool) {
	rr.unmet = rr.unmet || !met
	rr.onMark = rr.onMark || on == onMark
}

// equals says whether what was loaded is the data, if that is known.
func (rr *ruleReader) equals(data []byte) (is, known bool) {
	if rr.loaded == onIn || rr.loaded == onOut {
		// nft compares the name and all that follows it, or with a wildcard only so far.
		name, _, whole := strings.Cut(string(data), "\x00")
		is = rr.packet.link == name || !whole && len(data) < ifnameLen && strings.HasPrefix(rr.packet.link, name)
		// What goes elsewhere does not leave by the link that it came in by; by which it does is not known.
		known = rr.mask == nil && rr.packet.link != "" && (rr.loaded == onIn || is)
		return is && rr.loaded == onIn, known
	}
	mask := rr.mask
	if mask == nil {
		mask = []byte{0xff, 0xff, 0xff, 0xff}
	}
	if len(data) != 4 || len(mask) != 4 {
		return false, false
	}
	bits, want := binary.NativeEndian.Uint32(mask), binary.NativeEndian.Uint32(data)
	switch rr.loaded {
	case onMark:
		return rr.packet.marked(want, bits)
	case onState:
		return bits&expr.CtStateBitNEW == want, true // what pods send begins connections
	case onStatus:
		return want == 0, true
	}
	return false, false
}

// marked says whether the mark is one, of some bits.
func (p *packet) marked(mark, bits uint32) (is, known bool) {
	return p.mark&bits == mark, bits&^p.known == 0
}

// lookup makes a condition of a set, or a verdict of a map.
func (rr *ruleReader) lookup(own []byte) error {
	var e expr.Lookup
	err := expr.Unmarshal(rr.family, own, &e)
	switch {
	case e.IsDestRegSet && e.DestRegister == unix.NFT_REG_VERDICT:
		rr.verdict = varies
	case rr.packet.firewalld && rr.loaded == onState:
		rr.condition(onState, false)
	}
	rr.conditional = true
	return err
}

// immediate gives the verdict; with data it loads a register.
func (rr *ruleReader) immediate(own []byte) error {
	return nftnl.Decode(own, func(ad *netlink.AttributeDecoder) error {
		if ad.Type() != unix.NFTA_IMMEDIATE_DATA {
			return nil
		}
		return nftnl.Nested(ad, func(ad *netlink.AttributeDecoder) error {
			if ad.Type() != unix.NFTA_DATA_VERDICT {
				rr.loaded = onOther
				return nil
			}
			return nftnl.Nested(ad, rr.readVerdict)
		})
	})
}

func (rr *ruleReader) readVerdict(ad *netlink.AttributeDecoder) error {
	switch ad.Type() {
	case unix.NFTA_VERDICT_CHAIN:
		rr.target = ad.String()
	case unix.NFTA_VERDICT_CODE:
		rr.verdict = verdictOf(expr.VerdictKind(ad.Int32()))
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
func (rr *ruleReader) match(own []byte) error {
	var e expr.Match
	if expr.Unmarshal(rr.family, own, &e) != nil {
		rr.conditional = true
		return nil
	}
	switch info := e.Info.(type) {
	case *xt.Comment:
		rr.comment = string(*info)
	case *xt.Unknown:
		rr.xtMatch(e.Name, *info)
	default:
		rr.conditional = true
	}
	return nil
}

// xtMatch reads a match of x_tables: of revision 1, struct xt_mark_mtinfo1 (include/uapi/linux/netfilter/xt_mark.h).
func (rr *ruleReader) xtMatch(name string, info []byte) {
	const markLen = 9 // the mark, the mask, invert
	if name == "comment" {
		return
	}
	if name == "mark" && len(info) >= markLen {
		is, known := rr.packet.marked(binary.NativeEndian.Uint32(info), binary.NativeEndian.Uint32(info[4:]))
		if known {
			rr.condition(onMark, is == (info[8] == 0))
			return
		}
	}
	rr.conditional = true
}

// xtTarget reads a target of x_tables, other than those that are mere verdicts.
func (rr *ruleReader) xtTarget(name string) {
	switch name {
	case "REJECT":
		rr.verdict = drops
	case "NFQUEUE":
		rr.verdict = queues
	case "LOG", "NFLOG", "ULOG", "TRACE", "AUDIT", "LED":
		rr.logs = true
	default:
		rr.opaque = true // it alters the packet, or packets end there
	}
}
