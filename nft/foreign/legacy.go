package foreign

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Of a table of legacy iptables no more is read than the rules of FORWARD, and of these no more than of others: our mark
// is the only condition that is understood, and a jump could accept anything. Nothing traces packets there.

// legacyFamily is what legacy iptables of IPv4 and of IPv6 differ in (include/uapi/linux/netfilter_ipv4/ip_tables.h,
// …_ipv6/ip6_tables.h), on machines of 64 bits. The numbers of the socket options are the same.
type legacyFamily struct {
	proto         byte // of nf_tables
	names         string
	domain, level int
	program       string
	about, entry  int // the lengths of what the conditions are about, and of an entry without matches and target
}

func legacyFamilies() [2]legacyFamily {
	return [2]legacyFamily{
		{unix.NFPROTO_IPV4, "ip_tables_names", unix.AF_INET, unix.SOL_IP, "iptables-legacy", 84, 112},
		{unix.NFPROTO_IPV6, "ip6_tables_names", unix.AF_INET6, unix.SOL_IPV6, "ip6tables-legacy", 136, 168},
	}
}

// Legacy looks at the tables filter of legacy iptables, which are those of the calling thread's namespace. It needs
// CAP_NET_ADMIN there.
func Legacy(mark uint32, path Path) ([]Obstacle, error) {
	var list []Obstacle
	for _, f := range legacyFamilies() {
		if !path.has(f.proto) {
			continue
		}
		table, err := f.read()
		if err != nil {
			return nil, &tombolo.OpError{Op: "read legacy table", Object: f.program + " -t " + iptablesTable, Err: err}
		}
		forward, err := f.forwardChain(table, &packet{mark: mark, marked: true})
		if err != nil {
			return nil, fmt.Errorf("read what %s -S prints: %w", f.program, err)
		}
		if o := forward.obstacle("chain FORWARD of " + f.program); o != nil {
			place := "-A " + iptablesForward
			if at, _ := forward.end(0); at < len(forward.rules) {
				place = fmt.Sprintf("-I %s %d", iptablesForward, at+1)
			}
			o.Legacy, o.Remedy = true, fmt.Sprintf("%s %s -m mark --mark 0x%x/0x%x -j ACCEPT", f.program, place, mark, mark)
			list = append(list, *o)
		}
	}
	return list, nil
}

// legacyTable has the entries of a table, and where FORWARD begins and its policy is.
type legacyTable struct {
	entries         []byte
	forward, policy int
}

// read reads the table filter; it is nil where there is none. To ask the kernel for that would make it.
func (f *legacyFamily) read() (*legacyTable, error) {
	// Of the thread: /proc/self is the first thread's, in its namespace.
	names, err := os.ReadFile("/proc/thread-self/net/" + f.names)
	if err != nil || !slices.Contains(strings.Fields(string(names)), iptablesTable) {
		return nil, nil
	}
	fd, err := unix.Socket(f.domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return getLegacyTable(fd, f.level)
}

// getLegacyTable asks for struct ipt_getinfo and struct ipt_get_entries, which are the same for IPv6.
func getLegacyTable(fd, level int) (*legacyTable, error) {
	const (
		getInfo    = 64 // IPT_SO_GET_INFO, IP6T_SO_GET_INFO
		getEntries = 65 // IPT_SO_GET_ENTRIES, IP6T_SO_GET_ENTRIES

		nameLen   = 32                                   // XT_TABLE_MAXNAMELEN
		forwardAt = nameLen + 4*(1+unix.NF_INET_FORWARD) // behind the mask of hooks
		policyAt  = forwardAt + 4*unix.NF_INET_NUMHOOKS
		sizeAt    = nameLen + 4*(2+2*unix.NF_INET_NUMHOOKS) // behind the number of entries
		headerLen = nameLen + 2*4                           // the name, the size, padding
	)
	info := make([]byte, sizeAt+4)
	copy(info, iptablesTable)
	if err := nl.SocketOption(fd, level, getInfo, info); err != nil {
		return nil, err
	}
	number := func(at int) int { return int(binary.NativeEndian.Uint32(info[at:])) }
	entries := make([]byte, headerLen+number(sizeAt))
	copy(entries, iptablesTable)
	copy(entries[nameLen:], info[sizeAt:])
	err := nl.SocketOption(fd, level, getEntries, entries)
	return &legacyTable{entries[headerLen:], number(forwardAt), number(policyAt)}, err
}

// forwardChain reads the chain FORWARD: the rules up to that which is its policy. Without a table nothing is dropped.
func (f *legacyFamily) forwardChain(t *legacyTable, p *packet) (*base, error) {
	b := &base{chain: func(string) []rule { return nil }, policy: passes}
	if t == nil {
		return b, nil
	}
	for offset := t.forward; offset <= t.policy && offset < len(t.entries); {
		r, next, err := f.decode(t.entries, offset, p)
		if err != nil {
			return nil, fmt.Errorf("entry at offset %d: %w", offset, err)
		}
		switch {
		case offset < t.policy:
			b.rules = append(b.rules, r)
		case r.verdict == drops:
			b.policy = stops
		}
		offset = next
	}
	return b, nil
}

// extensionLen is the length of a match or a target: its size, its name and its revision. What is its own follows.
const extensionLen = 32

func extensionName(b []byte) string {
	name, _, _ := bytes.Cut(b[2:extensionLen-1], []byte{0})
	return string(name)
}

// decode reads the entry at an offset of a table, and says where the next one is.
func (f *legacyFamily) decode(table []byte, offset int, p *packet) (rule, int, error) {
	b := table[offset:]
	if len(b) < f.entry {
		return rule{}, 0, nl.ErrMalformed
	}
	target := int(binary.NativeEndian.Uint16(b[f.about+4:]))
	next := int(binary.NativeEndian.Uint16(b[f.about+6:]))
	if target < f.entry || next < target+extensionLen+4 || next > len(b) {
		return rule{}, 0, nl.ErrMalformed
	}
	rr := ruleReader{rule: &rule{conditional: !zero(b[:f.about])}, packet: p}
	for matches := b[f.entry:target]; len(matches) >= extensionLen; {
		size := int(binary.NativeEndian.Uint16(matches))
		if size < extensionLen || size > len(matches) {
			return rule{}, 0, nl.ErrMalformed
		}
		rr.xtMatch(extensionName(matches), matches[extensionLen:size])
		matches = matches[size:]
	}
	rr.legacyTarget(b[target:next], offset+next)
	return *rr.rule, offset + next, nil
}

// legacyTarget reads a target. One without a name has a verdict, -1 - NF_*, and for a return -1 - NF_REPEAT; others are
// offsets to jump to: that of the next entry is a rule's without a target.
func (rr *ruleReader) legacyTarget(target []byte, next int) {
	const drop, accept, repeat = 0, 1, 4
	code := int32(binary.NativeEndian.Uint32(target[extensionLen:]))
	switch name := extensionName(target); {
	case name != "":
		rr.xtTarget(name)
	case code == -1-drop:
		rr.verdict = drops
	case code == -1-accept:
		rr.verdict = accepts
	case code == -1-repeat:
		rr.verdict = returns
	case int(code) != next:
		rr.opaque = true
	}
}
