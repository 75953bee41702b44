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

// legacy looks at the tables filter of legacy iptables, which are those of the calling thread's namespace: at the rules
// of FORWARD, in which a jump could accept anything. Nothing traces packets there.
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

// legacyTable has the entries of a table, and where FORWARD begins and its policy is.
type legacyTable struct {
	entries         []byte
	forward, policy int
}

// read reads the table filter; it is empty where there is none. To ask the kernel for that would make it.
func (f *legacyFamily) read() (*legacyTable, error) {
	// Of the thread: /proc/self is the first thread's, in its namespace.
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

// getLegacyTable asks for struct ipt_getinfo and struct ipt_get_entries, which are the same for IPv6.
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
	return &legacyTable{b[headerLen:], int(info.Entry[unix.NF_INET_FORWARD]), int(info.Policy[unix.NF_INET_FORWARD])}, err
}

// forwardChain reads the chain FORWARD: the rules up to that which is its policy.
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

// decode reads an entry, and says how long it is.
func (f *legacyFamily) decode(b []byte, p *packet) (rule, int, error) {
	// The length of a match or a target: its size, its name and its revision. Its own data follow.
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
	rr.legacyTarget(nftnl.Text(b[target+2:target+extensionLen-1]), int32(binary.NativeEndian.Uint32(b[target+extensionLen:])))
	return rr.rule, length, nil
}

// legacyTarget reads a target. One without a name has a verdict, -1 - NF_*, and for a return -1 - NF_REPEAT; others are
// offsets to jump to.
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
