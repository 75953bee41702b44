package nft

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// legacyObstacles looks at the tables filter of legacy iptables.
func legacyObstacles(ctx context.Context, cfg *Config, p *podPacket) ([]Obstacle, error) {
	var list []Obstacle
	for _, f := range legacyFamilies() {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if !p.has(f.proto) {
			continue
		}
		info, entries, found, err := readLegacyFilter(cfg.NetNS, f)
		if err != nil {
			return nil, err
		}
		if !found {
			continue
		}
		t, err := decodeLegacyTable(f.proto, info, entries)
		if err != nil {
			return nil, fmt.Errorf("read what %s -S prints: %w", f.program, err)
		}
		if effect, by := t.stops(p); effect != "" {
			list = append(list, Obstacle{
				Kind: LegacyIPTables, Chain: "chain FORWARD of " + f.program, Effect: effect,
				Remedy: fmt.Sprintf("%s %s -m mark --mark 0x%x/0x%x -j ACCEPT", f.program, iptablesPlace(t.chains, by), p.mark, p.mark),
			})
		}
	}
	return list, nil
}

// legacyInfo is struct ipt_getinfo, which is the same for IPv6.
type legacyInfo struct {
	entry     [hooks]uint32 // where the chain of each hook begins
	underflow [hooks]uint32 // and where the rule is that is its policy
	size      uint32        // of all entries
}

const hooks = 5 // NF_INET_NUMHOOKS

func decodeLegacyInfo(b []byte) (legacyInfo, error) {
	const (
		entryOffset     = tableNameLen + 4 // behind the mask of hooks
		underflowOffset = entryOffset + 4*hooks
		sizeOffset      = underflowOffset + 4*hooks + 4 // behind the number of entries
		maxSize         = 64 << 20
	)
	var info legacyInfo
	if len(b) < sizeOffset+4 {
		return info, fmt.Errorf("%w: a table described in %d bytes", nl.ErrMalformed, len(b))
	}
	for i := range hooks {
		info.entry[i] = binary.NativeEndian.Uint32(b[entryOffset+4*i:])
		info.underflow[i] = binary.NativeEndian.Uint32(b[underflowOffset+4*i:])
	}
	info.size = binary.NativeEndian.Uint32(b[sizeOffset:])
	if info.size > maxSize {
		return info, fmt.Errorf("%w: a table of %d bytes", nl.ErrMalformed, info.size)
	}
	return info, nil
}

// legacyContent is a table of x_tables. A chain's policy is its last rule, with no
// conditions.
type legacyContent struct {
	chains map[string][]foreignRule
	policy uint64 // the handle of FORWARD's
}

// stops says in words what FORWARD does to pods' packets, and nothing if they may
// pass; and before which rule an accept helps, nil for the chain's end.
func (t *legacyContent) stops(p *podPacket) (effect string, by *foreignRule) {
	switch fate := newWalk(p, t.chains).chain(iptablesForward); {
	case fate.how == dropped && fate.by.handle != t.policy:
		return effectOfRule, fate.by
	case fate.how == dropped, fate.how == comesBack && t.policyDrops():
		return effectOfPolicy, returnIn(t.chains[iptablesForward])
	}
	return "", nil
}

// policyDrops is for packets that got to the policy by a return or a goto.
func (t *legacyContent) policyDrops() bool {
	return slices.ContainsFunc(t.chains[iptablesForward], func(r foreignRule) bool {
		return r.handle == t.policy && r.verdict == drops
	})
}

// legacyLayout is what struct ipt_entry and struct ip6t_entry differ in: offsets of
// their members, on machines of 64 bits.
type legacyLayout struct {
	addrLen              int // source, destination and their masks come first
	proto                int
	flags                int
	protoFlag            byte // says that there is a protocol; 0: one that is not zero does
	otherFlags           byte // say that there is another condition
	gotoFlag             byte
	targetOffset, length int
}

func layoutOf(family byte) legacyLayout {
	const linksLen = 4 * ifnameLen // the names of both links, and their masks
	if family == unix.NFPROTO_IPV4 {
		const proto = 4*addr4Len + linksLen
		return legacyLayout{
			addrLen: addr4Len, proto: proto, flags: proto + 2, gotoFlag: 0x02, otherFlags: 0x01, // IPT_F_GOTO, IPT_F_FRAG
			targetOffset: 88, length: 112,
		}
	}
	const proto = 4*addr6Len + linksLen
	return legacyLayout{
		addrLen: addr6Len, proto: proto, flags: proto + 3, gotoFlag: 0x04, otherFlags: 0x02, protoFlag: 0x01, // IP6T_F_GOTO, _TOS, _PROTO
		targetOffset: 140, length: 168,
	}
}

// decodeLegacyTable takes a table apart. Each entry has its own length, and is
// followed by its matches and its target (include/uapi/linux/netfilter/x_tables.h).
func decodeLegacyTable(family byte, info, entries []byte) (*legacyContent, error) {
	head, err := decodeLegacyInfo(info)
	if err != nil {
		return nil, err
	}
	layout := layoutOf(family)
	t := &legacyContent{chains: map[string][]foreignRule{}, policy: uint64(head.underflow[unix.NF_INET_FORWARD])}
	starts := map[uint32]string{}
	for i, name := range []string{"PREROUTING", "INPUT", iptablesForward, "OUTPUT", "POSTROUTING"} {
		starts[head.entry[i]] = name
	}
	var rules []legacyRule
	for offset := 0; offset < len(entries); {
		r, length, err := layout.decode(entries[offset:])
		if err != nil {
			return nil, fmt.Errorf("entry at offset %d: %w", offset, err)
		}
		r.offset = uint32(offset)
		offset += length
		if r.heads != "" {
			starts[uint32(offset)] = r.heads
			continue
		}
		rules = append(rules, r)
	}
	chain := ""
	for i := range rules {
		r := &rules[i]
		if name, ok := starts[r.offset]; ok {
			chain = name
		}
		r.chain, r.handle = chain, uint64(r.offset)
		if r.verdict == jumps || r.verdict == goesTo {
			// A jump to right behind the rule is how no target is put.
			if r.target = starts[r.jump]; r.jump == r.end() {
				r.verdict = goesOn
			}
		}
		t.chains[chain] = append(t.chains[chain], r.foreignRule)
	}
	return t, nil
}

// legacyRule is an entry: a rule, or the head of a chain that a user made.
type legacyRule struct {
	foreignRule
	offset, length uint32
	heads          string // the chain
	jump           uint32 // the offset to go to
}

func (r *legacyRule) end() uint32 { return r.offset + r.length }

func short(what string, length int) error {
	return fmt.Errorf("%w: %s of %d bytes", nl.ErrMalformed, what, length)
}

// decode reads the entry at the beginning of b, and how long it is.
func (l *legacyLayout) decode(b []byte) (legacyRule, int, error) {
	var r legacyRule
	if len(b) < l.length {
		return r, 0, short("an entry", len(b))
	}
	target := int(binary.NativeEndian.Uint16(b[l.targetOffset:]))
	next := int(binary.NativeEndian.Uint16(b[l.targetOffset+2:]))
	if target < l.length || next < target || next > len(b) {
		return r, 0, fmt.Errorf("%w: a target at %d and the next entry at %d of %d bytes", nl.ErrMalformed, target, next, len(b))
	}
	r.length = uint32(next)
	l.header(&r, b)
	if err := l.matches(&r, b[l.length:target]); err != nil {
		return r, 0, err
	}
	if err := l.target(&r, b[target:next], b[l.flags]&l.gotoFlag != 0); err != nil {
		return r, 0, err
	}
	return r, next, nil
}

// header reads the conditions of struct ipt_ip or ip6t_ip6. What inverts them is the
// byte behind the flags, with the same bits for both.
func (l *legacyLayout) header(r *legacyRule, b []byte) {
	const (
		notIn, notOut, notSource = 0x01, 0x02, 0x08 // IPT_INV_*
	)
	inverted := b[l.flags+1]
	add := func(c condition) { r.conditions = append(r.conditions, c) }

	// In this order: source, destination, and the masks of both.
	sourceMask, destMask := b[2*l.addrLen:3*l.addrLen], b[3*l.addrLen:4*l.addrLen]
	if !zero(sourceMask) {
		c := condition{negated: inverted&notSource != 0}
		if prefix, ok := prefixOf(b[:l.addrLen], sourceMask, l.addrLen); ok {
			c.on, c.prefix = onSource, prefix
		}
		add(c)
	}
	if !zero(destMask) {
		add(condition{})
	}
	links := b[4*l.addrLen:]
	for i, on := range []property{onIn, onOut} {
		name, mask := links[i*ifnameLen:][:ifnameLen], links[(2+i)*ifnameLen:][:ifnameLen]
		if zero(mask) {
			continue
		}
		// The mask of a name covers its NUL, and that of "br+" only the "br".
		covered := name[:len(bytes.TrimRight(mask, "\x00"))]
		c := condition{on: on}
		text, _, whole := strings.Cut(string(covered), "\x00")
		c.name, c.wildcard = text, !whole
		c.negated = inverted&[]byte{notIn, notOut}[i] != 0
		add(c)
	}
	proto := binary.NativeEndian.Uint16(b[l.proto:]) != 0
	if l.protoFlag != 0 {
		proto = b[l.flags]&l.protoFlag != 0
	}
	if proto || b[l.flags]&l.otherFlags != 0 {
		add(condition{})
	}
}

// Of struct xt_entry_match and struct xt_entry_target: the size, the name, the
// revision, and then what is its own.
const (
	extensionName   = 2
	extensionHeader = 32
)

// extension reads the name of a match or a target.
func extension(b []byte) string {
	name, _, _ := strings.Cut(string(b[extensionName:extensionHeader-1]), "\x00")
	return name
}

func (l *legacyLayout) matches(r *legacyRule, b []byte) error {
	reader := ruleReader{rule: &r.foreignRule}
	for len(b) > 0 {
		if len(b) < extensionHeader {
			return short("a match", len(b))
		}
		size := int(binary.NativeEndian.Uint16(b))
		if size < extensionHeader || size > len(b) {
			return short("a match", size)
		}
		reader.xtMatch(extension(b), b[extensionHeader:size])
		b = b[size:]
	}
	return nil
}

// target reads the target. One without a name is a verdict: the offset to jump to,
// or if it is negative, -1 - NF_*, and for a return -1 - NF_REPEAT.
func (l *legacyLayout) target(r *legacyRule, b []byte, isGoto bool) error {
	const (
		errorTarget = "ERROR" // XT_ERROR_TARGET: it begins a chain, and ends the table
		xtReturn    = -1 - 4
	)
	if len(b) < extensionHeader+4 {
		return short("a target", len(b))
	}
	switch name := extension(b); name {
	case errorTarget:
		r.heads, _, _ = strings.Cut(string(b[extensionHeader:]), "\x00")
		if r.heads == "" {
			return short("the name of a chain", 0)
		}
	case "":
		switch code := int32(binary.NativeEndian.Uint32(b[extensionHeader:])); {
		case code == xtReturn:
			r.verdict = returns
		case code < 0:
			r.verdict = verdictOf(-1 - expr.VerdictKind(code))
		case isGoto:
			r.verdict, r.jump = goesTo, uint32(code)
		default:
			r.verdict, r.jump = jumps, uint32(code)
		}
	default:
		(&ruleReader{rule: &r.foreignRule}).xtTarget(name)
	}
	return nil
}
