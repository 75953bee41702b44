package foreign

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Of a table of legacy iptables no more is read than the rules of FORWARD, and of these no more than of others: our mark
// is the only condition that is understood, and a jump could accept anything. Nothing traces packets there.

// legacyObstacles looks at the tables filter of legacy iptables.
func (c *Conn) legacyObstacles(ctx context.Context, ns *netns.NS, path Path) ([]Obstacle, error) {
	var list []Obstacle
	for _, f := range legacyFamilies() {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if !path.has(f.proto) {
			continue
		}
		info, entries, found, err := readLegacyFilter(ns, f)
		if err != nil {
			return nil, err
		}
		if !found {
			continue
		}
		forward, err := legacyForward(f.proto, info, entries, &packet{mark: c.mark, known: c.mark})
		if err != nil {
			return nil, fmt.Errorf("read what %s -S prints: %w", f.program, err)
		}
		if at, stopped, unsure := forward.stopsPods(); stopped {
			place := "-A " + iptablesForward
			if at < len(forward.rules) {
				place = fmt.Sprintf("-I %s %d", iptablesForward, at+1)
			}
			list = append(list, Obstacle{
				Kind: LegacyIPTables, Chain: "chain FORWARD of " + f.program, Effect: forward.effect(at), Maybe: unsure,
				Remedy: fmt.Sprintf("%s %s -m mark --mark 0x%x/0x%x -j ACCEPT", f.program, place, c.mark, c.mark),
			})
		}
	}
	return list, nil
}

// legacyForward reads the chain FORWARD: the rules up to that which is its policy.
func legacyForward(family byte, info, entries []byte, p *packet) (*base, error) {
	head, err := decodeLegacyInfo(info)
	if err != nil {
		return nil, err
	}
	layout := layoutOf(family)
	b := &base{chain: func(string) []rule { return nil }, policy: passes}
	end := int(head.underflow[unix.NF_INET_FORWARD])
	for offset := int(head.entry[unix.NF_INET_FORWARD]); offset <= end && offset < len(entries); {
		r, length, err := layout.decode(entries[offset:], offset, p)
		if err != nil {
			return nil, fmt.Errorf("entry at offset %d: %w", offset, err)
		}
		if offset == end && r.verdict == drops {
			b.policy = stops
		}
		if offset < end {
			b.rules = append(b.rules, r)
		}
		offset += length
	}
	return b, nil
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
// bits: how long what the conditions are about is, the offset of a member, and the size.
type legacyLayout struct{ about, targetOffset, length int }

func layoutOf(family byte) legacyLayout {
	if family == unix.NFPROTO_IPV4 {
		return legacyLayout{about: 84, targetOffset: 88, length: 112}
	}
	return legacyLayout{about: 136, targetOffset: 140, length: 168}
}

// extensionHeader is the size of a match or a target: its size, its name and its revision. What is its
// own follows.
const extensionHeader = 32

// extensionName is the name of one.
func extensionName(b []byte) string {
	name, _, _ := bytes.Cut(b[2:extensionHeader-1], []byte{0})
	return string(name)
}

// decode reads the entry at the beginning of b, which is at an offset of the table, and how long it is.
func (l legacyLayout) decode(b []byte, offset int, p *packet) (rule, int, error) {
	if len(b) < l.length {
		return rule{}, 0, fmt.Errorf("%w: an entry of %d bytes", nl.ErrMalformed, len(b))
	}
	target := int(binary.NativeEndian.Uint16(b[l.targetOffset:]))
	next := int(binary.NativeEndian.Uint16(b[l.targetOffset+2:]))
	if target < l.length || next < target+extensionHeader+4 || next > len(b) {
		return rule{}, 0, fmt.Errorf("%w: a target at %d and the next entry at %d of %d bytes", nl.ErrMalformed, target, next, len(b))
	}
	rr := ruleReader{rule: &rule{conditional: !zero(b[:l.about])}, packet: p}
	for matches := b[l.length:target]; len(matches) > 0; {
		size := extensionHeader
		if len(matches) >= size {
			size = int(binary.NativeEndian.Uint16(matches))
		}
		if size < extensionHeader || size > len(matches) {
			return rule{}, 0, fmt.Errorf("%w: a match of %d bytes, where there are %d", nl.ErrMalformed, size, len(matches))
		}
		rr.xtMatch(extensionName(matches), matches[extensionHeader:size])
		matches = matches[size:]
	}
	rr.legacyTarget(b[target:next], offset+next)
	return *rr.rule, next, nil
}

// legacyTarget reads a target. One without a name has a verdict, -1 - NF_*, and for a return -1 - NF_REPEAT; others are
// offsets to jump to: that of the next entry is a rule's without a target.
func (rr *ruleReader) legacyTarget(target []byte, next int) {
	const drop, accept, queue, repeat = 0, 1, 3, 4
	code := int32(binary.NativeEndian.Uint32(target[extensionHeader:]))
	switch name := extensionName(target); {
	case name != "":
		rr.xtTarget(name)
	case code == -1-drop:
		rr.verdict = drops
	case code == -1-accept:
		rr.verdict = accepts
	case code == -1-queue:
		rr.verdict = queues
	case code == -1-repeat:
		rr.verdict = returns
	case int(code) != next:
		rr.opaque = true
	}
}
