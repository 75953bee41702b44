package foreign

import (
	"encoding/binary"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// legacyFamily holds the differences between legacy iptables for IPv4 and for IPv6 on 64-bit machines
// (include/uapi/linux/netfilter_ipv4/ip_tables.h and …_ipv6/ip6_tables.h). The numbers of the socket options are
// equal.
type legacyFamily struct {
	proto         byte   // family of nf_tables
	names         string // the file in /proc/net that lists the tables
	domain, level int
	program       string
	about, entry  int // lengths in bytes: the part with the basic conditions, and an entry without matches and target
}

func legacyFamilies() [2]legacyFamily {
	return [2]legacyFamily{
		{unix.NFPROTO_IPV4, "ip_tables_names", unix.AF_INET, unix.SOL_IP, "iptables-legacy", 84, 112},
		{unix.NFPROTO_IPV6, "ip6_tables_names", unix.AF_INET6, unix.SOL_IPV6, "ip6tables-legacy", 136, 168},
	}
}

// legacy returns the obstacles in the table filter of legacy iptables, in the calling thread's network namespace. It
// reads only the rules of FORWARD itself. A chain that FORWARD calls counts as unknown, and could accept packets.
func (c *Conn) legacy(path Path) ([]Obstacle, error) {
	var list []Obstacle
	for _, f := range legacyFamilies() {
		if !path.has(f.proto) {
			continue
		}

		var forward *base
		table, err := f.read()
		if err == nil {
			forward, err = f.forwardChain(table, &packet{mark: c.mark, known: c.mark})
		}

		if err != nil {
			return nil, &tombolo.OpError{Op: "read legacy table", Object: f.program + " -t " + iptablesTable, Err: err}
		}

		if o, number := forward.obstacle("chain FORWARD of " + f.program); o != nil {
			o.Legacy, o.Remedy = true, acceptMark(f.program, number, c.mark)
			list = append(list, *o)
		}
	}

	return list, nil
}

// legacyTable holds the entries of a table. forward and policy are the offsets of the chain FORWARD and of its
// policy.
type legacyTable struct {
	entries         []byte
	forward, policy int
}

// read returns the table filter. If the table does not exist, or /proc cannot be read, it returns an empty table. It
// looks in /proc first, since a request for the table would create it.
func (f *legacyFamily) read() (*legacyTable, error) {
	// Use thread-self, since /proc/self is the first thread, which may be in another network namespace.
	names, err := os.ReadFile("/proc/thread-self/net/" + f.names)
	if err != nil || !slices.Contains(strings.Fields(string(names)), iptablesTable) {
		return &legacyTable{}, nil
	}
	fd, err := unix.Socket(f.domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return getLegacyTable(fd, f.level)
}

// getLegacyTable reads the table filter, with the socket options for struct ipt_getinfo and struct ipt_get_entries.
// IPv6 has the same options, with the same structs.
func getLegacyTable(fd, level int) (*legacyTable, error) {
	const (
		getInfo    = 64 // IPT_SO_GET_INFO, IP6T_SO_GET_INFO
		getEntries = 65 // IPT_SO_GET_ENTRIES, IP6T_SO_GET_ENTRIES
		nameLen    = 32 // XT_TABLE_MAXNAMELEN
		headerLen  = nameLen + 2*4
	)
	var info struct {
		Name          [nameLen]byte
		Hooks         uint32
		Entry, Policy [unix.NF_INET_NUMHOOKS]uint32
		Entries, Size uint32
	}
	b := make([]byte, binary.Size(info))
	copy(b, iptablesTable)
	if err := nl.SocketOption(fd, level, getInfo, b); err != nil {
		return nil, err
	}

	if _, err := binary.Decode(b, binary.NativeEndian, &info); err != nil {
		return nil, err
	}

	b = make([]byte, headerLen+int(info.Size))
	copy(b, iptablesTable)
	binary.NativeEndian.PutUint32(b[nameLen:], info.Size)
	err := nl.SocketOption(fd, level, getEntries, b)
	return &legacyTable{b[headerLen:], int(info.Entry[unix.NF_INET_FORWARD]), int(info.Policy[unix.NF_INET_FORWARD])},
		err
}

// forwardChain parses the chain FORWARD: its rules, and its policy, which is the last entry.
func (f *legacyFamily) forwardChain(t *legacyTable, p *packet) (*base, error) {
	b := &base{policy: accepts}
	for offset := t.forward; offset <= t.policy && offset < len(t.entries); {
		r, length, err := f.decode(t.entries[offset:], p)
		if err != nil {
			return nil, err
		}

		switch {
		case offset < t.policy:
			b.rules = append(b.rules, r)
		case r.verdict == drops:
			b.policy = drops
		}
		offset += length
	}

	return b, nil
}

// decode parses the entry at the beginning of b, and evaluates it for the packet p. It returns the rule and the length
// of the entry in bytes.
func (f *legacyFamily) decode(b []byte, p *packet) (rule, int, error) {
	// extensionLen is the length of a match or a target before its own data: size, name and revision.
	const extensionLen = 32
	if len(b) < f.entry {
		return rule{}, 0, nl.ErrMalformed
	}

	target := int(binary.NativeEndian.Uint16(b[f.about+4:]))
	length := int(binary.NativeEndian.Uint16(b[f.about+6:]))
	if target < f.entry || length < target+extensionLen+4 || length > len(b) {
		return rule{}, 0, nl.ErrMalformed
	}

	rr := ruleReader{rule: rule{conditional: !isZero(b[:f.about])}, packet: p}
	for matches := b[f.entry:target]; len(matches) >= extensionLen; {
		size := int(binary.NativeEndian.Uint16(matches))
		if size < extensionLen || size > len(matches) {
			return rule{}, 0, nl.ErrMalformed
		}
		rr.xtMatch(nftnl.Text(matches[2:extensionLen-1]), matches[extensionLen:size])
		matches = matches[size:]
	}

	rr.legacyTarget(nftnl.Text(b[target+2:target+extensionLen-1]),
		int32(binary.NativeEndian.Uint32(b[target+extensionLen:])))
	return rr.rule, length, nil
}

// legacyTarget evaluates a target. A target without a name is a verdict: -1 - NF_*, or -1 - NF_REPEAT for a return. A
// code that is not negative is the offset of a chain that the rule calls or, for a rule without a verdict, of the next
// rule. Both count as opaque.
func (rr *ruleReader) legacyTarget(name string, code int32) {
	switch kind := -1 - expr.VerdictKind(code); {
	case name != "":
		rr.xtTarget(name)
	case kind == expr.VerdictDrop:
		rr.verdict = drops
	case kind == expr.VerdictAccept:
		rr.verdict = accepts
	case kind == expr.VerdictRepeat:
		rr.verdict = returns
	default:
		rr.opaque = true
	}
}
