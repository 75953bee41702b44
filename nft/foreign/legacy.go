package foreign

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Of a table of legacy iptables no more is understood than whether its FORWARD drops what
// it does not know, and whether an accept in the table names the bridge, the pods' addresses
// or the mark: that is taken to let them pass. A chain that FORWARD calls for all is looked into.

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
		effect, place, err := legacyStops(f.proto, info, entries, p)
		if err != nil {
			return nil, fmt.Errorf("read what %s -S prints: %w", f.program, err)
		}
		if effect != "" {
			list = append(list, Obstacle{
				Kind: LegacyIPTables, Chain: "chain FORWARD of " + f.program, Effect: effect,
				Remedy: fmt.Sprintf("%s %s -m mark --mark 0x%x/0x%x -j ACCEPT", f.program, place, p.mark, p.mark),
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

// legacyLayout is what struct ipt_entry and struct ip6t_entry differ in, on machines of 64
// bits: offsets of their members. Both addresses come first, then their masks, the names of
// both links, and their masks.
type legacyLayout struct {
	addrLen              int
	inverted             int // the byte of IPT_INV_*, which are the same for both
	targetOffset, length int
}

func layoutOf(family byte) legacyLayout {
	if family == unix.NFPROTO_IPV4 {
		return legacyLayout{addrLen: addr4Len, inverted: 83, targetOffset: 88, length: 112}
	}
	return legacyLayout{addrLen: addr6Len, inverted: 132, targetOffset: 140, length: 168}
}

// legacyEntry is a rule, or the head of a chain of a user's.
type legacyEntry struct {
	header  []byte // struct ipt_entry or ip6t_entry
	matches []byte // struct xt_entry_match, and what is its own, one after the other
	target  []byte // struct xt_entry_target
	layout  legacyLayout
}

// decode reads the entry at the beginning of b, and how long it is.
func (l legacyLayout) decode(b []byte) (legacyEntry, int, error) {
	if len(b) < l.length {
		return legacyEntry{}, 0, fmt.Errorf("%w: an entry of %d bytes", nl.ErrMalformed, len(b))
	}
	target := int(binary.NativeEndian.Uint16(b[l.targetOffset:]))
	next := int(binary.NativeEndian.Uint16(b[l.targetOffset+2:]))
	if target < l.length || next < target+extensionHeader+4 || next > len(b) {
		return legacyEntry{}, 0, fmt.Errorf("%w: a target at %d and the next entry at %d of %d bytes", nl.ErrMalformed, target, next, len(b))
	}
	return legacyEntry{b[:l.length], b[l.length:target], b[target:next], l}, next, nil
}

// extensionHeader is the size of a match or a target, its name and its revision. What is its
// own follows.
const extensionHeader = 32

// verdict of a target without a name is -1 - NF_*, and for a return -1 - NF_REPEAT; others
// are offsets to jump to.
func (e legacyEntry) verdict() verdict {
	const drop, accept, repeat = 0, 1, 4
	name, _, _ := bytes.Cut(e.target[2:extensionHeader], []byte{0})
	switch code := int32(binary.NativeEndian.Uint32(e.target[extensionHeader:])); {
	case string(name) == "REJECT", len(name) == 0 && code == -1-drop:
		return drops
	case len(name) == 0 && code == -1-accept:
		return accepts
	case len(name) == 0 && code == -1-repeat:
		return returns
	}
	return goesOn
}

// legacyCalls follows rules into the chains that they call.
type legacyCalls struct {
	entries []byte
	layout  legacyLayout
	steps   int // how many more entries it looks at
}

// fate is what becomes of a packet by a rule for all, before the entry next, as far as rules for all say;
// goesOn is that it comes to that one.
func (c *legacyCalls) fate(e legacyEntry, next int) verdict {
	to := int32(binary.NativeEndian.Uint32(e.target[extensionHeader:]))
	if v := e.verdict(); v != goesOn || e.target[2] != 0 || to < 0 || int(to) == next {
		return v // its target is an extension, or nothing
	}
	for offset := int(to); offset < len(c.entries) && c.steps > 0; c.steps-- {
		in, length, err := c.layout.decode(c.entries[offset:])
		if err != nil {
			return goesOn
		}
		offset += length
		if in.goesTo() {
			return goesOn // what follows may be out of its way
		}
		if !in.isForAll() {
			continue
		}
		switch v := c.fate(in, offset); v {
		case drops, accepts:
			return v
		case returns:
			return goesOn
		}
	}
	return goesOn
}

// isForAll says that there is no condition.
func (e legacyEntry) isForAll() bool {
	const cache = 4 // behind what the conditions are about, before the offset
	return len(e.matches) == 0 && zero(e.header[:e.layout.targetOffset-cache])
}

// goesTo says that nothing comes back from the chain that the rule calls: IPT_F_GOTO, IP6T_F_GOTO.
func (e legacyEntry) goesTo() bool {
	flag := byte(0x02)
	if e.layout.addrLen == addr6Len {
		flag = 0x04
	}
	return e.header[e.layout.inverted-1]&flag != 0
}

// letsPass says that the rule is about the bridge, the pods or the mark, and does not
// drop.
func (e legacyEntry) letsPass(p *podPacket) bool {
	const notIn, notSource = 0x01, 0x08
	if v := e.verdict(); v == drops || v == returns {
		return false
	}
	n, inverted := e.layout.addrLen, e.header[e.layout.inverted]
	source, ok := prefixOf(e.header[:n], e.header[2*n:3*n], n)
	if ok && source.Bits() > 0 && p.meets(&condition{on: onSource, prefix: source, negated: inverted&notSource != 0}) >= likely {
		return true
	}
	link, mask := e.header[4*n:][:ifnameLen], e.header[4*n+2*ifnameLen:][:ifnameLen]
	if !zero(mask) {
		named := true
		for i, b := range interfaceName(p.bridge) {
			named = named && (b^link[i])&mask[i] == 0
		}
		return named == (inverted&notIn == 0)
	}
	// Of revision 1, struct xt_mark_mtinfo1: the mark, the mask, and whether it is inverted.
	match := append(make([]byte, 0, extensionHeader), "mark"...)
	match = append(match[:extensionHeader-3], 1)
	for _, mask := range []uint32{p.mark, 0xffffffff} {
		info := binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, p.mark), mask)
		if bytes.Contains(e.matches, slices.Concat(match, info, []byte{0})) {
			return true
		}
	}
	return false
}

// legacyStops says in words what FORWARD does to pods' packets, and nothing if they may pass;
// and where iptables puts an accept that helps.
func legacyStops(family byte, info, entries []byte, p *podPacket) (effect, place string, _ error) {
	head, err := decodeLegacyInfo(info)
	if err != nil {
		return "", "", err
	}
	layout := layoutOf(family)
	first, policy := head.entry[unix.NF_INET_FORWARD], head.underflow[unix.NF_INET_FORWARD]
	rules, passed := 0, false
	calls := legacyCalls{entries, layout, 1 << 14}
	for offset := 0; offset < len(entries); {
		e, length, err := layout.decode(entries[offset:])
		if err != nil {
			return "", "", fmt.Errorf("entry at offset %d: %w", offset, err)
		}
		switch at := uint32(offset); {
		case at == policy && effect == "" && e.verdict() == drops:
			effect = effectOfPolicy
		case at >= first && at < policy && place == "":
			rules++
			v := goesOn
			if e.isForAll() {
				v = calls.fate(e, offset+length)
			}
			passed = passed || e.letsPass(p) || v == accepts
			if v == drops || v == returns {
				place = fmt.Sprintf("-I %s %d", iptablesForward, rules)
				if v == drops {
					effect = effectOfRule
				}
			}
		case at > slices.Max(head.underflow[:]):
			passed = passed || e.letsPass(p) // the chains of users come last
		}
		offset += length
	}
	if passed || effect == "" {
		return "", "", nil
	}
	return effect, cmp.Or(place, "-A "+iptablesForward), nil
}
