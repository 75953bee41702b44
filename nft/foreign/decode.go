package foreign

import (
	"bytes"
	"encoding/binary"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// packet is what is known of what pods send to elsewhere.
type packet struct {
	mark   uint32 // the bits of its mark that are known
	marked bool   // they are set; otherwise none is
	link   string // the link that it comes in by; empty: not known
	// firewalld says that rules are firewalld's: its sets of states do not have that of a new connection.
	firewalld bool
}

// decodeRule reads an NFT_MSG_NEWRULE. Of its conditions no more is understood than our mark, the names of links, and
// the state of a connection; any other one may be met or not.
func decodeRule(family uint8, b []byte, p *packet) (rule, error) {
	rr := ruleReader{rule: &rule{}, family: family, packet: p}
	err := nftnl.Decode(b, func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case unix.NFTA_RULE_HANDLE:
			rr.handle = ad.Uint64()
		case unix.NFTA_RULE_USERDATA:
			if comment, ok := nftnl.CommentOf(ad.Bytes()); ok {
				rr.comment = comment
			}
		case unix.NFTA_RULE_EXPRESSIONS:
			return nftnl.Nested(ad, rr.expression)
		}
		return nil
	})
	return *rr.rule, err
}

// ruleReader makes a verdict of a rule's expressions, and of its conditions what packet says.
type ruleReader struct {
	*rule
	family   uint8
	packet   *packet
	register uint32 // that was loaded last
	loaded
}

// loaded is what a register has.
type loaded struct {
	value, unknown []byte // unknown has the bits of the value that are not known
	not            bool   // the register has something else than the value
	state          bool   // of a connection
}

// expression reads one: its name, then its own attributes.
func (rr *ruleReader) expression(ad *netlink.AttributeDecoder) error {
	name, own, err := namedData(ad.Bytes(), unix.NFTA_EXPR_NAME, unix.NFTA_EXPR_DATA)
	if err != nil {
		return err
	}
	return rr.read(name, own)
}

// namedData reads attributes that are a name and what belongs to it.
func namedData(b []byte, nameType, dataType uint16) (name string, data []byte, _ error) {
	err := nftnl.Decode(b, func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case nameType:
			name = ad.String()
		case dataType:
			data = ad.Bytes()
		}
		return nil
	})
	return name, data, err
}

// read reads an expression by its name. What is not known may accept or drop, too.
func (rr *ruleReader) read(name string, own []byte) error {
	var e expr.Any
	switch name {
	case "counter", "last":
		return nil
	case "log":
		rr.logs = true
		return nil
	case "reject":
		rr.verdict = drops
		return nil
	case "immediate":
		return nftnl.Decode(own, rr.immediate)
	case "match": // of x_tables, as targets are
		name, info, err := namedData(own, xtName, xtInfo)
		rr.xtMatch(name, info)
		return err
	case "target":
		name, _, err := namedData(own, xtName, xtInfo)
		rr.xtTarget(name)
		return err
	case "meta":
		e = &expr.Meta{}
	case "ct":
		e = &expr.Ct{}
	case "bitwise":
		e = &expr.Bitwise{}
	case "cmp":
		e = &expr.Cmp{}
	case "lookup":
		e = &expr.Lookup{}
	case "objref":
		e = &expr.Objref{}
	case "payload", "exthdr", "fib", "rt", "socket", "osf", "numgen", "hash", "xfrm", "tunnel", "inner", "range", "byteorder", "limit", "quota", "connlimit":
		rr.conditional, rr.loaded = true, loaded{}
		return nil
	default:
		rr.opaque = true
		return nil
	}
	err := expr.Unmarshal(rr.family, own, e)
	rr.step(e)
	return err
}

// step carries out an expression, as far as the packet is known.
func (rr *ruleReader) step(e expr.Any) {
	switch e := e.(type) {
	case *expr.Meta:
		rr.conditional = rr.conditional || e.SourceRegister
		rr.register, rr.loaded = e.Register, rr.packet.meta(e.Key)
	case *expr.Ct:
		rr.conditional = rr.conditional || e.SourceRegister
		rr.register, rr.loaded = e.Register, connection(e.Key)
	case *expr.Bitwise: // an and with a mask is understood, and nothing else
		if e.SourceRegister != rr.register || !zero(e.Xor) {
			rr.loaded = loaded{}
		}
		rr.register = e.DestRegister
		rr.and(e.Mask)
	case *expr.Cmp:
		is, known := rr.equals(e.Data)
		known = known && e.Register == rr.register && (e.Op == expr.CmpOpEq || e.Op == expr.CmpOpNeq)
		rr.condition(is == (e.Op == expr.CmpOpEq), known)
	case *expr.Lookup: // a map of verdicts may do anything
		rr.opaque = rr.opaque || e.IsDestRegSet && e.DestRegister == unix.NFT_REG_VERDICT
		rr.condition(false, rr.packet.firewalld && rr.state)
	case *expr.Objref:
		rr.conditional = rr.conditional || e.Type != unix.NFT_OBJECT_COUNTER
	}
}

// meta is what a register has once a property of the packet is loaded.
func (p *packet) meta(key expr.MetaKey) loaded {
	switch {
	case key == expr.MetaKeyMARK && p.marked:
		return number(p.mark, ^p.mark)
	case key == expr.MetaKeyMARK:
		return number(0, ^p.mark)
	case p.link != "" && (key == expr.MetaKeyIIFNAME || key == expr.MetaKeyOIFNAME):
		// What goes elsewhere does not leave by the link that it came in by; by which it does is not known.
		return loaded{value: nftnl.LinkKey(p.link, nil, 0), unknown: make([]byte, nftnl.IfnameLen), not: key == expr.MetaKeyOIFNAME}
	}
	return loaded{}
}

// connection is the same for a property of its connection, which what pods send begins.
func connection(key expr.CtKey) loaded {
	switch key {
	case expr.CtKeySTATE:
		l := number(expr.CtStateBitNEW, 0)
		l.state = true
		return l
	case expr.CtKeySTATUS:
		return number(0, 0)
	}
	return loaded{}
}

func number(value, unknown uint32) loaded {
	return loaded{value: binary.NativeEndian.AppendUint32(nil, value), unknown: binary.NativeEndian.AppendUint32(nil, unknown)}
}

// and leaves the bits of a mask.
func (l *loaded) and(mask []byte) {
	if len(mask) != len(l.value) || l.not {
		*l = loaded{}
		return
	}
	for i := range mask {
		l.value[i] &= mask[i]
		l.unknown[i] &= mask[i]
	}
}

// equals says whether what was loaded begins with the data, if that is known: of a name with a wildcard, nft compares
// what is before that.
func (l *loaded) equals(data []byte) (is, known bool) {
	if len(data) == 0 || len(data) > len(l.value) || !zero(l.unknown[:len(data)]) {
		return false, false
	}
	is = bytes.HasPrefix(l.value, data)
	return is && !l.not, is || !l.not
}

func zero(b []byte) bool { return strings.Trim(string(b), "\x00") == "" }

// condition notes one that is met or not, if that is known.
func (rr *ruleReader) condition(met, known bool) {
	rr.conditional = rr.conditional || !known
	rr.unmet = rr.unmet || known && !met
}

// immediate gives the verdict.
func (rr *ruleReader) immediate(ad *netlink.AttributeDecoder) error {
	if ad.Type() != unix.NFTA_IMMEDIATE_DATA {
		return nil
	}
	return nftnl.Nested(ad, func(ad *netlink.AttributeDecoder) error {
		if ad.Type() != unix.NFTA_DATA_VERDICT {
			rr.loaded = loaded{}
			return nil
		}
		return nftnl.Nested(ad, func(ad *netlink.AttributeDecoder) error {
			switch ad.Type() {
			case unix.NFTA_VERDICT_CHAIN:
				rr.target = ad.String()
			case unix.NFTA_VERDICT_CODE:
				rr.standard(expr.VerdictKind(ad.Int32()))
			}
			return nil
		})
	})
}

// standard translates NF_* of linux/netfilter.h and NFT_*. Above the lower eight bits NF_DROP has an errno. A program
// that has a queue may do anything.
func (rr *ruleReader) standard(code expr.VerdictKind) {
	switch code {
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
		rr.verdict, rr.opaque = drops, code&mask != expr.VerdictDrop
	}
}

// The attributes of matches and of targets of x_tables (NFTA_MATCH_NAME).
const xtName, xtInfo = 1, 3

// xtMatch reads a match: of marks, struct xt_mark_mtinfo1 (include/uapi/linux/netfilter/xt_mark.h). A comment is as
// good as nft's.
func (rr *ruleReader) xtMatch(name string, info []byte) {
	const markLen = 9 // the mark, the mask, invert
	switch {
	case name == "comment":
		rr.comment, _, _ = strings.Cut(string(info), "\x00")
	case name == "mark" && len(info) >= markLen:
		mark := rr.packet.meta(expr.MetaKeyMARK)
		mark.and(info[4:8])
		is, known := mark.equals(info[:4])
		rr.condition(is == (info[8] == 0), known)
	default:
		rr.conditional = true
	}
}

// xtTarget reads a target, other than those that are mere verdicts.
func (rr *ruleReader) xtTarget(name string) {
	switch name {
	case "REJECT":
		rr.verdict = drops
	case "LOG", "NFLOG", "ULOG", "TRACE", "AUDIT", "LED":
		rr.logs = true
	default:
		rr.opaque = true // it alters the packet, or packets end there
	}
}
